"""What is served is recorded once, under its version; updates are taken in between."""

from types import SimpleNamespace
from typing import Any

from draftkit.online.buffer import Entry
from pipelines.benchmarks.drift_parts import Service
from tests.online import making


class FakeRefit:
    """Publishes a version for every ten records of its buffer."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.done = 0
        self.registry = SimpleNamespace(current=self.current, read=lambda version: version.name)

    def append(self, entries: list[Entry]) -> None:
        self.entries += entries

    def current(self) -> Any:
        return SimpleNamespace(name=f"v{self.done}")

    def due(self) -> bool:
        return len(self.entries) >= 10 * (self.done + 1)

    def update(self) -> int:
        self.done += 1
        return self.done


def test_records_are_of_the_version_that_served_them_and_each_version_is_taken_once() -> None:
    refit, loaded = FakeRefit(), []
    draft: Any = SimpleNamespace(load_weights=loaded.append)
    service = Service(draft, refit, refit)  # type: ignore[arg-type]
    record = making.traffic(1)[0]
    assert [list(service.record([record] * count)) for count in (5, 5, 3, 17)] == [
        [],
        [1],
        [],
        [2, 3],
    ]
    assert loaded == ["v0", "v1", "v2", "v3"]
    assert [entry.record for entry in refit.entries] == [record] * 30
