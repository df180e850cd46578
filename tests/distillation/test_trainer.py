"""One step: which tokens carry loss, how it is normalised, and that it learns."""

import math

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState

from draftkit.config import DIVERGENCE_NAMES, DivergenceConfig, OptimConfig
from draftkit.distillation.assembly import checkpoint_activations
from draftkit.distillation.losses import Objective
from draftkit.distillation.trainer import BETAS, Trainer, learning_rate_for, schedule
from draftkit.models.adapter import CausalAdapter
from draftkit.models.cache import SlotCache
from draftkit.theory.acceptance import greedy_draft_acceptance
from draftkit.theory.divergences import DIVERGENCES
from tests import tiny
from tests.distillation.bigram import VOCAB, Bigram, batch_of, trainer

ROWS = [([1, 2, 3, 4, 5], 2), ([7, 6], 1), ([0, 1, 0, 1, 0, 3, 2], 3), ([5, 5, 5], 1)]


@pytest.mark.parametrize("name", ["forward_kl", "next_token"])
def test_the_loss_is_the_mean_over_generated_tokens_by_hand(name):
    draft, target = Bigram(0), Bigram(1)
    values = []
    for ids, prompt in ROWS:
        for place in range(prompt, len(ids)):
            last = ids[place - 1]
            values.append(
                DIVERGENCES[name](
                    target_logits=target.table[last],
                    draft_logits=draft.table[last],
                    token_ids=torch.tensor(ids[place]),
                    settings=DivergenceConfig(),
                )
            )
    metrics = trainer(draft, target, divergence=name).step(batch_of(*ROWS))
    assert metrics.loss == pytest.approx(float(torch.stack(values).detach().mean()), rel=1e-12)
    assert metrics.tokens == len(values)


def test_eight_rows_at_once_and_in_pieces_take_the_same_step():
    def weights_after(pieces):
        learner = trainer(gradient_accumulation_steps=pieces, max_grad_norm=0.01)
        learner.step(batch_of(*ROWS, *ROWS))
        return learner.draft.table

    whole = weights_after(1)
    for pieces in (2, 3, 8):
        torch.testing.assert_close(weights_after(pieces), whole, rtol=1e-12, atol=1e-12)


def test_a_row_has_the_same_gradient_alone_and_beside_a_longer_row():
    def gradient_rows(*rows):
        learner = trainer(learning_rate=1e-9, max_grad_norm=1e9)
        batch = batch_of(*rows)
        weights = learner._weights(batch, batch.entries)
        loss, _ = learner._loss(batch, batch.entries, weights, measure=False)
        loss.backward()
        return learner.draft.table.grad

    alone = gradient_rows(ROWS[0]) + gradient_rows(ROWS[2])
    torch.testing.assert_close(gradient_rows(ROWS[0], ROWS[2]), alone, rtol=1e-12, atol=1e-12)


def test_alpha_of_a_step_is_that_of_its_tokens_before_it():
    draft, target = Bigram(0), Bigram(1)
    lasts = [last for ids, prompt in ROWS for last in ids[prompt - 1 : -1]]
    p, q = target.table[lasts].softmax(-1), draft.table[lasts].softmax(-1)
    expected = float(torch.minimum(p, q).detach().sum(-1).mean())
    assert trainer(draft, target).step(batch_of(*ROWS), measure=True).alpha == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(
    "name", [n for n in DIVERGENCE_NAMES if n not in ("next_token", "ce_argmax")]
)
def test_every_divergence_raises_alpha_from_a_cold_start(name):
    learner = trainer(divergence=name, max_steps=200)
    batch = batch_of(([*range(VOCAB)] * 2, 1))
    before = learner.step(batch, measure=True).alpha
    for _ in range(198):
        learner.step(batch)
    after = learner.step(batch, measure=True).alpha
    assert after > before + 0.2


def test_argmax_cross_entropy_raises_what_greedy_drafting_engines_accept():
    learner = trainer(divergence="ce_argmax", max_steps=200)

    def accepted():
        q = learner.draft.table.detach()
        p = Bigram(1, spread=2.0).table.detach().softmax(-1)
        return float(greedy_draft_acceptance(target_probs=p, draft_probs=q).mean())

    before = accepted()
    for _ in range(200):
        learner.step(batch_of(([*range(VOCAB)] * 2, 1)))
    assert accepted() > before + 0.2


def adamw(learner):
    """What AdamW remembers, as numbers."""
    return {
        part: value.tolist() for part, value in learner.optimizer.state[learner.draft.table].items()
    }


