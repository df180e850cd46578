"""Intervals by hand, by reference and by simulated coverage; tests of paired gains."""

import json
import math
import operator

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from draftkit.evaluation.intervals import (
    IN_ON_ODDS,
    Estimate,
    acceptance_length,
    estimate,
    gain_p_value,
    log_ratio,
    proportion,
    reach,
    speedup,
    unskewed,
)
from draftkit.theory.acceptance import Rate


def correlated_prompts(generator: torch.Generator, prompts: int = 80) -> tuple[Tensor, Tensor]:
    """Accepted and tested positions by prompt: easy prompts are long, hard ones short."""
    is_easy = torch.rand(prompts, generator=generator) < 0.5
    spread = torch.rand(prompts, generator=generator)
    rate = torch.where(is_easy, 0.7 + 0.25 * spread, 0.3 + 0.3 * spread)
    counts = torch.where(is_easy, 50.0, 10.0)
    return torch.binomial(counts, rate, generator=generator), counts


TRUE_RATIO = (50 * 0.825 + 10 * 0.45) / 60


def test_the_interval_covers_the_truth_at_its_level_where_positions_of_a_prompt_agree() -> None:
    generator = torch.Generator().manual_seed(3)
    repetitions, covered, covered_by_positions = 1000, 0, 0
    for _ in range(repetitions):
        totals, counts = correlated_prompts(generator)
        found = estimate(Rate(totals, counts))
        covered += not found.excludes(TRUE_RATIO)
        # An interval that takes positions for independent is too narrow: the reason for prompts.
        error = math.sqrt(found.mean * (1 - found.mean) / found.n)
        covered_by_positions += abs(found.mean - TRUE_RATIO) < 1.96 * error
    assert 0.93 <= covered / repetitions <= 0.97
    assert covered_by_positions / repetitions < 0.85


def degrees(share: np.ndarray) -> float:
    """The geometric mean of (sum w^2)^2 / sum w^4 and sum w^2 / sum w^3."""
    second, third, fourth = ((share**power).sum() for power in (2, 3, 4))
    return np.sqrt(second**2 / fourth * (second / third))


def test_the_interval_is_that_of_the_formulas_by_hand() -> None:
    """Residuals over 1 - share (HC3), and Student's t of scipy at the effective documents, which
    lies where `unskewed` has the ends."""
    totals, counts = correlated_prompts(torch.Generator().manual_seed(4), prompts=25)
    t, n = totals.double().numpy(), counts.double().numpy()
    share, rate = n / n.sum(), t.sum() / n.sum()
    moved = (t - rate * n) / n.sum() / (1 - share)
    error = ((moved**2).sum() * 25 / 24) ** 0.5
    skewness = (moved**3).sum() / (moved**2).sum() ** 1.5
    found = estimate(Rate(totals, counts))
    ends = ((rate - found.low) / error, -skewness), ((found.high - rate) / error, skewness)
    edge = stats.t.isf(0.025, degrees(share))
    assert [unskewed(*end) for end in ends] == pytest.approx([edge, edge], rel=1e-9)


def test_the_interval_of_a_proportion_is_that_of_its_log_odds() -> None:
    """Each document left out by hand; ends inside 0 to 1; the mean is that of the rate."""
    totals, counts = correlated_prompts(torch.Generator().manual_seed(4), prompts=25)
    t, n = totals.double().numpy(), counts.double().numpy()
    without = (t.sum() - t) / (n.sum() - n)
    odds, left = np.log(t.sum() / (n - t).sum()), np.log(without / (1 - without))
    error = (((left - odds) ** 2).sum() * 25 / 24) ** 0.5
    share = n / n.sum()
    edge = stats.t.isf(0.025, degrees(share))
    moved = odds - left
    skewness = (moved**3).sum() / (moved**2).sum() ** 1.5
    down, up = (reach(edge, one, IN_ON_ODDS) for one in (-skewness, skewness))
    widths = np.array([-down, up]) * error
    found = proportion(Rate(totals, counts))
    ends = 1 / (1 + np.exp(-(odds + widths)))
    assert [found.low, found.high] == pytest.approx(ends.tolist(), rel=1e-9)
    assert found.mean == pytest.approx(t.sum() / n.sum(), rel=1e-12)
    length = acceptance_length(Rate(counts + 3 * totals, counts), gamma=3)  # tau, from 1 to 4
    assert [length.low, length.high] == pytest.approx((1 + 3 * ends).tolist(), rel=1e-9)


@pytest.mark.parametrize("total", [0.0, 50.0])
def test_a_proportion_without_odds_has_the_interval_of_its_rate(total: float) -> None:
    """All refused, all accepted, and all that was accepted in one document."""
    counts = torch.full((20,), 50.0).double()
    alone = torch.full((20,), total).double()
    for totals in (alone, alone.index_fill(0, torch.tensor([3]), 25.0)):
        assert proportion(Rate(totals, counts)) == estimate(Rate(totals, counts))


