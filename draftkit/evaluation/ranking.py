"""Which of several drafters is better: paired differences, many of them, and what nothing beats.

Two entries that were measured on the same texts are compared document by document, so that what
makes a text easy for both cancels. Seeds of one cell are compared as the blocks of a randomised
block design.

The best of many was picked by the data that then compare it with the others, so it is likely to
have been lucky. Therefore a comparison counts as one of all pairs that could have been picked,
k (k - 1) / 2 of k entries, in Holm's procedure (Scand. J. Statist. 6, 1979): where all are equal,
any is called better than any other in at most 5 of 100 comparisons.
"""

import math
import operator
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.theory.acceptance import (
    LEAST_UNITS,
    Compare,
    Rate,
    estimate,
    gain_p_value,
    student_t_quantile,
    student_t_tail,
)

LEVEL = 0.05


class Entry(NamedTuple):
    """What a run measured: a number, its 95 % interval (infinite where there is none), and by text.

    rates: what the number was made of, by prompt or by chunk; empty where they were not kept.
    texts: what they were measured on; rates of the same texts are paired. by_seed: the numbers of
    the seeds of a cell; all entries of a comparison have the same seeds, or none.
    """

    mean: float
    low: float = -math.inf
    high: float = math.inf
    rates: tuple[Rate, ...] = ()
    texts: str = ""
    by_seed: tuple[float, ...] = ()


class Difference(NamedTuple):
    """One entry minus another: 95 % interval, and how likely so much would be of equals.

    p_value: two-sided, in [0, 1]; 1 where there is no interval.
    """

    mean: float
    low: float
    high: float
    p_value: float
    paired: bool

    @property
    def differs(self) -> bool:
        return self.p_value < LEVEL


def log_speedup_ratio(fast: Tensor, slow: Tensor, other_fast: Tensor, other_slow: Tensor) -> Tensor:
    """The logarithm of one speed-up over another, each over the plain decoding beside it."""
    return (fast / slow).log() - (other_fast / other_slow).log()


def difference(one: Entry, other: Entry, compare: Compare = operator.sub) -> Difference:
    """One entry minus the other, paired where both have rates of the same texts.

    compare: makes it of their rates. What one has timed further than the other is left out. Others
    are taken as independent, by their intervals: a test that is too careful where texts are alike.
    """
    if not (one.rates and other.rates and one.texts == other.texts):
        errors = [
            (entry.high - entry.low) / 2 / NormalDist().inv_cdf(0.975) for entry in (one, other)
        ]
        return _normal(one.mean - other.mean, math.hypot(*errors))
    count = min(len(rate.counts) for rate in (*one.rates, *other.rates))
    mine, theirs = (
        [Rate(*(column[:count] for column in rate)) for rate in entry.rates]
        for entry in (one, other)
    )
    gain = estimate(*mine, *theirs, compare=compare)
    ordered = (*mine, *theirs) if gain.mean > 0 else (*theirs, *mine)
    p_value = 1.0
    if gain.documents >= LEAST_UNITS:
        p_value = min(1.0, 2 * gain_p_value(*ordered, compare=compare))
    return Difference(gain.mean, gain.low, gain.high, p_value, paired=True)


def _normal(mean: float, error: float) -> Difference:
    if not math.isfinite(error) or error == 0:
        return Difference(mean, -math.inf, math.inf, 1.0, paired=False)
    width = NormalDist().inv_cdf(0.975) * error
    p_value = math.erfc(abs(mean) / error / math.sqrt(2))
    return Difference(mean, mean - width, mean + width, p_value, paired=False)


def seed_error(values: Tensor) -> tuple[float, float]:
    """The standard error of the difference of two cells, and its degrees of freedom.

    values: [cells, seeds]. What a seed does to all cells cancels; the rest, of training and of the
    texts it is judged on, is taken as equally large in all cells:

        error^2 = 2 sum (x - cell mean - seed mean + mean)^2 / ((cells - 1) (seeds - 1)) / seeds
    """
    rest = values - values.mean(1, keepdim=True) - values.mean(0) + values.mean()
    degrees = (values.shape[0] - 1) * (values.shape[1] - 1)
    return math.sqrt(2 * float(rest.square().sum()) / degrees / values.shape[1]), degrees


def against(
    entries: Sequence[Entry], reference: int, compare: Compare = operator.sub
) -> list[Difference | None]:
    """Every entry minus entry `reference`, which may have been picked by these data; None of it.

    Intervals are those of one comparison. p values are Holm's, of all pairs of entries.
    """
    others = [number for number in range(len(entries)) if number != reference]
    if entries[reference].by_seed:
        values = torch.tensor([entry.by_seed for entry in entries], dtype=torch.float64)
        made = [_of_seeds(values, number, reference) for number in others]
    else:
        made = [difference(entries[number], entries[reference], compare) for number in others]
    adjusted = holm([one.p_value for one in made], len(entries) * (len(entries) - 1) // 2)
    standing: list[Difference | None] = [None] * len(entries)
    for number, one, p_value in zip(others, made, adjusted, strict=True):
        standing[number] = one._replace(p_value=p_value)
    return standing


def _of_seeds(values: Tensor, number: int, reference: int) -> Difference:
    error, degrees = seed_error(values)
    mean = float(values[number].mean() - values[reference].mean())
    width = student_t_quantile(degrees) * error
    p_value = 2 * student_t_tail(abs(mean) / error, degrees) if error else float(mean == 0)
    return Difference(mean, mean - width, mean + width, p_value, paired=True)


def holm(p_values: Sequence[float], family: int) -> list[float]:
    """Adjusted p values of tests out of a family of so many: the smallest times `family`, and on.

    Those of the family that were not made count as larger than these: the careful case.
    """
    adjusted, least = [1.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (family - rank) * p_values[number]))
        adjusted[number] = least
    return adjusted


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which of the points (gain, cost) no other beats: none gains as much at a smaller cost, or
    more at the same. In order of cost.
    """
    best, kept = -math.inf, []
    for number in sorted(range(len(points)), key=lambda i: (points[i][1], -points[i][0])):
        if points[number][0] > best:
            best = points[number][0]
            kept.append(number)
    return kept
