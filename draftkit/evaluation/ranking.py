"""Which of several drafters is better: paired differences, many of them, and what nothing beats.

Entries of the same texts are compared by document: what makes a text easy for both cancels. The
best of many was picked by the data that then compare it with the others, so it is likely to have
been lucky. Therefore a comparison counts as one of all pairs that could have been picked,
k (k - 1) / 2 of k entries, in Holm's procedure (Scand. J. Statist. 6, 1979): where all are equal,
any is called better than another in at most 5 of 100 comparisons.

Settings are compared, not weights: another seed would have trained other ones. The error of a
difference between runs that were trained apart therefore holds the deviation between seeds of both,
beside that of documents. Where cells have several seeds, these tell it.
"""

import math
import operator
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import torch
from scipy.special import stdtr, stdtrit
from torch import Tensor

from draftkit.evaluation.intervals import LEAST_UNITS, Compare, estimate, gain_p_value
from draftkit.theory.acceptance import Rate
from draftkit.theory.forecast import DEVIATION

LEVEL = 0.05
Z = NormalDist().inv_cdf(0.975)


class Entry(NamedTuple):
    """A measured number, its 95 % interval (infinite where there is none), and what it is made of.

    rates: by prompt or by chunk of `texts`; empty where they were not kept. by_seed: the numbers of
    the seeds of a cell; all entries of a comparison have the same seeds, or none. weights: the
    checksum of what was trained; without one it counts as trained apart from all others. deviation:
    of the number between trainings that differ in their seed alone.
    """

    mean: float
    low: float = -math.inf
    high: float = math.inf
    rates: tuple[Rate, ...] = ()
    texts: str = ""
    by_seed: tuple[float, ...] = ()
    weights: str = ""
    deviation: float = DEVIATION


class Difference(NamedTuple):
    """One entry minus another, with its 95 % interval.

    p_value: two-sided, of so large a difference between equals; 1 where there is no interval.
    """

    mean: float
    low: float
    high: float
    p_value: float
    paired: bool = True

    @property
    def differs(self) -> bool:
        return self.p_value < LEVEL


def speedup_gain(fast: Tensor, slow: Tensor, other_fast: Tensor, other_slow: Tensor) -> Tensor:
    """One speed-up minus another, each over the plain decoding beside it."""
    return fast / slow - other_fast / other_slow


def difference(one: Entry, other: Entry, compare: Compare = operator.sub) -> Difference:
    """One entry minus the other, paired where both have rates of the same texts.

    compare: makes it of their rates. What one has timed further than the other is left out. Others
    are taken as independent, by their intervals: too careful a test where their texts are alike.
    """
    apart = not one.weights or one.weights != other.weights
    seeds = math.hypot(one.deviation, other.deviation) * apart
    if not (one.rates and other.rates and one.texts == other.texts):
        mean = one.mean - other.mean
        width = math.hypot((one.high - one.low) / 2, (other.high - other.low) / 2, Z * seeds)
        p_value = 2 * NormalDist().cdf(-Z * abs(mean) / width) if width else 1.0
        return Difference(mean, mean - width, mean + width, p_value, paired=False)
    count = min(len(rate.counts) for rate in (*one.rates, *other.rates))
    mine, theirs = (
        [Rate(r.totals[:count], r.counts[:count], r.documents[:count]) for r in entry.rates]
        for entry in (one, other)
    )
    gain = estimate(*mine, *theirs, compare=compare)
    if gain.documents < LEAST_UNITS:
        return Difference(gain.mean, gain.low, gain.high, 1.0)
    # An error that is larger by a factor tests as a gain that is smaller by it.
    width = (gain.high - gain.low) / 2
    factor = math.hypot(width, Z * seeds) / width if width else 1.0
    ordered = (*mine, *theirs) if gain.mean > 0 else (*theirs, *mine)
    excess = abs(gain.mean) * (1 - 1 / factor)
    p_value = gain_p_value(*ordered, compare=lambda *rates: compare(*rates) - excess)
    low, high = (gain.mean + factor * (end - gain.mean) for end in (gain.low, gain.high))
    return Difference(gain.mean, low, high, min(1.0, 2 * p_value))


def seed_difference(values: Tensor, one: int, other: int) -> Difference:
    """Cell `one` minus cell `other` of values [cells, seeds], by the residuals of all cells.

    Of a randomised block design: what a seed does to all cells cancels, and the rest, of training
    and of the texts it is judged on, is taken as equally large in all cells,

        error^2 = 2 sum (x - cell mean - seed mean + mean)^2 / ((cells - 1) (seeds - 1)) / seeds
    """
    cells, seeds = values.shape
    rest = values - values.mean(1, keepdim=True) - values.mean(0) + values.mean()
    degrees = (cells - 1) * (seeds - 1)
    error = math.sqrt(2 * float(rest.square().sum()) / degrees / seeds)
    mean = float(values[one].mean() - values[other].mean())
    width = -float(stdtrit(degrees, 0.025)) * error
    p_value = 2 * float(stdtr(degrees, -abs(mean) / error)) if error else float(mean == 0)
    return Difference(mean, mean - width, mean + width, p_value)


def against(
    entries: Sequence[Entry], reference: int, compare: Compare = operator.sub
) -> list[Difference | None]:
    """Every entry minus entry `reference`, which these data may have picked; None of itself.

    Intervals are those of one comparison. p values are Holm's, of all pairs of entries.
    """
    values = torch.tensor([entry.by_seed for entry in entries], dtype=torch.float64)
    made = [
        seed_difference(values, number, reference)
        if entry.by_seed
        else difference(entry, entries[reference], compare)
        for number, entry in enumerate(entries)
        if number != reference
    ]
    adjusted = holm([one.p_value for one in made], len(entries) * (len(entries) - 1) // 2)
    standing: list[Difference | None] = [
        one._replace(p_value=p_value) for one, p_value in zip(made, adjusted, strict=True)
    ]
    return [*standing[:reference], None, *standing[reference:]]


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
    """Which of the points (gain, cost) gain more than every point of no larger cost, by cost."""
    kept: list[int] = []
    for number in sorted(range(len(points)), key=lambda i: (points[i][1], -points[i][0])):
        if not kept or points[number][0] > points[kept[-1]][0]:
            kept.append(number)
    return kept
