"""What acceptance is worth in wall time: the factor, its ceiling, and the gamma to choose.

The model of Leviathan et al. (arXiv 2211.17192, section 3) with measured costs, all in units of
one plain target step: a round of gamma proposals takes gamma c + v + o and commits tau tokens, so

    speed-up = tau / (gamma c + v + o)

    c  cost_ratio      one draft step
    v  verify_ratio    the target pass over gamma + 1 tokens; 1 only while memory-bound
    o  overhead_ratio  the rest of the round

With v = 1 and o = 0 this is the improvement factor of theorem 3.8. Functions of alpha assume
the i.i.d. model; with a measured tau use `speedup_from_length`. Plain floats: this module knows no
tensors and measures nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """The measured parts of a round in units of a plain step, which itself is in seconds.

    verify_ratios: v by gamma, at least one of them; ValueError if there is none.
    """

    plain_seconds: float
    cost_ratio: float  # c
    verify_ratio: float  # v at the gamma in use
    overhead_ratio: float  # o
    verify_ratios: dict[int, float]

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
        known = sorted(self.verify_ratios)
        if len(known) == 1:
            return self.verify_ratios[known[0]]
        right = next((g for g in known[1:] if g >= gamma), known[-1])
        left = known[known.index(right) - 1]
        slope = (self.verify_ratios[right] - self.verify_ratios[left]) / (right - left)
        return self.verify_ratios[left] + slope * (gamma - left)


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


def factors(
    alpha: float,
    cost_ratio: float,
    verify_ratio: Callable[[int], float],
    overhead_ratio: float,
    max_gamma: int,
) -> list[float]:
    """The factor of each gamma from 0, which is plain decoding: 1, to `max_gamma`.

    verify_ratio: v as a function of gamma, from a measured table.
    """
    by_gamma = [1.0]
    tokens = 1.0  # expected_tokens(alpha, gamma), term by term: decoding asks before every round
    for gamma in range(1, max_gamma + 1):
        tokens += alpha**gamma
        verify = verify_ratio(gamma)
        by_gamma.append(speedup_from_length(tokens, gamma, cost_ratio, verify, overhead_ratio))
    return by_gamma


def best_gamma(
    alpha: float,
    cost_ratio: float,
    verify_ratio: Callable[[int], float],
    overhead_ratio: float,
    max_gamma: int,
) -> tuple[int, float]:
    """The gamma with the largest of the `factors`, and that factor.

    Gamma 0, "do not speculate", is an answer too. Of equal factors the smaller gamma wins.
    """
    by_gamma = factors(alpha, cost_ratio, verify_ratio, overhead_ratio, max_gamma)
    best = max(range(len(by_gamma)), key=by_gamma.__getitem__)
    return best, by_gamma[best]
