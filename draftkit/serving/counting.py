"""Counts of what the engine does, by route and drafter version.

The engine's thread adds; anybody may take a snapshot. Knows no text.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from draftkit.serving.jobs import Counters, DrafterCounters


@dataclass
class _Tally:
    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list)
    tested: int = 0
    acceptance: float = 0.0
    seconds: float = 0.0

    def frozen(self) -> DrafterCounters:
        return DrafterCounters(
            requests=self.requests,
            tokens=self.tokens,
            rounds=self.rounds,
            drafts=self.drafts,
            drafted=self.drafted,
            accepted=self.accepted,
            accepted_per_position=tuple(self.per_position),
            tested=self.tested,
            acceptance=self.acceptance,
            seconds=self.seconds,
        )


class Counting:
    """The sums since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.errors = 0
        self._tallies: dict[tuple[str, str], _Tally] = {}
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
            tally = self._tallies.setdefault(key, _Tally())
            tally.rounds += 1
            tally.drafts += drafted > 0
            tally.drafted += drafted
            tally.accepted += accepted
            tally.per_position += [0] * (drafted - len(tally.per_position))
            for place in range(accepted):
                tally.per_position[place] += 1
            tally.tested += tested
            tally.acceptance += acceptance
            tally.seconds += seconds

    def tokens(self, key: tuple[str, str], count: int) -> None:
        """Tokens that a listener is told: no stop string takes them back, so sums never fall."""
        with self._lock:
            self._tallies.setdefault(key, _Tally()).tokens += count

    def request(self, key: tuple[str, str]) -> None:
        """A row has come to its end."""
        with self._lock:
            self._tallies.setdefault(key, _Tally()).requests += 1

    def drafters(self) -> Mapping[tuple[str, str], DrafterCounters]:
        """A snapshot by route and version."""
        with self._lock:
            return {key: tally.frozen() for key, tally in self._tallies.items()}

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
