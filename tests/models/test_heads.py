"""Heads: what training computes is what decoding proposes, and chains are what they say.

A chain of proposals forced to be the text must have the logits that training has at that step: then
features, states, positions and ids are those of one law.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from draftkit.config import SamplingConfig
from draftkit.decoding import proposers
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import DRAFT_ID, decode, finish, make_requests
from draftkit.distillation.batch import Batch
from draftkit.models import heads
from draftkit.models.adapter import CausalAdapter
from draftkit.models.cache import Streams
from draftkit.models.heads import EAGLE3, MEDUSA, head_config, layers_read, new_head
from draftkit.models.parallel import Chains, chains
from tests import tiny
from tests.theory.mutants import mutate

STEPS, MASK = 4, tiny.VOCAB_SIZE - 1
KEPT = torch.arange(0, tiny.VOCAB_SIZE, 3)
GREEDY = SamplingConfig(temperature=0.0)
LENGTHS = [3, 9, 2, 17]
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": EAGLE3},
    "in one pass": {"kind": EAGLE3, "pard_token": MASK, "pard_k": STEPS},
    "medusa": {"kind": MEDUSA, "medusa_heads": STEPS},
}


def target_of(dtype: torch.dtype, layers: int = 8) -> CausalAdapter:
    """A target whose norms keep to `dtype`, where those of transformers are in float32."""
    adapter = tiny.adapter(num_hidden_layers=layers, dtype=dtype)
    for module in adapter.model.modules():
        if isinstance(module, LlamaRMSNorm):
            plain: Any = module
            plain.forward = partial(
                functional.rms_norm,
                normalized_shape=module.weight.shape,
                weight=module.weight,
                eps=module.variance_epsilon,
            )
    return adapter


def head_of(
    target: CausalAdapter,
    kind: str,
    *,
    kept: Tensor | None = KEPT,
    module: Any = heads,
    **more: Any,
) -> Any:
    """A head of `kind`, disturbed so that all that it reads matters."""
    count = target.model.config.vocab_size if kept is None else len(kept)
    config = head_config(target.model.config, draft_ids=count, **KINDS[kind] | more)
    model = module.new_head(target.model, config, kept)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data.add_(noise * (0.3 if weight.dim() == 1 else weight.shape[-1] ** -0.5))
    return module.adapted(model.to(target.dtype), target=target)


def trained_logits(target: CausalAdapter, head: Any, text: list[int]) -> Tensor:
    """The logits [S, T, V] of every step at every token of `text`, as in training; 0 for none."""
    tokens = torch.tensor([text])
    whole = torch.ones_like(tokens, dtype=torch.bool)
    _, features = target.read(tokens, whole, head.reads)
    if head.parallel is None:
        keep = whole.expand(STEPS, 1, -1)
        none = tokens.new_zeros(0)
        states = head(Chains(tokens, keep, None, none, none), features)
        return head.head(states).view(STEPS, len(text), -1)
    predicting = whole.clone()
    predicting[:, -1] = False
    rows = chains(tokens, predicting, predicting * STEPS, token=MASK)
    made = head.head(head(rows, features))
    logits = torch.zeros(STEPS, len(text), target.vocab_size, dtype=made.dtype)
    logits[rows.blocks, rows.predicted - rows.blocks] = made
    return logits


def proposed_logits(
    target: CausalAdapter, head: Any, *, module: Any = proposers
) -> tuple[list[list[int]], list[tuple[int, int, int, Tensor]]]:
    """Texts, and what the decoder's proposer made: row, length of the text, step, logits [V].

    Proposals are the text's tokens, but for some that are wrong: what comes behind them in a round
    is left out, and the next round must have forgotten them.
    """
    prompts = tiny.prompts(LENGTHS)
    requests = [*make_requests(prompts, max_new_tokens=20, sampling=GREEDY, gamma=STEPS)]
    plain = [*make_requests(prompts, max_new_tokens=20, sampling=GREEDY)]
    answers = decode(target, plain, eos_token_ids=(), batch_size=len(prompts))
    texts = [[*one.prompt_ids, *one.output_ids] for one in answers]
    padded = torch.tensor([text + [0] * (64 - len(text)) for text in texts])
    found: list[tuple[int, int, int, Tensor]] = []

    class Forced(getattr(module, type(proposers.drafting(head)).__name__)):  # type: ignore[misc]
        def propose(self, view: Any, gamma: int, decide: Any = None) -> Any:
            rows, wrong = view.group.index.tolist(), torch.zeros(len(view.length), dtype=torch.bool)

            def force(logits: Tensor, i: int) -> Tensor:
                forced = []
                for step in range(i, i + logits.shape[1]):
                    places = view.length + step
                    for at, row in enumerate(rows):
                        if not wrong[at] and int(places[at]) < len(texts[row]):
                            length = int(view.length[at])
                            found.append((row, length, step, logits[at, step - i].clone()))
                    token = padded[view.group.index, places]
                    off = places % 5 == 0
                    wrong.logical_or_(off)
                    forced.append(torch.where(off, (token + 1) % target.vocab_size, token))
                ids = torch.stack(forced, 1)[..., None]
                return torch.full_like(logits, -torch.inf).scatter(2, ids, 0.0)

            return super().propose(view, gamma, force)

    decoder = Decoder(target, slots=len(prompts), capacity=64)
    decoder.attach(DRAFT_ID, Forced(head))
    done = finish(decoder, requests)
    assert [one.output_ids for one in done] == [one.output_ids for one in answers]
    assert {n for one in done for n, count in enumerate(one.accept_counts) if count} >= {1, 2, 4}
    return texts, found


@torch.no_grad()
def largest_difference(head: Any, target: CausalAdapter, *, module: Any = proposers) -> float:
    """Between training and decoding, relative to the largest logit."""
    texts, found = proposed_logits(target, head, module=module)
    trained = [trained_logits(target, head, text) for text in texts]
    finite = trained[0].isfinite().all(0).all(0)
    assert int(finite.sum()) == (tiny.VOCAB_SIZE if head.kept_ids is None else len(head.kept_ids))
    worst = 0.0
    for row, length, step, logits in found:
        own = trained[row][step, length - 1]
        assert torch.equal(own.isfinite(), logits.isfinite())
        apart = (own - logits)[finite].abs().max() / own[finite].abs().max()
        worst = max(worst, float(apart))
    return worst


@pytest.mark.parametrize("kept", [None, KEPT], ids=["all ids", "some ids"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_a_proposal_has_the_logits_of_its_step_in_training(
    kind: str, kept: Tensor | None, dtype: torch.dtype, most: float
) -> None:
    target = target_of(dtype)
    assert largest_difference(head_of(target, kind, kept=kept), target) < most


def broken(module: Any, old: str, new: str) -> Callable[[], float]:
    """How far apart training and decoding are with that edit of a module."""

    def measure() -> float:
        mutant, target = mutate(module, old, new), target_of(torch.float64)
        if module is heads:
            head = head_of(target, "eagle3")
            head.__class__ = mutant.Eagle3Adapter
            return largest_difference(head, target)
        head = head_of(target, "eagle3")
        return largest_difference(head, target, module=mutant)

    return measure


MUTANTS = {
    "features of the wrong token": broken(
        proposers, "view.features((positions - 1).clamp", "view.features((positions - 2).clamp"
    ),
    "what was rejected stays": broken(proposers, "text = view.group.most + 1  # ", "text = 2  # "),
    "positions of later steps": broken(heads, "(index + step)[None, span]", "index[None, span]"),
    "positions of prompts": broken(
        heads,
        "update(*self._keys_and_values(tokens, hidden, positions)",
        "update(*self._keys_and_values(tokens, hidden, positions + 1)",
    ),
    "tokens of later steps": broken(heads, "functional.pad(tokens[:, step:], (0, step))", "tokens"),
    "slot 0 is seen in decoding": broken(
        heads, "seen = seen & (torch.arange(cache.visible, device=positions.device) > 0)", "pass"
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_training_and_decoding_differ_where_one_is_broken(name: str) -> None:
    assert MUTANTS[name]() > 1e-3


def test_draft_ids_off_by_one_are_told_from_the_right_ones() -> None:
    target = target_of(torch.float64)
    head = head_of(target, "eagle3")
    text = tiny.prompts([12])[0]
    right = trained_logits(target, head, text)
    head.model.d2t.add_(1)
    wrong = heads.adapted(head.model, target=target)
    assert not torch.equal(trained_logits(target, wrong, text).isfinite(), right.isfinite())


def by_chains(target: CausalAdapter, head: Any, text: list[int]) -> Tensor:
    """The normed states [S, T, H] of every chain, each read on its own with no cache and no mask.

    The slots 1..t of the text, then the chain's: each attends to all before it, as code that knows
    nothing of unrolling would.
    """
    tokens = torch.tensor([text])
    whole = torch.ones_like(tokens, dtype=torch.bool)
    _, features = target.read(tokens, whole, head.reads)
    assert features is not None
    model, layer = head.model, head.model.layers[0]
    embedded = model.get_input_embeddings()(tokens)[0]
    found = torch.zeros(STEPS, len(text), embedded.shape[-1], dtype=embedded.dtype)
    for end in range(1, len(text)):
        given = [model.fc(features[0, t - 1]) for t in range(1, end + 1)]
        read, made = [*range(1, end + 1)], given[0]
        for step in range(min(STEPS, len(text) - end)):
            if step > 0:
                given.append(made)
                read.append(end + step)
            hidden = torch.stack(given)[None]
            positions = torch.tensor(read)[None]

            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                size = query.shape[1] // key.shape[1]
                key, value = (part.repeat_interleave(size, 1) for part in (key, value))
                scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
                future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
                return (scores.masked_fill(future, -torch.inf).softmax(-1) @ value).transpose(1, 2)

            rotary = model.rotary(hidden, positions)
            made = layer(embedded[read][None], hidden, rotary, attend)[0, -1]
            found[step, end] = model.norm(made)
    return found


def test_unrolled_steps_and_their_gradient_are_those_of_chains_read_one_by_one() -> None:
    target = target_of(torch.float64)
    head = head_of(target, "eagle3")
    text = tiny.prompts([9])[0]
    batch = Batch(torch.tensor([text]), torch.tensor([[False] * 3 + [True] * 6]))
    entries = batch.unrolled(STEPS)
    assert entries.predicted.tolist() == [*range(6), *range(1, 6), *range(2, 6), *range(3, 6)]
    _, features = target.read(batch.input_ids, batch.predicting, head.reads)
    states = head(entries, features)
    chains_read = zip(by_chains(target, head, text), entries.keep, strict=True)
    one_by_one = torch.cat([part[keep[0]] for part, keep in chains_read])
    torch.testing.assert_close(states, one_by_one, rtol=0, atol=1e-10)
    pull = torch.randn(states.shape, generator=torch.Generator().manual_seed(1)).double()
    weights = [*head.model.parameters()]
    gradients = (
        torch.autograd.grad((one * pull).sum(), weights, allow_unused=True)
        for one in (states, one_by_one)
    )
    for own, expected in zip(*gradients, strict=True):
        if expected is not None:  # the output head makes no states
            torch.testing.assert_close(own, expected, rtol=1e-8, atol=1e-9)


def test_a_chain_of_a_drafted_block_begins_where_it_was_drawn() -> None:
    drawn = Batch(
        torch.tensor([[5, 6, 7, 8, 9]]),
        torch.tensor([[False, False, True, True, True]]),
        block_offset=torch.tensor([[0, 0, 0, 1, 2]]),
    )
    entries = drawn.unrolled(STEPS)
    assert entries.keep.nonzero().tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
    assert entries.predicted.tolist() == [0, 1, 2]


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_streams_of_every_family_are_its_hidden_states(architecture: str) -> None:
    changes: dict[str, Any] = {"n_layer" if architecture == "gpt2" else "num_hidden_layers": 8}
    changes |= {"layer_types": None} if architecture == "gemma3" else {}
    target = tiny.adapter(architecture, **changes)
    tokens, layers = tiny.tokens(), layers_read(EAGLE3, 8)
    _, features = target.read(tokens, torch.ones_like(tokens, dtype=torch.bool), (*layers, 8))
    assert features is not None
    with torch.no_grad():
        states = target.model(input_ids=tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer] for layer in (*layers, 8)], -1)
    assert torch.equal(features, expected)


def test_passes_that_ask_for_no_stream_keep_none() -> None:
    target = target_of(torch.float32)
    streams, tokens = Streams(target.model), tiny.tokens()
    streams.open((2,))
    target.model(input_ids=tokens)
    assert streams.close().keys() == {2}
    target.model(input_ids=tokens)
    assert streams.close() == {}


def test_a_head_begins_with_the_targets_own_weights() -> None:
    target = target_of(torch.float32)
    config = head_config(target.model.config, EAGLE3, draft_ids=len(KEPT))
    made: Any = new_head(target.model, config, KEPT)
    given: Any = target.model
    last = given.model.layers[-1]
    assert torch.equal(made.lm_head.weight, given.lm_head.weight[KEPT])
    assert torch.equal(
        made.layers[0].self_attn["q_proj"].weight[:, 64:], last.self_attn.q_proj.weight
    )
    assert torch.equal(made.layers[0].mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(made.layers[0].hidden_norm.weight, last.input_layernorm.weight)
    assert torch.equal(made.norm.weight, given.model.norm.weight)
    assert torch.equal(torch.arange(len(KEPT)) + made.d2t, KEPT)


def test_a_target_of_six_layers_is_too_small_for_three_to_be_read() -> None:
    with pytest.raises(ValueError, match="kind=eagle3: the target has 6 layers"):
        layers_read(EAGLE3, 6)