def test_rows_of_a_document_are_one_observation() -> None:
    """Summed by hand first, or by the documents that the rate carries: the same, in any order."""
    totals, counts = (x.double() for x in correlated_prompts(torch.Generator().manual_seed(4), 120))
    documents = [f"d{row % 30}" for row in range(120)]
    summed = estimate(Rate(totals.view(4, 30).sum(0), counts.view(4, 30).sum(0)))
    carried = estimate(Rate(totals, counts, documents))
    assert (carried.low, carried.high) == pytest.approx((summed.low, summed.high), rel=1e-12)
    assert (carried.prompts, carried.documents) == (120, 30)
    copied = [x.repeat_interleave(16) for x in (totals[:30], counts[:30])]
    apart = estimate(Rate(*copied))
    together = estimate(Rate(*copied, [row // 16 for row in range(480)]))
    assert together.high - together.low > 4 * (apart.high - apart.low)  # the root of 16, and t


def test_fewer_than_twenty_documents_have_no_interval() -> None:
    rates = [Rate(torch.rand(n), torch.ones(n)) for n in (1, 19, 20)]
    assert [estimate(rate).ci95 is None for rate in rates] == [True, True, False]
    none = estimate(rates[1])
    assert none == estimate(rates[1])
    assert str(none) == f"{none.mean:.3f} (no interval: 19 documents, 20 needed)"
    assert not none.excludes(5.0)
    sixteen_answers = Rate(torch.rand(304), torch.ones(304), [row // 16 for row in range(304)])
    assert json.loads(json.dumps(estimate(sixteen_answers).as_dict()))["ci95"] is None


def test_a_drafter_compared_with_itself_gains_exactly_nothing() -> None:
    rate = Rate(*correlated_prompts(torch.Generator().manual_seed(6)))
    positions = int(rate.counts.sum())
    gain, quotient = estimate(rate, rate, compare=operator.sub), speedup(rate, rate)
    assert gain == Estimate(0.0, 0.0, 0.0, positions, 80, 80)
    assert quotient == Estimate(1.0, 1.0, 1.0, positions, 80, 80)


def test_a_speedup_compares_rates_where_the_answers_of_both_ways_differ_in_length() -> None:
    """Sampled twice, one way may happen to write the longer texts: seconds alone would mislead."""
    generator = torch.Generator().manual_seed(7)
    mine, others = (20 + 200 * torch.rand(2, 40, generator=generator)).unbind()
    found = speedup(Rate(2 * mine, mine / 50), Rate(2 * others, others / 40))
    assert found.mean == pytest.approx(50 / 40)
    assert found.high - found.low < 1e-5


@pytest.mark.parametrize("sign", [1, -1])
def test_the_interval_of_a_speedup_and_its_p_value_are_one_test(sign: int) -> None:
    """The interval begins at 1 where the p value is 2.5 %."""
    generator = torch.Generator().manual_seed(8)
    tokens = 50 + 100 * torch.rand(30, generator=generator, dtype=torch.float64)
    seconds = tokens * (1 + 0.2 * torch.randn(30, generator=generator, dtype=torch.float64))
    plain = Rate(tokens, tokens)
    found = speedup(Rate(tokens, seconds), plain)
    edge = found.low if sign > 0 else found.high
    level = gain_p_value(Rate(tokens / edge, seconds), plain, compare=log_ratio)
    assert level == pytest.approx(0.025 if sign > 0 else 0.975, rel=1e-6)


def test_a_document_without_positions_is_no_observation() -> None:
    totals, counts = (torch.tensor(x).repeat(20) for x in ([3.0, 0.0, 2.0], [4.0, 0.0, 5.0]))
    with_empty, kept = estimate(Rate(totals, counts)), counts > 0
    assert with_empty == estimate(Rate(totals[kept], counts[kept]))
    assert with_empty.prompts == with_empty.documents == 40
    with pytest.raises(ValueError, match="both sides"):
        estimate(Rate(totals, counts), Rate(totals, counts + 1), compare=operator.sub)


# Whether a ratio lies above another one


def test_with_answers_of_one_length_the_test_of_a_gain_is_nearly_the_paired_t_test() -> None:
    """Leaving one out divides residuals by 1 - 1 / 24, and takes 24 degrees for 23.

    Where gains are not skewed: each stands beside one as far on the other side of their mean.
    """
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand(2, 12, generator=generator, dtype=torch.float64)
    after, before = torch.cat([drawn, 1 - drawn], dim=1)
    after = after + 0.1
    counts = torch.full_like(after, 10)
    found = gain_p_value(Rate(after * 10, counts), Rate(before * 10, counts))
    t = stats.ttest_rel(after.numpy(), before.numpy()).statistic * 23 / 24
    assert found == pytest.approx(float(stats.t.sf(t, 24)), rel=1e-8)


def test_the_test_of_a_gain_refuses_nothing_to_compare_and_keeps_nan() -> None:
    ones = torch.ones(5, dtype=torch.float64)

    def p_value(after: Tensor, counts: Tensor = ones) -> float:
        return gain_p_value(Rate(after, counts), Rate(ones / 2, counts))

    assert p_value(ones / 2) == 1  # the same
    assert p_value(ones) < 1e-30  # the same gain everywhere
    assert math.isnan(p_value(ones * math.nan))
    with pytest.raises(ValueError, match="at least 2 documents with positions, got 1"):
        p_value(ones, torch.tensor([3.0, 0, 0, 0, 0], dtype=torch.float64))
