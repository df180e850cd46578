"""Units in pieces: one code for all layers, one packed copy of weights for all graphs.

The pieces run as they are here, but for one test: what is tested is how they are cut and joined.
"""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from draftkit.config import SamplingConfig
from draftkit.decoding import decoder as decoder_module
from draftkit.decoding import graphs, pieces
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer
from draftkit.decoding.state import RoundView
from draftkit.models.adapter import CausalAdapter
from tests import tiny
from tests.decoding.driving import DRAFT, Answer, assert_same, drive, fresh_graphs, request

LAYERS = 2
NUCLEUS = SamplingConfig(temperature=0.7, top_p=0.9)


class Zeros(Proposer):
    """Token 0, again and again."""

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        tokens = view.length.new_zeros(len(view.length), gamma)
        return Proposal(tokens, None, lengths=torch.full_like(view.length, gamma))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The pieces that were compiled; every layer is heavy, no target small."""
    found: list[Any] = []

    def as_it_is(piece: Any, examples: list[Any]) -> Any:
        found.append(piece)
        return piece.forward

    monkeypatch.setattr(pieces, "compile_fx", as_it_is)
    monkeypatch.setattr(pieces, "LAYER_BYTES", 0)
    monkeypatch.setattr(decoder_module, "FREEZE_BYTES", 0)
    monkeypatch.setattr(pieces, "_code", {})
    if not graphs.can_pack(torch.device("cpu")):  # the processor lacks half precision
        ops: Any = torch.ops.mkldnn
        monkeypatch.setattr(ops, "_reorder_linear_weight", torch.clone)
        monkeypatch.setattr(ops, "_linear_pointwise", lambda x, w, *_: nn.functional.linear(x, w))
    monkeypatch.setattr(decoder_module, "can_pack", lambda device: True)
    with fresh_graphs():
        yield found


def target(dtype: torch.dtype = torch.bfloat16) -> CausalAdapter:
    model: Any = tiny.model(num_hidden_layers=LAYERS)
    model.to(dtype)
    made = CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE)
    made.requires_grad_(False)
    return made


def played(target: CausalAdapter, sampling: SamplingConfig, *, compiled: bool) -> list[Answer]:
    decoder = Decoder(target, slots=1, capacity=64, compiled=compiled)
    decoder.attach(DRAFT, Zeros())
    return drive(decoder, [request([1, 2, 3], gamma=2, new=8, sampling=sampling)])


def texts(target: CausalAdapter, *, compiled: bool = True) -> list[list[int]]:
    return [answer.text for answer in played(target, NUCLEUS, compiled=compiled)]


def check(target: CausalAdapter, sampling: SamplingConfig = NUCLEUS) -> None:
    expected = played(target, sampling, compiled=False)
    assert_same(played(target, sampling, compiled=True), expected, atol=1e-5)


def test_layers_share_code_and_another_temperature_shares_it_too(made: list[Any]) -> None:
    model = target(dtype=torch.float32)
    check(model)
    # A proposal, what stands before the layers, a layer, what stands behind them.
    assert len(made) == 4
    check(model, SamplingConfig(temperature=0.0))
    assert len(made) <= 4 + 3  # no layer anew


def test_half_weights_are_packed_once_for_all_graphs_and_go_with_the_model(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real, packed = target(), torch.ops.mkldnn._reorder_linear_weight, []

    def noted(weight: Any) -> Any:
        made = real(weight)
        packed.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", noted)
    played(model, NUCLEUS, compiled=True)
    # Joined: queries, keys and values; gate and up. Alone: output and down; and the head.
    assert len(packed) == 4 * LAYERS + 1
    played(model, SamplingConfig(temperature=0.0), compiled=True)
    assert len(packed) == 4 * LAYERS + 1
    del model
    gc.collect()
    assert not any(one() is not None for one in packed)


def test_weights_that_are_written_to_are_packed_anew(made: list[Any]) -> None:
    model = target()
    first = texts(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.3)
    assert texts(model) == texts(model, compiled=False) != first


def test_each_drafter_of_one_shape_proposes_as_its_own_weights_do_and_so_after_a_swap(
    made: list[Any],
) -> None:
    model, draft, other = target(), target(), target()
    with torch.no_grad():
        for factor, adapter in ((1.0, draft), (1.3, other)):  # written to as often
            for weight in adapter.parameters():
                weight.mul_(factor)

    def proposed(proposer: DraftModelProposer, *, compiled: bool) -> list[Any]:
        decoder = Decoder(model, slots=1, capacity=64, compiled=compiled)
        decoder.attach(DRAFT, proposer)
        (answer,) = drive(decoder, [request([1, 2, 3], gamma=2, new=8)])
        return [fact[1] for fact in answer.facts]

    proposer = DraftModelProposer(draft)
    before = proposed(proposer, compiled=True)
    others = proposed(DraftModelProposer(other), compiled=False)
    assert proposed(DraftModelProposer(other), compiled=True) == others != before
    assert proposed(proposer, compiled=True) == before
    proposer.swap({name: weight.clone() for name, weight in other.weights().items()}, "2")
    assert proposed(proposer, compiled=True) == others


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_pieces_as_machine_code_give_what_eager_code_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LAYER_BYTES", 0)
    monkeypatch.setattr(decoder_module, "FREEZE_BYTES", 0)
    with fresh_graphs():
        for dtype in (torch.float32, torch.bfloat16):
            model = target(dtype=dtype)
            for sampling in (NUCLEUS, SamplingConfig(temperature=0.0)):
                eager = played(model, sampling, compiled=False)
                fast = played(model, sampling, compiled=True)
                assert [answer.text for answer in fast] == [answer.text for answer in eager]
