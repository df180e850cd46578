"""Evaluations of drawn documents: intervals hold the truth, and nothing gained is rarely named."""

import pytest
import torch

from draftkit.config import EvaluateConfig
from draftkit.evaluation.intervals import proportion
from draftkit.theory.acceptance import Rate
from tests.evaluation.simulated import (
    ANSWERS,
    CHATS,
    DOCUMENTS,
    LIKENESS,
    MEANS,
    TIED_DOCUMENTS,
    TIED_MEANS,
    TIES,
    coverage,
    named,
    rates,
    starred,
    tied_coverage,
)


@pytest.mark.parametrize("answers", [1, 16, CHATS])
def test_intervals_hold_the_truth_whatever_a_document_is(answers):
    """Of 500, 93 to 97 % and two and a half standard errors of that."""
    for share in coverage(20, answers, 0.5, repetitions=500).values():
        assert 0.905 <= share <= 0.99


@pytest.mark.parametrize("mean", [0.05, 0.95])
def test_the_interval_of_a_proportion_near_its_end_covers_the_truth(mean: float) -> None:
    """Where many documents have nothing accepted, or refused."""
    generator, counts = torch.Generator().manual_seed(2), torch.full((20,), 100.0).double()
    covered = 0
    for _ in range(1000):
        rate = Rate(torch.binomial(counts, rates(mean, 20, generator), generator=generator), counts)
        covered += not proportion(rate).excludes(mean)
    assert 0.93 <= covered / 1000 <= 0.97


@pytest.mark.soak
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("answers", ANSWERS)
def test_intervals_hold_the_truth_in_every_cell(answers, documents, mean):
    for share in coverage(documents, answers, mean, repetitions=5000).values():
        assert 0.93 <= share <= 0.97


def test_intervals_hold_the_truth_where_lengths_go_with_alpha():
    """Of 200, 93 % less two and a half standard errors; without skewness it is 84 %."""
    assert tied_coverage(40, 0.05, 0.8, repetitions=200)["alpha"] >= 0.885


@pytest.mark.soak
@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("mean", TIED_MEANS)
@pytest.mark.parametrize("documents", TIED_DOCUMENTS)
def test_intervals_hold_the_truth_in_every_cell_where_lengths_go_with_alpha(documents, mean, tie):
    """93 to 97 %, and two standard errors; gains near 0 or 1, of few tokens, up to 98.5 %.

    One cell is not within that: 20 documents, 0.05 and -0.8 have 98.8 % (docs/log.md).
    """
    held = tied_coverage(documents, mean, tie, repetitions=5000)
    assert 0.925 <= held.pop("gain") <= 0.985
    assert all(0.923 <= share <= 0.975 for share in held.values())


@pytest.mark.parametrize("likeness", LIKENESS)
def test_the_way_with_the_star_is_rarely_stated_too_high(likeness):
    """5 % are allowed: of 100, 5, of which 11 are two and a half standard errors more."""
    assert starred(24, 1.2, likeness, repetitions=100) <= 0.11


@pytest.mark.soak
@pytest.mark.parametrize("likeness", LIKENESS)
def test_the_way_with_the_star_is_stated_too_high_in_at_most_five_of_a_hundred(likeness):
    assert starred(24, 1.2, likeness, repetitions=5000) <= 0.05 + 2 * (0.05 * 0.95 / 5000) ** 0.5


def test_ways_that_gain_nothing_are_rarely_named():
    """3 % are allowed: of 200, 6, of which 12 are two and a half standard errors more."""
    assert named(20, noise=0.15, repetitions=200)["either"] <= 12 / 200


@pytest.mark.soak
@pytest.mark.parametrize("noise", [0.05, 0.15, 0.35])
@pytest.mark.parametrize("documents", [20, EvaluateConfig().timing_prompts])
def test_of_many_ways_that_gain_nothing_at_most_three_in_a_hundred_are_named(documents, noise):
    found = named(documents, noise=noise, repetitions=10_000)
    assert found["either"] <= 0.03
    assert 0.93 <= found["held"] <= 0.97
