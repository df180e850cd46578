"""Drifting traffic, simulated: answers stream by, drafters are refitted, alpha is told.

What a server answers has the target's law whatever its drafter, so the stream is sampled once and
shown to all services that are compared. Each point of the curve is taken on requests that no
drafter has seen yet; then they are recorded, and updates happen where they are due. There is no
HTTP and no waiting here: what a daemon would do between requests is done between requests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from draftkit.config import DEFAULT_ROUTE
from draftkit.data.rollouts import Record
from draftkit.evaluation.alpha import PromptTotals
from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.online.buffer import Buffer, Entry
from draftkit.online.refit import Refit, Update

Score = Callable[[Mapping[str, Adapter], Sequence[Record]], Mapping[str, PromptTotals]]


@dataclass
class Service:
    """A drafter that is refitted from what it serves. `draft` holds the version in force."""

    name: str
    draft: CausalAdapter
    buffer: Buffer
    refit: Refit
    version: str = ""
    buffered: int = 0

    def follow(self) -> None:
        """Take the version in force, as a server does."""
        version = self.refit.registry.current()
        if version is not None and version.name != self.version:
            self.draft.load_weights(self.refit.registry.read(version))
            self.version = version.name

    def record(self, records: Sequence[Record]) -> Iterator[Update]:
        """Put what was served into the buffer; yield the updates that follow."""
        served = {"route": DEFAULT_ROUTE, "version": self.version}
        times = enumerate(records, self.buffered + 1)  # a second a request
        self.buffer.append([Entry(record=r, seconds=float(s), **served) for s, r in times])
        self.buffered += len(records)
        while self.refit.due():
            yield self.refit.update()
            self.follow()


def stream(
    domains: Mapping[str, Sequence[Record]],
    services: Sequence[Service],
    *,
    others: Callable[[str], Mapping[str, Adapter]],
    score: Score,
    points: int,
    scored: int,
    step: int,
    tell: Callable[[Service, int, Update], Any],
) -> Iterator[dict[str, Any]]:
    """Let the domains pass, one after the other; yield `points` of each, all it brought recorded.

    A point is alpha by drafter on requests `first` .. `last` - 1 of the whole stream, before any
    drafter saw them, as the curve stores it. `others(domain)` are drafters that do not change;
    `scored` requests of each point are scored; `step` requests are recorded at a time, `tell`
    hears of every update.
    """
    before = 0
    for domain, records in domains.items():
        edges = [len(records) * part // points for part in range(points + 1)]
        for first, last in pairwise(edges):
            for service in services:
                service.follow()
            drafts = {**others(domain), **{service.name: service.draft for service in services}}
            totals = score(drafts, records[first : min(last, first + scored)])
            point = {
                "domain": domain,
                "first": before + first,
                "last": before + last,
                "alpha": {name: sums.alpha.as_dict() for name, sums in totals.items()},
                "versions": {service.name: service.version for service in services},
            }
            for start in range(first, last, step):
                for service in services:
                    recorded = min(last, start + step)
                    for update in service.record(records[start:recorded]):
                        tell(service, before + recorded, update)
            yield point
        before += len(records)
