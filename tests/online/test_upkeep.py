"""Room and retention: the newest that fit stay, and what is deleted is gone."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftkit.online.buffer import TOO_MUCH, Buffer
from tests.online.traffic import DAY, Clock, entries, numbers, settings


def content_bytes(buffer: Buffer) -> int:
    with buffer._database.session() as connection:
        return connection.execute("SELECT sum(length(content)) FROM records").fetchone()[0]


@pytest.fixture
def table() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE records (id, route, size)")
    yield connection
    connection.close()


@pytest.mark.parametrize(
    ("room", "kept"), [(0, 0), (3, 0), (4, 1), (9, 2), (12, 3), (13, 4), (99, 4)]
)
def test_of_the_newest_as_many_stay_as_fit_and_none_behind_one_that_does_not(
    table: sqlite3.Connection, room: int, kept: int
) -> None:
    for number, size in enumerate([1, 4, 4, 4], 1):
        rows = [(number, "a", size), (10 + number, "b", 1)]
        table.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
    table.execute(TOO_MUCH, (2.0 * room,))  # half of it for each route
    of_other = min(room, 4)
    expected = [*range(5 - kept, 5), *range(15 - of_other, 15)]
    assert [row[0] for row in table.execute("SELECT id FROM records ORDER BY id")] == expected


def test_the_newest_stay_and_the_bound_is_kept(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "b.sqlite", settings(max_megabytes=0.4))
    for start in range(0, 400, 20):
        buffer.append(entries(range(start, start + 20), tokens=40, width=8))  # brings upkeep
        assert content_bytes(buffer) <= 450_000
    buffer.maintain()
    assert 380_000 <= content_bytes(buffer) <= 400_000
    assert (tmp_path / "b.sqlite").stat().st_size <= 800_000
    found = numbers(buffer)
    assert found == list(range(found[0], 400))
    assert found[0] > 100
    buffer.close()


def test_a_busy_route_does_not_push_out_a_quiet_one(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "b.sqlite", settings(max_megabytes=0.4))
    buffer.append(entries(range(20), "quiet", tokens=40, width=8))
    for start in range(0, 600, 100):
        buffer.append(entries(range(start, start + 100), "busy", tokens=40, width=8))
        buffer.maintain()
        assert content_bytes(buffer) <= 400_000
    assert numbers(buffer, "quiet") == list(range(20))
    assert 20 < len(numbers(buffer, "busy")) < 120
    buffer.close()


def test_what_is_deleted_is_not_in_the_files_any_more(tmp_path: Path) -> None:
    clock = Clock()
    buffer = Buffer(tmp_path / "b.sqlite", settings(retention_days=3), clock=clock)

    def traces(number: int) -> int:
        """In how many pieces of what was stored the files still have it."""
        contents = [path.read_bytes() for path in tmp_path.iterdir()]
        blob = stored[number]
        pieces = [blob[start : start + 24] for start in range(40, len(blob) - 24, 1000)]
        return sum(piece in content for content in contents for piece in pieces)

    buffer.append(entries(range(100, 150), tokens=300, width=8))
    clock.pass_time(2 * DAY)
    buffer.append(entries(range(150, 200)))
    with buffer._database.session() as connection:
        blobs = connection.execute("SELECT content FROM records ORDER BY id").fetchall()
    stored = {number: blob for number, (blob,) in zip(range(100, 200), blobs, strict=True)}
    assert all(traces(number) for number in range(100, 200))
    clock.pass_time(2 * DAY)
    buffer.maintain()
    assert [traces(number) for number in range(100, 150)] == [0] * 50
    assert all(traces(number) for number in range(150, 200))
    assert (tmp_path / "b.sqlite-wal").stat().st_size == 0
    assert (tmp_path / "b.sqlite").stat().st_size < 200_000
    buffer.close()
