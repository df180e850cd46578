"""A key holds all that code depends on: compiled rounds equal eager ones whatever changes.

No guard is checked when a graph runs. Here one thing after the other changes in one process, with
graphs shared on purpose.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding import decoder as decoder_module
from draftkit.decoding import graphs
from draftkit.decoding.decoder import Decoder, packed_copies
from draftkit.decoding.proposers import DraftModelProposer, Proposal
from draftkit.decoding.state import Request, RoundView
from draftkit.models.adapter import CausalAdapter
from draftkit.theory import noise
from tests import tiny
from tests.decoding.driving import (
    DRAFT,
    SMALL,
    Answer,
    Strict,
    assert_same,
    drive,
    request,
    strict_compiler,
)
from tests.decoding.mutants import CautiousProposer
from tests.tabular import TabularAdapter, random_adapter, relative

EXACT = 1e-10
GREEDY = SamplingConfig(temperature=0.0)


# What a unit depends on


def other_noise(**key: Any) -> Tensor:
    """Noise of another kind."""
    return 1 - 2**-52 - noise.uniform(**key)


class Shifted(TabularAdapter):
    """A model of another kind: its logits are those of the next token but one id."""

    def step(self, tokens: Tensor, *, positions: Tensor, cache: Any, last: int = 0) -> Tensor:
        return super().step(tokens, positions=positions, cache=cache, last=last).roll(1, -1)


class Single(TabularAdapter):
    """A table of single precision."""

    def __init__(self, table: Tensor, memory: Tensor) -> None:
        super().__init__(table, memory)
        self.table, self.memory = self.table.float(), self.memory.float()


def same(model: TabularAdapter) -> TabularAdapter:
    return model


def shifted(model: TabularAdapter) -> TabularAdapter:
    return Shifted(model.table, model.memory)


def single(model: TabularAdapter) -> TabularAdapter:
    return Single(model.table, model.memory)


Kind = Callable[[TabularAdapter], TabularAdapter]


@functools.cache
def target_of(kind: Kind, vocabulary: int) -> TabularAdapter:
    """One object each, so that its graphs are shared by decoders."""
    return kind(random_adapter(vocabulary, 1))


@dataclass(frozen=True)
class Case:
    """One setting of everything that the units of a round depend on."""

    prompts: tuple[int, ...] = (3, 2, 5, 4, 6) * 2  # their lengths
    slots: int = 16
    capacity: int = 520  # more than twice the first number of visible slots
    gamma: int = 2
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eos: tuple[int, ...] = (7,)
    verification: str = "speculative"
    noise: Callable[..., Tensor] = noise.uniform
    proposer: type[DraftModelProposer] = DraftModelProposer
    tokens: str = "sampled"
    vocabulary: int = 8
    target: Kind = same
    draft: Kind = same
    draft_seed: int = 2
    seed: int = 0
    new: int = 30

    def play(self, *, compiled: bool) -> list[Answer]:
        """A few rounds of a fresh decoder."""
        target = target_of(self.target, self.vocabulary)
        decoder = Decoder(
            target,
            slots=self.slots,
            capacity=self.capacity,
            eos_token_ids=self.eos,
            verification=self.verification,
            noise_function=self.noise,
            compiled=compiled,
        )
        draft = self.draft(relative(random_adapter(self.vocabulary, 1), self.draft_seed))
        decoder.attach(DRAFT, self.proposer(draft, tokens=self.tokens))
        requests = [self.request(row, n) for row, n in enumerate(self.prompts)]
        return drive(decoder, requests, stays=dict.fromkeys(range(len(requests)), 3))

    def request(self, row: int, length: int) -> Request:
        prompt = [(3 * n + row) % 7 for n in range(length)]
        return request(
            prompt, new=self.new, gamma=self.gamma, sampling=self.sampling, row=row, seed=self.seed
        )

    def check(self) -> list[Answer]:
        """Compiled equals eager; returns the answers."""
        eager = self.play(compiled=False)
        assert_same(self.play(compiled=True), eager, atol=EXACT)
        return eager


BASE = Case()
OTHER_CODE: dict[str, Case] = {
    "batch": replace(BASE, prompts=(3,)),
    "slots": replace(BASE, slots=14),
    "capacity": replace(BASE, capacity=521),
    "visible slots": replace(BASE, prompts=(260, 3, 2, 5, 6, 7)),
    "gamma": replace(BASE, gamma=3),
    "plain": replace(BASE, gamma=0),
    "ends of text": replace(BASE, eos=(7, 1, 2)),
    "top-k": replace(BASE, sampling=SamplingConfig(top_k=2)),
    "top-p": replace(BASE, sampling=SamplingConfig(top_p=0.6)),
    "penalty": replace(BASE, sampling=SamplingConfig(repetition_penalty=1.7)),
    "greedy": replace(BASE, sampling=GREEDY),
    "block verification": replace(BASE, verification="block"),
    "match verification": replace(BASE, verification="match"),
    "noise": replace(BASE, noise=other_noise),
    "kind of proposer": replace(BASE, proposer=CautiousProposer),
    "argmax proposals": replace(BASE, tokens="argmax"),
    "vocabulary": replace(BASE, vocabulary=9),
    "kind of draft": replace(BASE, draft=shifted),
    "precision of the draft": replace(BASE, draft=single),
    "kind of target": replace(BASE, target=shifted),
}
SAME_CODE: dict[str, Case] = {
    "lengths": replace(BASE, prompts=(17, 9) * 5),
    "one-token prompts": replace(BASE, prompts=(1,) * 12),
    "fillers": replace(BASE, prompts=(3, 2, 5, 4, 6) * 3),
    "rows that join and leave": replace(BASE, prompts=tuple(range(1, 8)) * 6),
    "seed": replace(BASE, seed=5),
    "temperature": replace(BASE, sampling=SamplingConfig(temperature=0.6)),
    "which ends of text": replace(BASE, eos=(2,)),
    "limit": replace(BASE, new=2),
    "weights of the draft": replace(BASE, draft_seed=3),
}


@pytest.fixture(scope="module")
def strict() -> Iterator[Strict]:
    """A process in which `BASE` has been compiled, also for the few rows that it shrinks to."""
    with strict_compiler() as backend, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BATCHES", (2, 16))  # few sizes: code takes time to make
        for made, case in ((2, BASE), (4, replace(BASE, prompts=(3,)))):  # of both sizes
            case.check()
            assert backend.made == made
        yield backend
        target_of.cache_clear()


@pytest.mark.parametrize("case", SAME_CODE.values(), ids=SAME_CODE)
def test_contents_of_tensors_are_read_where_they_are(case: Case, strict: Strict) -> None:
    made = strict.made
    case.check()
    assert strict.made == made


@pytest.mark.parametrize("case", OTHER_CODE.values(), ids=OTHER_CODE)
def test_all_else_is_in_the_key(case: Case, strict: Strict) -> None:
    """Each would get the code of `BASE` if the key missed it, and give other answers."""
    case.check()


# Weights


class Constant(TabularAdapter):
    """A table that says of itself whether it changes."""

    is_constant = True


def test_only_constant_weights_are_frozen_and_opened_ones_are_read_anew(strict: Strict) -> None:
    def constant(model: TabularAdapter) -> TabularAdapter:
        return Constant(model.table, model.memory)

    case = replace(BASE, target=constant)
    target: Any = target_of(constant, case.vocabulary)
    made = strict.made
    case.check()
    assert strict.frozen[made:] == [True]
    target.is_constant = False
    target.table.mul_(0.5)  # a step of training
    first = case.check()
    target.table.mul_(0.5)
    assert [a.text for a in case.check()] != [a.text for a in first]
    assert strict.frozen[made:] == [True, False]


def test_only_small_targets_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.adapter(**SMALL)
    assert packed_copies(target) == 0
    target.requires_grad_(False)
    monkeypatch.setattr(decoder_module, "FREEZE_BYTES", 3 * 2 * target.weight_bytes)
    assert packed_copies(target) == 3
    monkeypatch.setattr(decoder_module, "FREEZE_BYTES", 2 * target.weight_bytes - 1)
    assert packed_copies(target) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"sliding_window": 4},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_models_that_differ_in_more_than_weights_differ_in_signature(
    changes: dict[str, Any],
) -> None:
    model, other = tiny.model(**SMALL), tiny.model(**SMALL | changes)
    plain = CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE)
    assert CausalAdapter(other, vocab_size=tiny.VOCAB_SIZE).signature != plain.signature
    assert CausalAdapter(model, vocab_size=200).signature != plain.signature
    again = CausalAdapter(tiny.model(**SMALL, seed=3), vocab_size=tiny.VOCAB_SIZE)
    assert again.signature == plain.signature
    assert again.to(torch.float64).signature != plain.signature


class Scattered(DraftModelProposer):
    """Its proposals lie in memory in another order."""

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        tokens, draft_probs, lengths = super().propose(view, gamma)
        assert draft_probs is not None
        turned = draft_probs.transpose(1, 2).contiguous().transpose(1, 2)
        return Proposal(tokens.t().contiguous().t(), turned, lengths[:1].expand(len(lengths)))


def test_the_layout_of_proposals_is_no_matter(strict: Strict) -> None:
    case = replace(BASE, proposer=Scattered)
    made = strict.made
    case.check()
    assert strict.made == made + 1  # its own proposals, the same verification


# Groups beside each other


class Padded:
    """A cache that shows nothing in the slots that are not visible."""

    taps = ()

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def at(self, positions: Tensor) -> "Padded":
        self.cache.at(positions)
        return self

    def reading(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.cache.reading(positions)

    def update(self, *states: Any) -> list[Tensor]:
        missing = self.cache.capacity - self.cache.visible
        return [F.pad(seen, (0, 0, 0, missing)) for seen in self.cache.update(*states)]


class Masked(TabularAdapter):
    """A table for rows that stand anywhere, as models with masks are."""

    def step(self, tokens: Tensor, *, positions: Tensor, cache: Any, last: int = 0) -> Tensor:
        return super().step(tokens, positions=positions, cache=Padded(cache), last=last)


def test_longer_rows_of_other_groups_fill_a_batch_and_stay_what_they_are(strict: Strict) -> None:
    """Each of two groups is the other's filler, and a free slot is both's."""
    model = random_adapter(8, 1)
    target, draft = (Masked(m.table, m.memory) for m in (model, relative(model, 2)))
    prompts = [[i % 8 for i in prompt] for prompt in tiny.prompts([3, 300, 9, 280])]
    found = []
    for compiled in (False, True):
        decoder = Decoder(target, slots=5, capacity=330, compiled=compiled)
        decoder.attach(DRAFT, DraftModelProposer(draft))
        requests = [
            request(prompt, gamma=row % 2, new=8, row=row) for row, prompt in enumerate(prompts)
        ]
        found.append(drive(decoder, requests))
    assert_same(found[1], found[0], atol=EXACT)
