"""The gate lets through what is surely better, and nothing that has forgotten."""

import dataclasses
import math
from functools import cache

import pytest
import torch

from draftkit.evaluation.alpha import score_contexts
from draftkit.evaluation.intervals import gain_p_value
from draftkit.online.gate import FALSE_PASSES, Judge, judge, judge_served, level_of
from draftkit.theory.acceptance import Rate
from tests import tiny
from tests.online import making

PROMPTS = 40


def noisy(mean: float, *, seed: int, spread: float = 0.05, common: float = 0.1) -> list[float]:
    """Alphas of prompts that differ far more between prompts than between drafters."""
    shared = torch.randn(PROMPTS, generator=torch.Generator().manual_seed(99)) * common
    own = torch.randn(PROMPTS, generator=torch.Generator().manual_seed(seed)) * spread
    return (mean + shared + own).tolist()


def asked(after, before, anchor_after=None, anchor_first=None, tolerance=0.02, gate=1):
    return judge(
        after=making.totals(after),
        before=making.totals(before),
        anchor_after=None if anchor_after is None else making.totals(anchor_after),
        anchor_first=None if anchor_first is None else making.totals(anchor_first),
        tolerance=tolerance,
        gate=gate,
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


def served(now, before, look=1):
    return judge_served(now=making.totals(now), before=making.totals(before), look=look)


def test_what_serves_goes_where_it_is_surely_worse_and_stays_else():
    reason = served(noisy(0.55, seed=1), noisy(0.6, seed=2))
    assert reason is not None
    assert "on the records served since, p = " in reason
    for change in (0.0, 0.05):
        assert served(noisy(0.6 + change, seed=3, spread=0.049), noisy(0.6, seed=3)) is None
    assert served(noisy(0.6, seed=3), noisy(0.6, seed=3)) is None
    assert served(noisy(0.55, seed=1)[:19], noisy(0.6, seed=2)[:19]) is None


def test_each_look_at_what_serves_asks_for_more():
    now, before = making.totals(noisy(0.585, seed=1)), making.totals(noisy(0.6, seed=2))
    p_value = gain_p_value(before.rate(), now.rate())
    for look in (1, 2, 4, 9):
        goes = judge_served(now=now, before=before, look=look) is not None
        assert goes == (p_value <= level_of(look))


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


def test_what_is_not_a_number_is_never_published():
    nan, good, bad = [math.nan] * PROMPTS, noisy(0.8, seed=1), noisy(0.6, seed=2)
    assert asked(good, bad).publish
    assert not asked(nan, bad).publish
    assert not asked(nan, nan).publish
    assert not asked([*good[1:], math.nan], bad).publish
    assert not asked(good, bad, anchor_after=nan, anchor_first=good).publish
    assert not asked(good, bad, anchor_after=good, anchor_first=nan).publish


def test_a_gain_on_too_few_prompts_is_not_sure():
    good, bad = noisy(0.8, seed=1), noisy(0.6, seed=2)
    assert asked(good[:20], bad[:20]).publish
    verdict = asked(good[:19], bad[:19])
    assert not verdict.publish
    assert "of 19 conversations, 20 are needed" in verdict.reason


def test_the_levels_of_all_gates_add_up_to_the_false_passes():
    levels = [level_of(gate) for gate in range(1, 10_001)]
    assert levels[0] == 0.025
    assert sum(levels) == pytest.approx(FALSE_PASSES, rel=2e-4)
    assert sum(levels) < FALSE_PASSES
    small = asked(noisy(0.64, seed=5), noisy(0.6, seed=6), gate=1)
    assert level_of(9) < small.p_value < level_of(1)
    assert small.publish
    later = asked(noisy(0.64, seed=5), noisy(0.6, seed=6), gate=9)
    assert not later.publish
    assert "gate 9 needs" in later.reason


@cache
def p_values(drawn, *, streams: int = 300, window: int = 24, step: int = 6) -> torch.Tensor:
    """[streams, 10]: of drafters that gain nothing, at ten gates against one version.

    As in a service: the window of prompts moves by `step` from gate to gate, and weights that were
    refused are trained on, so that what they gain on a prompt stays half the same.
    """
    generator, found = torch.Generator().manual_seed(3), torch.empty(streams, 10)
    for stream in found:
        length = window + 9 * step
        counts = drawn("counts", length, generator)
        gains = drawn("gains", length, generator)
        for gate in range(10):
            gains = 0.5**0.5 * (gains + drawn("gains", length, generator))
            part = slice(gate * step, gate * step + window)
            positions = counts[part]
            after = Rate(positions * (0.6 + 0.05 * gains[part]), positions)
            stream[gate] = gain_p_value(after, Rate(positions * 0.6, positions))
    return found


def passes(p_values: torch.Tensor, levels=level_of) -> float:
    """The share of streams in which one of the gates lets a drafter through."""
    most = torch.tensor([levels(gate) for gate in range(1, 11)])
    return (p_values <= most).any(dim=1).double().mean().item()


def normal(kind, length, generator):
    """Answers of one length, normal gains."""
    if kind == "counts":
        return torch.full((length,), 30.0, dtype=torch.float64)
    return torch.randn(length, generator=generator, dtype=torch.float64)


def ragged(kind, length, generator):
    """Answers of 1 to 60 tokens, gains as heavy in their tails as Student's t with 5 degrees."""
    if kind == "counts":
        return torch.randint(1, 61, (length,), generator=generator).double()
    draws = torch.randn(6, length, generator=generator, dtype=torch.float64)
    return draws[0] / draws[1:].square().mean(0).sqrt() * 0.6**0.5


def uneven(kind, length, generator):
    """Few conversations hold most tokens: lengths are lognormal, sigma 1.2; normal gains."""
    drawn = torch.randn(length, generator=generator, dtype=torch.float64)
    return (3.5 + 1.2 * drawn).exp().clamp(min=2) if kind == "counts" else drawn


@pytest.mark.parametrize("drawn", [normal, ragged, uneven])
def test_an_equal_drafter_passes_one_of_ten_gates_at_most_one_time_in_twenty(drawn):
    """Of 300 streams, 5 % and three standard errors of that."""
    assert passes(p_values(drawn)) <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5


def test_ten_gates_at_the_level_of_one_would_let_many_through():
    """What the test above can see: the same level at each gate."""
    assert passes(p_values(normal), levels=lambda gate: 0.025) > 0.09


def test_few_long_conversations_pass_no_first_gate_more_often_than_its_level():
    """2.5 % are meant: of 2,000 streams 50, of which 67 are two and a half standard errors more."""
    hits, generator = 0, torch.Generator().manual_seed(5)
    for _ in range(2000):
        positions, gains = (uneven(kind, 20, generator) for kind in ("counts", "gains"))
        after = Rate(positions * (0.6 + 0.05 * gains), positions)
        hits += gain_p_value(after, Rate(positions * 0.6, positions)) <= level_of(1)
    assert hits <= 67


@pytest.mark.soak
@pytest.mark.parametrize("window", [20, 40, 128])
@pytest.mark.parametrize("drawn", [normal, ragged, uneven])
def test_of_many_streams_at_most_one_in_twenty_lets_an_equal_drafter_through(drawn, window):
    assert passes(p_values(drawn, streams=5000, window=window, step=5)) <= 0.05


def test_texts_of_one_conversation_are_one_observation():
    """16 answers to each of 8 prompts are 8 observations, whose gains are alike."""
    generator = torch.Generator().manual_seed(0)
    shared = 0.05 * torch.randn(8, generator=generator).repeat_interleave(16)
    before, after = (making.totals((0.6 + change).tolist()) for change in (shared, 0 * shared))
    options = {"anchor_after": None, "anchor_first": None, "tolerance": 0.02, "gate": 1}
    apart = judge(after=after, before=before, **options)
    of = [number // 16 for number in range(128)]
    after, before = (dataclasses.replace(one, documents=of) for one in (after, before))
    together = judge(after=after, before=before, **options)
    assert (apart.gain.documents, together.gain.documents) == (128, 8)
    assert "of 8 conversations, 20 are needed" in together.reason
    assert together.p_value > apart.p_value


def test_the_pairing_finds_what_independent_intervals_would_miss():
    after, before = noisy(0.62, seed=7, spread=0.01), noisy(0.6, seed=7, spread=0.0)
    assert asked(after, before).publish
    shuffled = after[1:] + after[:1]  # the same numbers, unpaired
    assert not asked(shuffled, before).publish


def test_the_judge_scores_weights_and_not_the_model_it_was_given():
    target, records = making.target(), making.traffic(6)
    good, bad = tiny.adapter(seed=2), tiny.adapter(seed=8)
    exact = Judge(tiny.adapter(seed=5), target, batch_size=4)
    options = {"sampling": making.SAMPLING, "batch_size": 4}
    for draft in (bad, good, bad):
        found = exact.score(draft.model.state_dict(), records).totals["alpha"]
        expected = score_contexts(target, draft, records, **options).totals["alpha"]
        torch.testing.assert_close(found, expected)


def test_a_drafter_that_is_served_by_its_argmax_is_judged_by_it():
    """And greedy, cut and warm requests in one gate, each under its own sampling."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.8}, {"top_k": 3.0}]
    target, own = making.target(), tiny.adapter(seed=8)
    records = [
        dataclasses.replace(record, sampling={**record.sampling, **kinds[row % 3]})
        for row, record in enumerate(making.traffic(6))
    ]
    served, sampled = (
        Judge(tiny.adapter(seed=5), target, batch_size=4, acceptance=mode)
        for mode in ("alpha_greedy_draft", "alpha")
    )
    weights = own.weights()
    scored = score_contexts(target, own, records, sampling=None, batch_size=4)
    for judge_of, mode in ((served, "alpha_greedy_draft"), (sampled, "alpha")):
        found = judge_of.score(weights, records)
        torch.testing.assert_close(found.totals["alpha"], scored.totals[mode])
    assert not torch.equal(scored.totals["alpha"], scored.totals["alpha_greedy_draft"])
