"""Room and retention: the newest stay, the sample of the others is even, the file is bounded."""

import os
import random
import sqlite3
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from draftkit.online.buffer import Buffer, too_much
from tests.online.traffic import DAY, Clock, entries, entry, settings


def numbers(buffer: Buffer, route: str = "default") -> list[int]:
    """Of all records of a route, the oldest first."""
    found = [
        stored.seed
        for held_out in (False, True)
        for stored in buffer.newest(route, 10**6, held_out=held_out)
    ]
    return sorted(found)


def file_bytes(buffer: Buffer) -> int:
    with buffer._database.reading() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        return pages * connection.execute("PRAGMA page_size").fetchone()[0]


def table(sizes: list[int], route: str = "a") -> sqlite3.Connection:
    """Records of these sizes, whose ids and numbers count from 1."""
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE records (id, route, number, size)")
    for place, size in enumerate(sizes, 1):
        add(connection, place, place, size, route)
    return connection


def add(
    connection: sqlite3.Connection, record_id: int, place: int, size: int, route: str = "a"
) -> None:
    connection.execute("INSERT INTO records VALUES (?, ?, ?, ?)", (record_id, route, place, size))


@pytest.mark.parametrize(
    ("room", "kept"), [(0, 0), (3, 0), (4, 1), (9, 2), (12, 3), (13, 4), (99, 4)]
)
def test_of_the_newest_as_many_stay_as_fit_and_none_behind_one_that_does_not(
    room: int, kept: int
) -> None:
    with closing(table([1, 4, 4, 4])) as connection:
        gone = too_much(connection, newest=room, older=0.1)
        assert sorted(gone) == [4, 3, 2, 1][kept:][::-1]
        for place in range(1, 5):
            add(connection, 9 + place, place, 4, "b")
        # Of another route nothing changes for this one.
        assert {i for i in too_much(connection, newest=room, older=0.1) if i < 10} == set(gone)


def test_of_the_older_ones_every_kth_stays_as_many_as_fit() -> None:
    with closing(table([10] * 20)) as connection:

        def kept(newest: float, older: float) -> list[int]:
            gone = too_much(connection, newest=newest, older=older)
            return [number for number in range(1, 21) if number not in gone]

        assert kept(0, 200) == list(range(1, 21))
        assert kept(0, 199) == kept(0, 100) == list(range(2, 21, 2))
        assert kept(0, 99) == list(range(4, 21, 4))
        assert kept(50, 40) == [4, 8, 12, *range(16, 21)]


def test_what_stays_is_spread_evenly_over_all_that_aged_and_fits() -> None:
    """Early and late, small and large ones alike, in upkeep after upkeep of small parts."""
    chance = random.Random(0)
    with closing(table([])) as connection:
        for number in range(1, 3001):
            add(connection, number, number, chance.choice((5, 20)))
            if number % 7 == 0 or number == 3000:
                gone = [(one,) for one in too_much(connection, newest=0, older=2000)]
                connection.executemany("DELETE FROM records WHERE id = ?", gone)
        rows = connection.execute("SELECT id, size FROM records ORDER BY id").fetchall()
    places, sizes = [row[0] for row in rows], [row[1] for row in rows]
    gaps = {later - earlier for earlier, later in pairwise([0, *places])}
    assert max(gaps) <= 2 * min(gaps)
    assert 3000 - places[-1] < max(gaps)
    assert 1000 < sum(sizes) <= 2000
    assert 0.3 < sizes.count(20) / len(sizes) < 0.7


def test_the_newest_stay_and_the_file_keeps_its_bound(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "b.sqlite", settings(max_megabytes=0.4))
    for start in range(0, 400, 20):
        buffer.append(entries(range(start, start + 20), tokens=40, width=8))
        buffer.maintain()
        assert file_bytes(buffer) <= 400_000
    found = numbers(buffer)
    newest = [number for number in range(400) if set(range(number, 400)) <= set(found)]
    assert 30 <= len(newest) <= 90
    older = [number for number in found if number < newest[0]]
    assert 15 <= len(older) <= 90  # k is a power of two
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


def test_records_go_when_their_time_is_over(tmp_path: Path) -> None:
    clock = Clock()
    buffer = Buffer(tmp_path / "b.sqlite", settings(retention_days=3), clock=clock)
    for day in range(6):
        buffer.append([entry(day)])
        clock.pass_time(DAY)
    buffer.maintain()
    assert numbers(buffer) == [3, 4, 5]
    clock.pass_time(1.5 * DAY)
    buffer.maintain()
    assert numbers(buffer) == [5]
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
