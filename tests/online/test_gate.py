"""The gate lets through what is surely better, and nothing that has forgotten."""

import pytest
import torch

from draftkit.evaluation.alpha import score_contexts
from draftkit.online.gate import Judge, judge
from tests import tiny
from tests.online import making

PROMPTS = 40


def noisy(mean: float, *, seed: int, spread: float = 0.05, common: float = 0.1) -> list[float]:
    """Alphas of prompts that differ far more between prompts than between drafters."""
    shared = torch.randn(PROMPTS, generator=torch.Generator().manual_seed(99)) * common
    own = torch.randn(PROMPTS, generator=torch.Generator().manual_seed(seed)) * spread
    return (mean + shared + own).tolist()


def asked(after, before, anchor_after=None, anchor_first=None, tolerance=0.02):
    return judge(
        after=making.totals(after),
        before=making.totals(before),
        anchor_after=None if anchor_after is None else making.totals(anchor_after),
        anchor_first=None if anchor_first is None else making.totals(anchor_first),
        tolerance=tolerance,
        seed=0,
    )


def test_a_sure_gain_is_published():
    verdict = asked(noisy(0.65, seed=1), noisy(0.6, seed=2))
    assert verdict.publish
    assert verdict.gain.mean == pytest.approx(0.05, abs=0.03)
    assert "held-out recent traffic" in verdict.reason


@pytest.mark.parametrize("gain", [0.0, -0.05])
def test_no_gain_and_a_loss_are_not(gain):
    verdict = asked(noisy(0.6 + gain, seed=3), noisy(0.6, seed=3, spread=0.049))
    assert not verdict.publish
    assert "no sure gain" in verdict.reason


def test_a_gain_that_costs_the_anchors_is_not():
    anchors = noisy(0.7, seed=4), noisy(0.75, seed=4)
    verdict = asked(noisy(0.8, seed=1), noisy(0.6, seed=2), *anchors)
    assert not verdict.publish
    assert verdict.reason.startswith("anchors")
    assert verdict.anchor_change is not None
    assert verdict.anchor_change.mean == pytest.approx(-0.05)


def test_a_small_sure_loss_of_the_anchors_is_within_the_tolerance():
    anchors = noisy(0.74, seed=4), noisy(0.75, seed=4)
    assert asked(noisy(0.8, seed=1), noisy(0.6, seed=2), *anchors, tolerance=0.02).publish
    assert not asked(noisy(0.8, seed=1), noisy(0.6, seed=2), *anchors, tolerance=0.005).publish


def test_an_uncertain_loss_of_the_anchors_counts_as_one():
    """The interval decides, not the mean: too few anchors let nothing through."""
    wide = [0.7 + 0.2 * (-1) ** place for place in range(6)]
    verdict = asked(noisy(0.8, seed=1), noisy(0.6, seed=2), wide, wide[1:] + wide[:1])
    assert verdict.anchor_change is not None
    assert verdict.anchor_change.mean == pytest.approx(0)
    assert not verdict.publish


def test_an_equal_drafter_is_published_at_most_as_often_as_the_interval_says():
    """One-sided 2.5 %: of 200 equal pairs at most 12 (probability of more: below 0.5 %)."""
    drawn = range(200)
    passed = sum(
        asked(noisy(0.6, seed=2 * k + 11), noisy(0.6, seed=2 * k + 12)).publish for k in drawn
    )
    assert passed <= 12


def test_the_pairing_finds_what_independent_intervals_would_miss():
    after, before = noisy(0.62, seed=7, spread=0.01), noisy(0.6, seed=7, spread=0.0)
    assert asked(after, before).publish
    shuffled = after[1:] + after[:1]  # the same numbers, unpaired
    assert not asked(shuffled, before).publish


def test_the_judge_scores_weights_and_not_the_model_it_was_given():
    target, records = making.target(), making.traffic(6)
    good, bad = tiny.adapter(seed=2), tiny.adapter(seed=8)
    exact = Judge(tiny.adapter(seed=5), target, sampling=making.SAMPLING, batch_size=4)
    options = {"sampling": making.SAMPLING, "batch_size": 4}
    for draft in (bad, good, bad):
        found = exact.score(draft.model.state_dict(), records).totals["alpha"]
        expected = score_contexts(target, draft, records, **options).totals["alpha"]
        torch.testing.assert_close(found, expected)


def test_stored_scores_never_overstate_alpha():
    target, records = making.target(), making.traffic(6)
    draft = tiny.adapter(seed=8)
    stored = Judge(tiny.adapter(seed=5), None, sampling=making.SAMPLING, batch_size=4)
    exact = Judge(tiny.adapter(seed=5), target, sampling=making.SAMPLING, batch_size=4)
    weights = draft.model.state_dict()
    low = stored.score(weights, records).totals["alpha"]
    assert (low <= exact.score(weights, records).totals["alpha"] + 1e-6).all()
