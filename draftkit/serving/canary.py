"""Is a new drafter as good as the one before it, by what it was accepted for in real requests?

Acceptance is compared as the theory defines it, sum_x min(p, q) over tested positions, so a
handful of requests tell more than counts of accepted tokens would. The two drafters see the same
traffic at the same time, drawn at random. Knows no drafters and no registry.
"""

from collections import deque
from dataclasses import dataclass, field

import torch

from draftkit.theory.acceptance import Estimate, estimate_ratio

KEPT = 4096  # requests that an interval is made of, the last ones


@dataclass
class Served:
    """What one version was accepted for: tested positions and their acceptance, by request."""

    tested: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    acceptance: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, tested: int, acceptance: float) -> None:
        """One more request; one without a test tells nothing."""
        if tested > 0:
            self.tested.append(tested)
            self.acceptance.append(acceptance)

    def copy(self) -> "Served":
        """What is known by now."""
        return Served(self.tested.copy(), self.acceptance.copy())

    @property
    def positions(self) -> int:
        """Tested positions."""
        return sum(self.tested)

    @property
    def mean(self) -> float:
        """Acceptance per tested position; there must be one."""
        return sum(self.acceptance) / self.positions

    def interval(self) -> Estimate:
        """The mean with its 95 % interval over requests. Raises ValueError for fewer than 2."""
        totals = torch.tensor(self.acceptance, dtype=torch.float64)
        return estimate_ratio(totals, torch.tensor(self.tested, dtype=torch.float64))


@dataclass(frozen=True)
class Verdict:
    """Whether a new version stays, and why."""

    stays: bool
    reason: str


def judge(*, new: Served, old: Served, positions: int) -> Verdict | None:
    """The verdict on `new` once it has `positions` tested positions; None as long as it is open.

    It goes only where its mean lies below the interval of the old version.
    """
    if new.positions < positions or len(old.tested) < 2:
        return None
    interval = old.interval()
    stays = new.mean >= interval.low
    compared = f"{new.mean:.4f} over {new.positions} positions"
    side = "not below" if stays else "below"
    return Verdict(
        stays, f"acceptance {compared} is {side} {interval.low:.4f}, the old one's least"
    )
