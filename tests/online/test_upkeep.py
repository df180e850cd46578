"""Room and retention: the newest stay, the sample of the others is even, the file is bounded."""

import os
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftkit.online.buffer import TOO_MUCH, Buffer
from tests.online.traffic import DAY, Clock, entries, numbers, settings


def file_bytes(buffer: Buffer) -> int:
    with buffer._database.reading() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        return pages * connection.execute("PRAGMA page_size").fetchone()[0]


@pytest.fixture
def table() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE records (id, route, luck, size)")
    yield connection
    connection.close()


def add(table: sqlite3.Connection, number: int, size: int, luck: float, route: str = "a") -> None:
    table.execute("INSERT INTO records VALUES (?, ?, ?, ?)", (number, route, luck, size))


def left(table: sqlite3.Connection, *, newest: float, older: float) -> list[int]:
    """The ids of what stays."""
    table.execute(TOO_MUCH, {"newest": newest, "older": older})
    return [row[0] for row in table.execute("SELECT id FROM records ORDER BY id")]


@pytest.mark.parametrize(
    ("room", "kept"), [(0, 0), (3, 0), (4, 1), (9, 2), (12, 3), (13, 4), (99, 4)]
)
def test_of_the_newest_as_many_stay_as_fit_and_none_behind_one_that_does_not(
    table: sqlite3.Connection, room: int, kept: int
) -> None:
    for number, size in enumerate([1, 4, 4, 4], 1):
        add(table, number, size, 0.5)
        add(table, 10 + number, 1, 0.5, "b")
    of_other = min(room, 4)  # each route has that room
    expected = [*range(5 - kept, 5), *range(15 - of_other, 15)]
    assert left(table, newest=room, older=0) == expected


def test_what_stays_of_the_older_ones_is_a_uniform_sample_of_all_that_aged(
    table: sqlite3.Connection,
) -> None:
    """Early and late, small and large ones alike, in upkeep after upkeep of small parts."""
    chance, kept, big = random.Random(0), Counter[int](), 0
    for _ in range(20):
        table.execute("DELETE FROM records")
        for number in range(600):
            add(table, number, chance.choice((5, 20)), chance.random())
            if number % 7 == 0:
                left(table, newest=50, older=1000)
        kept.update(number // 100 for number in left(table, newest=0, older=1000))
        sizes = [row[0] for row in table.execute("SELECT size FROM records")]
        assert 980 <= sum(sizes) <= 1000
        big += sizes.count(20)
    expected = kept.total() / 6
    # Chi-square with 5 degrees of freedom: 26 has a chance below 1e-4.
    assert sum((kept[part] - expected) ** 2 / expected for part in range(6)) < 26
    assert abs(big / kept.total() - 0.5) < 4 * 0.5 / kept.total() ** 0.5


def test_the_newest_stay_and_the_file_keeps_its_bound(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "b.sqlite", settings(max_megabytes=0.4))
    for start in range(0, 400, 20):
        buffer.append(entries(range(start, start + 20), tokens=40, width=8))  # brings upkeep
        assert file_bytes(buffer) <= 450_000
    buffer.maintain()
    assert file_bytes(buffer) <= 400_000
    found = numbers(buffer)
    newest = [number for number in range(400) if set(range(number, 400)) <= set(found)]
    assert 30 <= len(newest) <= 90
    older = [number for number in found if number < newest[0]]
    assert 30 <= len(older) <= 90
    assert min(older) < 100 < 200 < max(older)
    buffer.close()


def test_a_busy_route_does_not_push_out_a_quiet_one(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "b.sqlite", settings(max_megabytes=0.4))
    buffer.append(entries(range(20), "quiet", tokens=40, width=8))
    for start in range(0, 600, 100):
        buffer.append(entries(range(start, start + 100), "busy", tokens=40, width=8))
        buffer.maintain()
        assert file_bytes(buffer) <= 400_000
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
    with buffer._database.reading() as connection:
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


def test_files_that_were_set_aside_hold_text_too_and_go_after_a_day(tmp_path: Path) -> None:
    """Their oldest records were as old as any may be when they were set aside."""
    clock = Clock()
    clock.seconds = time.time() - 9 * DAY  # files are stamped by the machine's
    path, aside = tmp_path / "b.sqlite", tmp_path / "b.sqlite.damaged"

    def opened() -> Buffer:
        return Buffer(path, settings(retention_days=10), clock=clock)

    buffer = opened()
    buffer.append(entries(range(9)))
    buffer.close()
    clock.pass_time(9 * DAY)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    os.utime(path, (clock.seconds - 5 * DAY,) * 2)  # of its last write, when nobody set it aside
    buffer = opened()
    for hours, there in ((0, True), (20, True), (7, False)):
        clock.pass_time(3600 * hours)
        buffer.maintain()
        assert aside.exists() == there
    buffer.close()
