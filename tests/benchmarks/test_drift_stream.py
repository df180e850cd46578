"""Along the stream drafters are scored before they learn, and everything is recorded once."""

from types import SimpleNamespace

import pytest

from draftkit.online.buffer import Entry
from pipelines.benchmarks.drift_stream import Service, stream
from tests.online import making


class FakeRefit:
    """Publishes a version for every ten records."""

    def __init__(self, buffer):
        self.buffer, self.done = buffer, 0
        self.registry = SimpleNamespace(current=self.current, read=lambda version: version.name)

    def current(self):
        return SimpleNamespace(name=f"v{self.done}")

    def due(self):
        return len(self.buffer.entries) >= 10 * (self.done + 1)

    def update(self):
        self.done += 1
        return SimpleNamespace(number=self.done)


class FakeBuffer:
    def __init__(self):
        self.entries: list[Entry] = []

    def append(self, entries):
        self.entries += entries


class FakeDraft:
    def __init__(self):
        self.weights: list[str] = []

    def load_weights(self, weights):
        self.weights.append(weights)


@pytest.fixture
def service():
    buffer = FakeBuffer()
    return Service("online", FakeDraft(), buffer, FakeRefit(buffer))  # type: ignore[arg-type]


def records(count):
    record = making.traffic(1)[0]
    return [record] * count


def run(service, domains, **options):
    seen, told = [], []

    def score(drafts, scored):
        seen.append((sorted(drafts), len(scored), len(service.buffer.entries)))
        return {name: making.totals([0.5, 0.6]) for name in drafts}

    points = list(
        stream(
            domains,
            [service],
            others=lambda domain: {"static": None, f"oracle-{domain}": None},
            score=score,
            tell=lambda service, request, update: told.append((request, update.number)),
            **{"points": 2, "scored": 6, "step": 5, **options},
        )
    )
    return points, seen, told


def test_each_point_is_scored_before_its_requests_are_recorded(service):
    points, seen, _ = run(service, {"prose": records(20), "cpp": records(20)})
    assert [(p["domain"], p["first"], p["last"]) for p in points] == [
        ("prose", 0, 10),
        ("prose", 10, 20),
        ("cpp", 20, 30),
        ("cpp", 30, 40),
    ]
    assert [recorded for _, _, recorded in seen] == [0, 10, 20, 30]
    assert [count for _, count, _ in seen] == [6] * 4
    assert seen[0][0] == ["online", "oracle-prose", "static"]
    assert seen[2][0] == ["online", "oracle-cpp", "static"]
    assert len(service.buffer.entries) == 40


def test_updates_happen_between_requests_and_versions_are_taken(service):
    points, _, told = run(service, {"prose": records(20)})
    assert told == [(10, 1), (20, 2)]
    assert [point["versions"]["online"] for point in points] == ["v0", "v1"]
    assert service.version == "v2"
    assert service.draft.weights == ["v0", "v1", "v2"]


def test_an_update_is_dated_by_what_was_recorded_by_then(service):
    """Though a point's requests are fewer than are recorded at a time."""
    _, _, told = run(service, {"prose": records(20)}, step=100)
    assert [request for request, _ in told] == [10, 20]


def test_a_version_in_force_is_not_loaded_again(service):
    service.follow()
    service.follow()
    assert service.draft.weights == ["v0"]


def test_records_know_who_served_them(service):
    run(service, {"prose": records(20)})
    versions = [entry.version for entry in service.buffer.entries]
    assert versions == ["v0"] * 10 + ["v1"] * 10
    times = [entry.seconds for entry in service.buffer.entries]
    assert times == sorted(set(times))


def test_a_stream_that_points_do_not_divide_is_still_whole(service):
    points, seen, _ = run(service, {"prose": records(23)}, points=4)
    assert [(p["first"], p["last"]) for p in points] == [(0, 5), (5, 11), (11, 17), (17, 23)]
    assert [count for _, count, _ in seen] == [5, 6, 6, 6]
    assert len(service.buffer.entries) == 23
