"""What acceptance is worth in wall time: the factor, its ceiling, and the gamma to choose.

The model of Leviathan et al. (arXiv 2211.17192, section 3) with measured costs, all in units of
one plain target step: a round of gamma proposals takes gamma c + v + o and commits tau tokens, so

    speed-up = tau / (gamma c + v + o)

    c  cost_ratio      one draft step; gamma c is what all proposals of a round cost
    v  verify_ratio    the target pass over gamma + 1 tokens; 1 only while memory-bound
    o  overhead_ratio  the rest of the round

What proposing costs is measured at several gammas, as a parallel drafter proposes all tokens of a
round in one pass: its gamma c hardly grows. With v = 1 and o = 0 this is the improvement factor of
theorem 3.8. Functions of alpha assume the i.i.d. model; with a measured tau use
`speedup_from_length` or `by_gamma`. Plain floats: this module knows no tensors and measures
nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Costs:
    """The measured parts of a round in units of a plain step, which itself is in seconds.

    verify_ratios: v by gamma, at least one of them; ValueError if there is none. draft_units: what
    all proposals of a round cost, by gamma; empty: gamma c.
    """

    plain_seconds: float
    cost_ratio: float  # c at the gamma in use
    verify_ratio: float  # v at the gamma in use
    overhead_ratio: float  # o
    verify_ratios: dict[int, float]
    draft_units: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.verify_ratios:
            raise ValueError("verify_ratios is empty; measure verification at one gamma at least")

    @property
    def ratios(self) -> dict[str, float]:
        """c, v and o, as `speedup_from_length` takes them."""
        names = ("cost_ratio", "verify_ratio", "overhead_ratio")
        return {name: getattr(self, name) for name in names}

    def verify_at(self, gamma: int) -> float:
        """v(gamma), linear between the measured ones and beyond; constant if there is but one."""
        return _linear(self.verify_ratios, gamma)

    def draft_at(self, gamma: int) -> float:
        """What `gamma` proposals cost: linear between the measured numbers, 0 for none."""
        if gamma == 0 or len(self.draft_units) < 2:
            return gamma * self.cost_ratio
        return max(_linear(self.draft_units, gamma), 0.0)

    def at(self, gamma: int) -> "Costs":
        """The same with c and v at `gamma`, at least 1."""
        ratios = {"cost_ratio": self.draft_at(gamma) / gamma, "verify_ratio": self.verify_at(gamma)}
        return replace(self, **ratios)

    def round_at(self, gamma: int) -> float:
        """What a round of `gamma` proposals costs in all."""
        return self.draft_at(gamma) + self.verify_at(gamma) + self.overhead_ratio


def _linear(table: Mapping[int, float], at: int) -> float:
    """The value at `at` on the line through its two neighbours in `table`, or its last two."""
    known = sorted(table)
    if len(known) == 1:
        return table[known[0]]
    right = next((one for one in known[1:] if one >= at), known[-1])
    left = known[known.index(right) - 1]
    return table[left] + (table[right] - table[left]) / (right - left) * (at - left)


def expected_tokens(alpha: float, gamma: int) -> float:
    """tau = (1 - alpha^(gamma+1)) / (1 - alpha), equation 1: tokens per round, as their sum."""
    return sum((alpha**i for i in range(1, gamma + 1)), start=1.0)


def speedup_from_length(
    acceptance_length: float,
    gamma: int,
    cost_ratio: float,
    verify_ratio: float = 1.0,
    overhead_ratio: float = 0.0,
) -> float:
    """tau / (gamma c + v + o) for a measured tau."""
    return acceptance_length / (gamma * cost_ratio + verify_ratio + overhead_ratio)


def ceiling(
    gamma: int, cost_ratio: float, verify_ratio: float = 1.0, overhead_ratio: float = 0.0
) -> float:
    """The factor of a perfect draft, alpha = 1: (gamma + 1) / (gamma c + v + o)."""
    return speedup_from_length(gamma + 1, gamma, cost_ratio, verify_ratio, overhead_ratio)


def break_even_alpha(
    gamma: int, cost_ratio: float, verify_ratio: float = 1.0, overhead_ratio: float = 0.0
) -> float | None:
    """The alpha at which speculation neither gains nor loses; None if even alpha = 1 loses."""
    cost = gamma * cost_ratio + verify_ratio + overhead_ratio
    if gamma + 1 < cost:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # tau grows with alpha: bisection to the last bit
        middle = (low + high) / 2
        if expected_tokens(middle, gamma) < cost:
            low = middle
        else:
            high = middle
    return high


def by_gamma(lengths: Sequence[float], costs: Costs) -> list[float]:
    """The factor of each gamma from 0, which is plain decoding: 1; lengths: tau at 1, 2, ..."""
    return [1.0] + [tau / costs.round_at(gamma) for gamma, tau in enumerate(lengths, 1)]


def factors(alpha: float, costs: Costs, max_gamma: int) -> list[float]:
    """The factor of each gamma from 0 to `max_gamma` at this alpha."""
    lengths, tokens = [], 1.0  # term by term: decoding asks before every round
    for gamma in range(1, max_gamma + 1):
        tokens += alpha**gamma
        lengths.append(tokens)
    return by_gamma(lengths, costs)


def best_gamma(alpha: float, costs: Costs, max_gamma: int) -> tuple[int, float]:
    """The gamma with the largest of the `factors`, and that factor.

    Gamma 0, "do not speculate", is an answer too. Of equal factors the smaller gamma wins.
    """
    return largest(factors(alpha, costs, max_gamma))


def largest(factors: Sequence[float]) -> tuple[int, float]:
    """The first of the largest of `factors` by gamma, and that factor."""
    best = max(range(len(factors)), key=factors.__getitem__)
    return best, factors[best]
