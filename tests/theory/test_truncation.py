"""A target known by its most likely ids: exact where they hold all that counts, else bounded."""

import math

import pytest
import torch

from draftkit.config import DivergenceConfig
from draftkit.theory.divergences import DIVERGENCES
from draftkit.theory.truncation import (
    coarse_draft,
    coarse_target,
    most_likely,
    most_likely_served,
    tail_bounds,
)
from draftkit.theory.warping import SamplingParams, warp

TOKENS, VOCAB = 40, 12
COMPARED = ["forward_kl", "reverse_kl", "jsd", "tvd"]


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(4)
    return 2 * torch.randn(2, TOKENS, VOCAB, generator=generator, dtype=torch.float64)


def stored(logits, k, temperature):
    ids, log_probs, (tail,) = most_likely(logits, k, [temperature])
    return ids, log_probs, tail


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.8, 1.7])
@pytest.mark.parametrize("k", [1, 4, 11])
def test_the_mass_of_other_ids_lies_within_its_bounds_and_reaches_them(logits, k, temperature):
    _, log_probs, tail = stored(logits[0], k, temperature)
    least, most = tail_bounds(log_probs, temperature, VOCAB)
    assert (least <= tail + 1e-12).all()
    assert (tail <= most + 1e-12).all()
    assert bool((most == least).all()) == (temperature == 1)
    # One end where the others are alike, the other where one alone has all that they have.
    alike = torch.tensor([[0.5, *[0.5 / (VOCAB - 1)] * (VOCAB - 1)]]).double().log()
    alone = torch.tensor([[0.4, 0.3, 0.3, *[0.0] * (VOCAB - 3)]]).double().log()
    for law, kept in ((alike, 1), (alone, 2)):
        own = law.clamp(min=-1e9).softmax(-1).log()[:, :kept]
        (low, high) = tail_bounds(own, temperature, VOCAB)
        served = (law / temperature).softmax(-1)
        rest = 1 - served[:, :kept].sum(-1)
        assert torch.minimum((rest - low).abs(), (rest - high).abs()) < 1e-9


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.7])
def test_bounds_hold_where_a_kept_id_has_no_mass_and_where_rounding_hides_the_rest(temperature):
    least, most = tail_bounds(torch.tensor([[-0.5, -torch.inf]]), temperature, VOCAB)
    assert 0 < float(least) <= float(most) < 1
    hidden = torch.full((1, VOCAB), 1e-8 / (VOCAB - 1), dtype=torch.float64).log()
    hidden[0, 0] = math.log(1 - 1e-8)
    tail = 1 - (hidden / temperature).softmax(-1)[:, 0]
    least, most = tail_bounds(torch.zeros(1, 1), temperature, VOCAB)  # as float32 says it
    assert (least <= tail).all()
    assert (tail <= most).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("k", [1, 4, 11])
def test_kept_ids_and_the_rest_have_their_probabilities_at_every_temperature(
    logits, k, temperature
):
    target, draft = logits
    ids, log_probs, tail = stored(target, k, temperature)
    p = (target / temperature).softmax(-1)
    found = coarse_target(log_probs, tail, temperature=temperature).softmax(-1)
    kept = p.gather(-1, ids)
    torch.testing.assert_close(found[:, :k], kept, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[:, k], 1 - kept.sum(-1), rtol=1e-8, atol=1e-12)
    assert (kept.diff(dim=-1) <= 0).all()
    q = coarse_draft(draft, ids).exp()
    torch.testing.assert_close(q[:, :k], draft.softmax(-1).gather(-1, ids), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(q.sum(-1), torch.ones(TOKENS, dtype=torch.float64))


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.7}, {"top_k": 4, "top_p": 0.8}])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_cut_inside_the_kept_ids_is_the_cut_of_the_whole(logits, cut, temperature):
    target, _ = logits
    ids, log_probs, tail = stored(target, 11, temperature)
    params = SamplingParams.uniform(1, temperature=temperature, **cut)
    expected = warp(target[None], params)[0].gather(-1, ids)
    found = coarse_target(log_probs, tail, temperature=temperature, **cut).softmax(-1)
    torch.testing.assert_close(found[:, :11], expected, rtol=1e-9, atol=1e-12)
    assert (found[:, 11] == 0).all()


def test_a_cut_beyond_the_kept_ids_leaves_the_rest_whole(logits):
    target, _ = logits
    _, log_probs, tail = stored(target, 2, 1.0)
    whole = coarse_target(log_probs, tail, temperature=1.0)
    for cut in ({"top_k": 3}, {"top_p": 0.999999}):
        torch.testing.assert_close(coarse_target(log_probs, tail, temperature=1.0, **cut), whole)


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("k", [1, 3, 6, 11])
def test_fewer_outcomes_never_make_a_divergence_larger_and_all_but_one_make_it_whole(
    logits, name, k
):
    target, draft = logits
    ids, log_probs, tail = stored(target, k, 1.0)
    settings, nothing = DivergenceConfig(), torch.empty(0)

    def divergence(p, q):
        return DIVERGENCES[name](
            target_logits=p, draft_logits=q, token_ids=nothing, settings=settings
        )

    whole = divergence(target, draft)
    coarse = divergence(coarse_target(log_probs, tail, temperature=1.0), coarse_draft(draft, ids))
    assert (coarse <= whole + 1e-12).all()
    if k == VOCAB - 1:
        torch.testing.assert_close(coarse, whole, rtol=1e-9, atol=1e-12)


def test_gradients_are_those_of_the_divergence_over_fewer_outcomes(logits):
    target, draft = logits
    ids, log_probs, tail = stored(target[:3], 4, 1.0)
    coarse = coarse_target(log_probs, tail, temperature=1.0)

    def loss(z):
        return DIVERGENCES["forward_kl"](
            target_logits=coarse,
            draft_logits=coarse_draft(z, ids),
            token_ids=torch.empty(0),
            settings=DivergenceConfig(),
        )

    assert torch.autograd.gradcheck(loss, draft[:3].clone().requires_grad_())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_ids_and_tails_from_known_sums_are_the_same(logits, temperature):
    """Greedy rows have the tail of temperature 1, at which a loss can learn from them."""
    target, _ = logits
    expected = stored(target, 4, temperature or 1.0)
    found = most_likely_served(
        target,
        4,
        log_sum_exp=target.logsumexp(-1),
        temperature=torch.tensor(temperature, dtype=torch.float64),
        served_log_sum_exp=(target / (temperature or 1)).logsumexp(-1),
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