@pytest.mark.parametrize("limit", [0.01, math.inf], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(wrong, pieces, limit):
    """The loss is finite; of several micro-batches the first alone goes wrong."""
    options = {"gradient_accumulation_steps": pieces, "max_grad_norm": limit, "warmup_steps": 5}
    refused, spared = trainer(**options), trainer(**options)
    for learner in (refused, spared):
        learner.step(batch_of(*ROWS))
    parts = []

    def spoil(gradient):
        parts.append(gradient)
        return torch.full_like(gradient, wrong) if len(parts) == 1 else gradient

    handle = refused.draft.table.register_hook(spoil)
    said = r"^the norm of the gradient became (nan|inf) at step 1: lower optim\.learning_rate$"
    with pytest.raises(ValueError, match=said):
        refused.step(batch_of(*ROWS))
    handle.remove()
    assert len(parts) == pieces
    assert not refused.draft.training
    assert torch.equal(refused.draft.table, spared.draft.table)
    assert adamw(refused) == adamw(spared)
    assert (refused.steps, refused.tokens) == (spared.steps, spared.tokens)
    after, expected = (learner.step(batch_of(*ROWS)) for learner in (refused, spared))
    assert (after.loss, after.grad_norm) == (expected.loss, expected.grad_norm)
    assert after.learning_rate == expected.learning_rate
    assert torch.equal(refused.draft.table, spared.draft.table)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_gradient_above_the_limit_is_scaled_to_it_and_one_below_left_alone(pieces):
    """AdamW's first moment after one step is (1 - beta1) times the gradient that it was given."""

    def given(limit):
        learner = trainer(max_grad_norm=limit, gradient_accumulation_steps=pieces)
        norm = learner.step(batch_of(*ROWS)).grad_norm
        moment = learner.optimizer.state[learner.draft.table]["exp_avg"]
        return norm, moment / (1 - BETAS[0])

    norm, whole = given(1e9)
    assert norm == pytest.approx(float(whole.norm()), rel=1e-12)
    for limit in (0.5 * norm, 2 * norm):
        reported, gradient = given(limit)
        assert reported == pytest.approx(norm, rel=1e-12)
        # torch divides by norm + 1e-6, lest it be 0
        torch.testing.assert_close(gradient, min(1, limit / norm) * whole, rtol=1e-4, atol=0)


def test_the_schedule_warms_up_linearly_and_falls_to_a_tenth():
    optim = OptimConfig(warmup_steps=4, max_steps=104)
    rates = [schedule(step, optim) for step in range(105)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[54] == pytest.approx(0.55)
    assert rates[104] == pytest.approx(0.1)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    down = OptimConfig(warmup_steps=0, max_steps=4, lr_scheduler_type="linear")
    assert [schedule(step, down) for step in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    flat = OptimConfig(warmup_steps=1, lr_scheduler_type="constant")
    assert schedule(77, flat) == 1.0


def test_the_rate_is_the_one_asked_for_or_falls_with_the_width():
    assert learning_rate_for(1024) == learning_rate_for(64) / 16
    asked = trainer(learning_rate=0.3, warmup_steps=3).step(batch_of(*ROWS))
    assert asked.learning_rate == pytest.approx(0.1)
    assert trainer(learning_rate=None).peak_rate == learning_rate_for(VOCAB)


def test_a_schedule_begins_anew_where_it_is_told_to():
    options = {"learning_rate": 0.2, "warmup_steps": 0, "max_steps": 2}
    learner = trainer(**options, lr_scheduler_type="linear")
    rates = [learner.step(batch_of(*ROWS)).learning_rate for _ in range(2)]
    learner.begin()
    rates += [learner.step(batch_of(*ROWS)).learning_rate for _ in range(2)]
    assert rates == pytest.approx([0.2, 0.1, 0.2, 0.1])
    assert learner.steps == 4


def adapted(*, checkpointing):
    """A tiny model that learns from another."""
    draft = tiny.adapter(seed=1)
    if checkpointing:
        checkpoint_activations(draft.model)
    learner = trainer(draft, tiny.adapter(seed=2), learning_rate=1e-2)
    batch = batch_of(([3, 4, 5, 6, 7], 1), ([9, 8, 7], 1))
    return [learner.step(batch).loss for _ in range(3)]


def test_a_frozen_head_stays_and_is_no_part_of_what_learns():
    draft = tiny.adapter(seed=1)
    head = draft.model.get_output_embeddings().requires_grad_(False).weight
    before, objective = head.clone(), Objective(DivergenceConfig(name="next_token"))
    learner = Trainer(draft, None, objective, optim=OptimConfig())
    learner.step(batch_of(*ROWS))
    assert torch.equal(head, before)
    assert "model.lm_head.weight" not in [name for name, _ in learner.trained()]


def test_checkpointed_activations_take_the_same_steps():
    plain = pytest.approx(adapted(checkpointing=False), rel=1e-6)
    assert adapted(checkpointing=True) == plain


def test_a_draft_of_some_ids_samples_with_the_head_that_it_has_learned():
    """Also where no prompt is read first: a text of one token needs no prefill."""
    kept = torch.arange(0, tiny.VOCAB_SIZE, 2)
    draft = CausalAdapter(tiny.model(seed=1), vocab_size=tiny.VOCAB_SIZE, kept_ids=kept)
    learner = trainer(draft, tiny.adapter(seed=2), "tvd", learning_rate=0.1)
    texts, start = torch.tensor([[5], [9]]), torch.zeros(2, 1, dtype=torch.long)

    @torch.inference_mode()
    def sampled_from():
        return draft.step(texts, positions=start, cache=SlotCache(2, 8))[:, 0]

    before = sampled_from()
    learner.step(batch_of(([3, 4, 6, 8, 10], 1)))
    with torch.inference_mode():
        learned = draft.score(texts, torch.ones_like(texts, dtype=torch.bool))
    torch.testing.assert_close(sampled_from(), learned, atol=1e-4, rtol=0)
    assert not torch.allclose(before[:, kept], learned[:, kept], atol=1e-2)


@pytest.mark.parametrize(
    "setting",
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER"),
    ],
    ids=lambda setting: setting[0],
)
def test_the_environment_of_a_launcher_changes_no_step(monkeypatch, setting):
    """What `accelerate config` has written of other programs."""

    def step():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        learner = trainer(max_grad_norm=0.01)
        return learner.step(batch_of(*ROWS)).grad_norm, learner.draft.table, learner._module

    norm, table, module = step()
    monkeypatch.setenv(*setting)
    again, same, own = step()
    assert again == norm
    assert torch.equal(same, table)
    assert type(own) is type(module)
    assert own.forward.__func__ is module.forward.__func__  # wrapped by nobody
