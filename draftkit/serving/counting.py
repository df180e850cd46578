"""Counts of what the engine does, by route and drafter version.

The engine's thread adds; anybody may take a snapshot. Knows no text.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace

from draftkit.serving.jobs import Counters, DrafterCounters


class Counting:
    """The sums since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.errors = 0
        self._sums: dict[tuple[str, str], DrafterCounters] = {}
        self._lock = threading.Lock()

    def round(
        self,
        key: tuple[str, str],
        *,
        drafted: int,
        accepted: int,
        tested: int,
        acceptance: float,
        seconds: float,
    ) -> None:
        """One row's round; `seconds` is its share of the time."""
        with self._lock:
            sums = self._sums.get(key, DrafterCounters())
            places = [*sums.accepted_per_position]
            places += [0] * (drafted - len(places))
            self._sums[key] = replace(
                sums,
                rounds=sums.rounds + 1,
                drafts=sums.drafts + (drafted > 0),
                drafted=sums.drafted + drafted,
                accepted=sums.accepted + accepted,
                accepted_per_position=tuple(n + (i < accepted) for i, n in enumerate(places)),
                tested=sums.tested + tested,
                acceptance=sums.acceptance + acceptance,
                seconds=sums.seconds + seconds,
            )

    def tokens(self, key: tuple[str, str], count: int) -> None:
        """Tokens that a listener is told: no stop string takes them back, so sums never fall."""
        with self._lock:
            sums = self._sums.get(key, DrafterCounters())
            self._sums[key] = replace(sums, tokens=sums.tokens + count)

    def request(self, key: tuple[str, str]) -> None:
        """A row has come to its end."""
        with self._lock:
            sums = self._sums.get(key, DrafterCounters())
            self._sums[key] = replace(sums, requests=sums.requests + 1)

    def drafters(self) -> Mapping[tuple[str, str], DrafterCounters]:
        """A snapshot by route and version."""
        with self._lock:
            return dict(self._sums)

    def snapshot(
        self, *, swaps: int, refused: int, swap_seconds: float, records_dropped: int
    ) -> Counters:
        """Everything, with what others counted."""
        drafters = dict(self.drafters())
        return Counters(
            drafters=drafters,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=sum(found.tokens for found in drafters.values()),
            swaps=swaps,
            refused_versions=refused,
            last_swap_seconds=swap_seconds,
            records_dropped=records_dropped,
            errors=self.errors,
        )
