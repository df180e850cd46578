"""How certain a counted number is: intervals over documents, and tests of paired gains.

Estimates are ratios of totals over positions. Their errors are those of documents: positions of a
text, answers to one prompt and turns of one chat are not independent, so all that shares a document
is summed before anything is compared. What one document does to a number is read off by leaving it
out, which for a ratio is the residual divided by 1 minus its share (HC3: MacKinnon and White,
Journal of Econometrics 29, 1985); the interval is Student's t with degrees of freedom that fall
where few documents hold most tokens. Where long documents have another rate than short ones, the
estimate is skewed, since few documents stand for those that decide: then the end on that side lies
further away (`reach`). Intervals, verdict and gate are this one computation: of proportions
on the log-odds, of speed-ups on the logarithm.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.special import stdtr, stdtrit
from torch import Tensor

from draftkit.theory.acceptance import Rate

LEAST_UNITS = 20  # documents, below which an interval is not given: those of fewer are too narrow
# By how much an end of an interval moves out, and in, relative to Hall's formula. Few documents
# show less skewness than there is, and of what they show much is chance, so that ends that move in
# as far cover too little. On the log-odds there is less of it (tests/evaluation/simulated.py).
OUT, IN, IN_ON_ODDS = 1.3, 0.4, 0.75


def reach(t: float, skewness: float, inward: float = IN) -> float:
    """How many errors an end lies away whose tail is that of `t` without skewness.

    skewness: of the estimate, towards that end. Hall's cubic, inverted (J. R. Statist. Soc. B 54,
    1992, 221): t -> t + skewness (2 t^2 + 1) / 6 + ...
    """
    s = skewness * (OUT if skewness > 0 else inward)
    return 3 * (1 - math.cbrt(1 - s * (t + s / 6))) / s if abs(s) > 1e-6 else t


def unskewed(distance: float, skewness: float) -> float:
    """The t whose `reach` is `distance`."""
    s = skewness * (OUT if skewness > 0 else IN)
    moved = s * distance / 3
    return distance * (1 - moved + moved**2 / 3) - s / 6


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, and the positions `n`, prompts and documents behind it.

    Without an interval both its ends are infinite: nothing lies outside.
    """

    mean: float
    low: float
    high: float
    n: int
    prompts: int
    documents: int

    def __str__(self) -> str:
        """`0.812 [0.801, 0.823]`, or `0.812 (no interval: 6 documents, 20 needed)`."""
        if self.ci95 is None:
            needed = f"{self.documents} documents, {LEAST_UNITS} needed"
            return f"{self.mean:.3f} (no interval: {needed})"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def ci95(self) -> list[float] | None:
        """The interval as summaries hold it; None where there is none."""
        return [self.low, self.high] if math.isfinite(self.high) else None

    def as_dict(self) -> dict[str, Any]:
        """The form in which every `summary.json` holds an estimate."""
        return {
            "mean": self.mean,
            "ci95": self.ci95,
            "n": self.n,
            "prompts": self.prompts,
            "documents": self.documents,
        }

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the interval."""
        return value < self.low or value > self.high


Compare = Callable[..., Tensor]  # makes a number of the values of one rate or of several


def log_ratio(rate: Tensor, other: Tensor) -> Tensor:
    """log(rate / other): errors of a speed-up are alike up and down on this scale."""
    return (rate / other).log()


def _jackknife(*rates: Rate, compare: Compare) -> tuple[Estimate, float, float, float]:
    """What `compare` makes of `rates`, and its error, by leaving out one document after the other.

    Returns the number without an interval, its error, the degrees of freedom of that, and its
    skewness. With D documents, theta of all and theta_i of all but document i, and w_i the share
    of document i in the counts (the mean of its shares where there are several rates),

        error^2 = D / (D - 1) sum_i (theta - theta_i)^2
        degrees = (sum_i w_i^2)^1.5 / (sum_i w_i^3 sum_i w_i^4)^0.5
        skewness = sum_i (theta - theta_i)^3 / (sum_i (theta - theta_i)^2)^1.5

    For a rate theta_i - theta is -(t_i - r n_i) / (N (1 - w_i)). Degrees are D for documents of one
    length. They lie between what is right where the tokens of a document are independent,
    1 / sum w^2, and where they agree entirely, (sum w^2)^2 / sum w^4. They are the geometric mean
    of the latter and of sum w^2 / sum w^3. By that alone 93.6 % of the intervals hold the truth, by
    the mean 94.9 %: 96 documents with one answer each, drawn as in tests/evaluation/simulated.py.
    One document has error NaN. Documents without any position are no observation; raises ValueError
    where one has positions on one side alone.
    """
    first = rates[0]
    columns = [column.detach().cpu().double() for rate in rates for column in rate[:2]]
    table = torch.stack(columns, dim=-1)  # [P, 2 x rates], counts in the odd columns
    prompts = int((table[:, 1] > 0).sum())
    if len(first.documents):
        numbers = {key: number for number, key in enumerate(dict.fromkeys(first.documents))}
        index = torch.tensor([numbers[key] for key in first.documents])
        table = table.new_zeros(len(numbers), table.shape[1]).index_add(0, index, table)
    table = table[table[:, 1::2].sum(-1) > 0]
    if not (table[:, 1::2] > 0).all():
        raise ValueError("paired estimates need positions on both sides of every document")

    def statistic(sums: Tensor) -> Tensor:
        return compare(*(sums[..., ::2] / sums[..., 1::2]).unbind(-1))

    totals, documents = table.sum(0), len(table)
    value, without = statistic(totals), statistic(totals - table)
    shares = (table[:, 1::2] / totals[1::2]).mean(-1)
    moved = value - without
    squares = moved.square().sum()
    error = math.sqrt(squares * documents / (documents - 1)) if documents > 1 else math.nan
    second, third, fourth = (float(shares.pow(power).sum()) for power in (2, 3, 4))
    degrees = second**1.5 / math.sqrt(third * fourth)
    skewness = float(moved.pow(3).sum() / squares**1.5) if error else 0.0
    number = Estimate(float(value), -math.inf, math.inf, int(totals[1]), prompts, documents)
    return number, error, degrees, skewness


def estimate(
    *rates: Rate,
    compare: Compare = lambda rate: rate,
    least: int = LEAST_UNITS,
    tail: float = 0.025,
    inward: float = IN,
) -> Estimate:
    """A rate, or what `compare` makes of several, with its interval over documents.

    Several are paired: by the documents of the first, in which all are summed. `operator.sub` gives
    a gain. `n` are the counts of the first. There is no interval for under `least` documents;
    `tail` is the probability outside of it on either side, where it is looked at once; `inward` is
    for `reach`.
    """
    number, error, degrees, skewness = _jackknife(*rates, compare=compare)
    if number.documents < max(2, least):
        return number
    t = -float(stdtrit(degrees, tail))
    down, up = (error * reach(t, one, inward) for one in (-skewness, skewness))
    return replace(number, low=number.mean - down, high=number.mean + up)


def proportion(rate: Rate, *, least: float = 0.0, most: float = 1.0) -> Estimate:
    """A rate between `least` and `most`, as alpha is, with its interval, made on the log-odds.

    Tokens a pass lie between 1 and those of a whole round. Near a bound errors of the rate itself
    are not alike up and down, those of log((rate - least) / (most - rate)) are. Where one document
    holds all that was accepted, or refused, there are no log-odds without it: then the interval is
    that of `estimate`.
    """
    plain, wide = estimate(rate), most - least
    odds = estimate(
        rate, compare=lambda value: torch.logit((value - least) / wide), inward=IN_ON_ODDS
    )
    if not math.isfinite(odds.high):
        return plain
    low, high = torch.tensor([odds.low, odds.high], dtype=torch.float64).sigmoid().tolist()
    return replace(plain, low=least + wide * low, high=least + wide * high)


def acceptance_length(rate: Rate, gamma: int) -> Estimate:
    """tau of rounds with `gamma` proposals, between 1 and gamma + 1, with its interval."""
    return proportion(rate, least=1.0, most=gamma + 1.0)


def speedup(fast: Rate, slow: Rate, *, tail: float = 0.025) -> Estimate:
    """fast / slow with its interval, of rates of the same documents, in tokens per second.

    All four totals vary: answers differ in length where they are sampled, so that tokens per second
    and not seconds are compared. The interval is made on the logarithm.
    """
    log = estimate(fast, slow, compare=log_ratio, tail=tail)
    return replace(log, mean=math.exp(log.mean), low=math.exp(log.low), high=math.exp(log.high))


def gain_p_value(*rates: Rate, compare: Compare = operator.sub) -> float:
    """How likely a paired gain this large would be if there were none: one-sided, in [0, 1].

    rates: as `estimate` takes them, those after first. By the error, the degrees of freedom and the
    skewness of its interval. NaN where a total is; raises ValueError with fewer than 2 documents.
    """
    gain, error, degrees, skewness = _jackknife(*rates, compare=compare)
    if gain.documents < 2:
        raise ValueError(f"a test needs at least 2 documents with positions, got {gain.documents}")
    if error == 0:
        return math.nan if math.isnan(gain.mean) else float(gain.mean <= 0)
    towards_none = -math.copysign(skewness, skewness * gain.mean)
    tail = float(stdtr(degrees, -unskewed(abs(gain.mean) / error, towards_none)))
    return tail if gain.mean > 0 else 1 - tail
