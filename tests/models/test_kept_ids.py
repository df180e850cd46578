"""Drafts that propose some ids alone: their logits, their freshness, and the law of decoding."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.alpha import score_contexts
from draftkit.models.adapter import CausalAdapter, Head
from draftkit.models.cache import SlotCache
from draftkit.models.shrink import shrink
from tests import tiny
from tests.decoding.checks import VOCAB_SIZE, Parts, Setting, check_joint_law, measured
from tests.decoding.driving import DRAFT, SMALL, request, strict_compiler
from tests.records import record

KEPT = torch.tensor([0, 7, 65, 200, 257])
ATOL = 1e-5  # models compute norms and rotations in float32


def keeping(model: PreTrainedModel, kept: Tensor = KEPT) -> CausalAdapter:
    return CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE, kept_ids=kept)


def only_kept(logits: Tensor, kept: Tensor = KEPT) -> Tensor:
    """Logits [..., padded V] with -inf at all other ids."""
    others = torch.ones(tiny.VOCAB_SIZE, dtype=torch.bool).index_fill(0, kept, False)
    return logits[..., : tiny.VOCAB_SIZE].masked_fill(others, -torch.inf)


def everywhere(texts: Tensor) -> Tensor:
    return torch.ones(texts.shape, dtype=torch.bool)


@torch.inference_mode()
def stepped(adapter: CausalAdapter, texts: Tensor) -> Tensor:
    """Logits of a prompt of one token and what follows it, fed as a decoder does."""
    positions, cache = torch.arange(texts.shape[1]).expand_as(texts), SlotCache(len(texts), 16)
    adapter.prefill(texts[:, :1], positions=positions[:, :1], cache=cache)
    return adapter.step(texts, positions=positions, cache=cache)


def kept_head(adapter: CausalAdapter) -> Head:
    assert adapter._kept_head is not None
    return adapter._kept_head


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_kept_ids_have_their_logits_and_all_others_none(architecture: str) -> None:
    adapter = keeping(tiny.model(architecture, vocab_size=300, dtype=torch.float64))
    expected = only_kept(tiny.logits(adapter.model, tiny.tokens()))
    scores = adapter.score(tiny.tokens(), everywhere(tiny.tokens()))
    torch.testing.assert_close(scores, expected.flatten(0, 1), atol=ATOL, rtol=0)
    torch.testing.assert_close(stepped(adapter, tiny.tokens()), expected, atol=ATOL, rtol=0)


def test_a_plain_head_is_computed_on_the_kept_rows_only() -> None:
    adapter = keeping(tiny.model(attention_bias=True))
    rows: list[int] = []
    adapter.model.get_output_embeddings().register_forward_hook(
        lambda module, given, output: rows.append(len(module.weight))
    )
    stepped(adapter, tiny.tokens())
    adapter.score(tiny.tokens(), everywhere(tiny.tokens()))
    assert rows == []
    assert adapter.head is not None
    assert kept_head(adapter).weight.shape == adapter.head.weight.shape == (len(KEPT), 64)


def test_losses_on_kept_ids_have_the_gradients_of_the_whole_head() -> None:
    adapter, whole = keeping(tiny.model(dtype=torch.float64)), tiny.adapter(dtype=torch.float64)
    for one in (adapter, whole):
        one.score(tiny.tokens(), everywhere(tiny.tokens()))[:, KEPT].square().sum().backward()
    for one, other in zip(adapter.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad)


def test_steps_see_every_change_of_the_head_in_the_place_where_it_was() -> None:
    adapter = keeping(tiny.model())
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.1, fused=True)
    places = []
    for _ in range(3):
        expected = only_kept(tiny.logits(adapter.model, tiny.tokens()))
        torch.testing.assert_close(stepped(adapter, tiny.tokens()), expected, atol=1e-4, rtol=0)
        places.append(kept_head(adapter).weight.data_ptr())
        adapter.score(tiny.tokens(), everywhere(tiny.tokens()))[:, KEPT].square().sum().backward()
        optimizer.step()
        adapter.renew()
    weights = tiny.model(seed=5).state_dict()
    adapter.load_weights(weights)
    assert torch.equal(kept_head(adapter).weight, weights["lm_head.weight"][KEPT])  # at once
    assert {*places, kept_head(adapter).weight.data_ptr()} == {places[0]}


def test_models_that_keep_other_numbers_of_ids_share_no_code() -> None:
    model = tiny.model()
    every, five, four, others = (
        CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE, kept_ids=ids)
        for ids in (None, KEPT, KEPT[:4], KEPT[1:])
    )
    assert len({every.signature, five.signature, four.signature}) == 3
    assert four.signature == others.signature


@pytest.mark.parametrize(
    ("architecture", "temperature"),
    [("llama", 1.0), pytest.param("gemma2", 0.0, marks=pytest.mark.soak)],
)
def test_compiled_rounds_are_the_eager_ones_before_and_after_new_weights(
    architecture: str, temperature: float
) -> None:
    target = tiny.model(architecture, **SMALL)
    new = tiny.related(target, noise=0.3).state_dict()
    rounds = []
    with strict_compiler() as strict:
        for compiled in (False, True):
            draft = keeping(tiny.related(target), torch.arange(0, 256, 2))
            decoder = Decoder(
                CausalAdapter(target, vocab_size=tiny.VOCAB_SIZE),
                slots=2,
                capacity=64,
                compiled=compiled,
            )
            decoder.attach(DRAFT, DraftModelProposer(draft))
            sampling = SamplingConfig(temperature=temperature)
            prompts = tiny.prompts([1, 9])
            decoder.join([request(p, new=30, gamma=3, sampling=sampling) for p in prompts])
            found = decoder.round() + decoder.round()
            decoder.swap(DRAFT, new, "v2")
            rounds.append(found + decoder.round() + decoder.round())
        assert strict.made == 2  # one to propose, one to verify
    for eager, compiled_one in zip(*rounds, strict=True):
        assert torch.equal(eager.draft_tokens, compiled_one.draft_tokens)
        assert torch.equal(eager.tokens, compiled_one.tokens)
        assert bool((eager.draft_tokens % 2 == 0).all())


# A drafter of layers of the target, which proposes some ids alone


def deep(**options: Any) -> PreTrainedModel:
    return tiny.model(num_hidden_layers=4, **options)


def test_the_joint_law_is_the_targets_whatever_the_draft_cannot_say() -> None:
    cut = shrink(deep(vocab_size=VOCAB_SIZE, dtype=torch.float64), [0, 3])
    draft = CausalAdapter(cut, vocab_size=VOCAB_SIZE, kept_ids=torch.tensor([0, 2]))
    result = measured(Parts(proposer=lambda _: DraftModelProposer(draft)), Setting(tokens=3))
    assert set(result.cells.outcome.draft_tokens.flatten().tolist()) == {0, 2}
    assert any(1 in text for text in result.cells.outcome.text.tolist())
    check_joint_law(result)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(top_k=4, top_p=0.9)])
def test_alpha_counts_what_the_target_says_outside_of_the_kept_ids_as_lost(
    sampling: SamplingConfig,
) -> None:
    target = tiny.adapter(dtype=torch.float64)
    kept = torch.arange(0, tiny.VOCAB_SIZE, 2)
    itself = keeping(target.model, kept)
    records = [record(text[:3], text[3:]) for text in tiny.prompts([9, 20])]
    scored = score_contexts(target, itself, records, sampling=sampling, batch_size=2)
    whole = score_contexts(target, target, records, sampling=sampling, batch_size=2)
    assert bool((scored.totals["alpha"] < 0.9 * whole.totals["alpha"]).all())
    if sampling.top_k:
        return
    for prompt, one in enumerate(records):
        text = torch.tensor([[*one.prompt_ids, *one.output_ids]])
        law = tiny.logits(target.model, text)[0, 2:-1].softmax(-1)
        # q is p divided by its mass on the kept ids, so that min(p, q) is p there.
        mass = float(law[:, kept].sum())
        assert float(scored.totals["alpha"][prompt]) == pytest.approx(mass, abs=1e-4)
