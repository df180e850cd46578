"""A gamma policy for tests: always the same number."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FixedGamma:
    """`gamma` proposals, as far as there is room."""

    gamma: int

    def choose(self, *, batch: int, most: int) -> int:
        """`gamma`, or `most` if that is less."""
        return min(self.gamma, most)

    def observe(self, *, gamma: int, accepted: Sequence[int]) -> None:
        """Learn nothing."""
