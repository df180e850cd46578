"""Is a new drafter as good as the one before it, by what it was accepted for in real requests?

Acceptance is compared as the theory defines it, sum_x min(p, q) over tested positions, so a
handful of requests tell more than counts of accepted tokens would. The two drafters see the same
traffic at the same time, drawn at random. Knows no drafters and no registry.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import torch

from draftkit.theory.acceptance import Rate, rate_error

KEPT = 4096  # requests that a mean is made of, the last ones
REQUESTS = 20  # of each version, at least: of fewer the error of a mean is not known
WIDTH = 1.96  # standard errors: an equal version exceeds them on one side once in 40 times


@dataclass
class AcceptanceLog:
    """What one version was accepted for: tested positions and their acceptance, by request."""

    tested: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    acceptance: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    positions: int = 0  # tested, those of requests that are kept no more included

    def add(self, tested: int, acceptance: float) -> None:
        """One more request; one without a test tells nothing."""
        if tested > 0:
            self.tested.append(tested)
            self.acceptance.append(acceptance)
            self.positions += tested

    def copy(self) -> "AcceptanceLog":
        """What is known by now."""
        return AcceptanceLog(self.tested.copy(), self.acceptance.copy(), self.positions)

    @property
    def mean(self) -> float:
        """Acceptance per tested position; there must be one."""
        return sum(self.acceptance) / sum(self.tested)

    @property
    def error(self) -> float:
        """The standard error of the mean over requests, of which there must be two."""
        totals = torch.tensor(self.acceptance, dtype=torch.float64)
        return rate_error(Rate(totals, torch.tensor(self.tested, dtype=torch.float64)))


@dataclass(frozen=True)
class Verdict:
    """Whether a new version stays, and why."""

    stays: bool
    reason: str


def judge(*, new: AcceptanceLog, old: AcceptanceLog, positions: int) -> Verdict | None:
    """The verdict on `new` once it has `positions` tested positions; None as long as it is open.

    It goes only where it is surely worse: where the 95 % interval of the difference of the means
    lies below 0. One that is exactly as good goes with a probability of 1/40.
    """
    if new.positions < positions or min(len(new.tested), len(old.tested)) < REQUESTS:
        return None
    change, width = new.mean - old.mean, WIDTH * math.hypot(new.error, old.error)
    stays = change + width >= 0
    compared = f"{new.mean:.4f} over {new.positions} positions"
    side = "not surely below" if stays else "below"
    reason = f"acceptance {compared} is {side} the old one's {old.mean:.4f}"
    return Verdict(stays, f"{reason}: {change:+.4f} \u00b1{width:.4f}")


def give_up(*, new: AcceptanceLog, rows: int, share: float, positions: int) -> Verdict | None:
    """The end of a trial that the traffic does not decide; None while it still may.

    `rows` have begun since it did, of which `share` was meant for `new`. It goes where by one test
    a row it would have been judged: then nearly all rows have a seed, or gamma is 0.
    """
    if rows * share < max(positions, 4 * REQUESTS):
        return None
    return Verdict(
        False,
        f"it cannot be judged: of {rows} rows it has {new.positions} tested positions, and "
        f"online.gate.canary_tokens asks for {positions}; rows with a seed do not try it, gamma 0 "
        "tests nothing, and online.gate.canary_fraction=0 publishes without a trial",
    )
