"""Room and retention: the newest stay, the sample of the others is uniform, the file is bounded."""

import os
import random
import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from draftkit.online.buffer import Buffer, draw, too_much
from tests.online.traffic import DAY, Clocks, entries, entry, settings


def numbers(buffer: Buffer, route: str = "default") -> list[int]:
    """Of all records of a route, the oldest first."""
    found = [
        stored.record.seed
        for held_out in (False, True)
        for stored in buffer.newest(route, 10**6, held_out=held_out)
    ]
    return sorted(found)


def file_bytes(buffer: Buffer) -> int:
    with buffer._database.reading() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        return pages * connection.execute("PRAGMA page_size").fetchone()[0]


def table(rows: list[tuple[int, int]], route: str = "a") -> sqlite3.Connection:
    """Records of these ids and sizes."""
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE records (id, route, size)")
    add(connection, rows, route)
    return connection


def add(connection: sqlite3.Connection, rows: list[tuple[int, int]], route: str = "a") -> None:
    values = [(record_id, route, size) for record_id, size in rows]
    connection.executemany("INSERT INTO records VALUES (?, ?, ?)", values)


@pytest.mark.parametrize(
    ("room", "kept"), [(0, 0), (3, 0), (4, 1), (9, 2), (12, 3), (13, 4), (99, 4)]
)
def test_of_the_newest_as_many_stay_as_fit_and_none_behind_one_that_does_not(
    room: int, kept: int
) -> None:
    with closing(table([(4, 4), (3, 4), (2, 4), (1, 1)])) as connection:
        gone = too_much(connection, newest=room, aged=0)
        assert sorted(gone) == [4, 3, 2, 1][kept:][::-1]
        add(connection, [(record_id, 4) for record_id in range(10, 14)], "b")
        # Of another route nothing changes for this one.
        assert {i for i in too_much(connection, newest=room, aged=0) if i < 10} == set(gone)


def test_the_reservoir_holds_the_lowest_draws_that_fit() -> None:
    with closing(table([(number, 10) for number in range(20)])) as connection:
        order = sorted(range(20), key=draw)
        assert sorted(too_much(connection, newest=0, aged=70)) == sorted(order[7:])
        assert too_much(connection, newest=0, aged=200) == []
        assert sorted(too_much(connection, newest=0, aged=0)) == list(range(20))
        assert set(too_much(connection, newest=30, aged=20)) == set(sorted(range(17), key=draw)[2:])


def stream(*, aged: int, sizes: random.Random, start: int) -> set[int]:
    """Ids in a reservoir after `aged` records came in small parts, as in upkeep after upkeep."""
    with closing(table([])) as connection:
        for number in range(aged):
            add(connection, [(start + number, sizes.choice((5, 20)))])
            if number % 7 == 0 or number == aged - 1:
                gone = [(one,) for one in too_much(connection, newest=0, aged=400)]
                connection.executemany("DELETE FROM records WHERE id = ?", gone)
        return {row[0] for row in connection.execute("SELECT id FROM records")}


def test_the_reservoir_is_a_uniform_sample_of_all_that_aged() -> None:
    """Early and late, small and large ones alike: chi-square over 10 parts of the stream."""
    parts: Counter[int] = Counter()
    large = kept = 0
    for trial in range(400):
        sizes = random.Random(trial)
        start = 1000 * trial
        found = stream(aged=300, sizes=sizes, start=start)
        again = random.Random(trial)
        size_of = {start + number: again.choice((5, 20)) for number in range(300)}
        large += sum(size_of[record_id] == 20 for record_id in found)
        kept += len(found)
        parts.update((record_id - start) // 30 for record_id in found)
    expected = kept / 10
    statistic = sum((parts[part] - expected) ** 2 / expected for part in range(10))
    assert statistic < 33.7  # 9 degrees of freedom, p = 1e-4
    assert abs(large / kept - 0.5) < 0.03


def test_the_newest_stay_and_the_file_keeps_its_bound(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "b.sqlite", settings(max_megabytes=0.4, reservoir_fraction=0.5))
    for start in range(0, 400, 20):
        buffer.append(entries(range(start, start + 20), tokens=40, width=8))
        buffer.maintain()
        assert file_bytes(buffer) <= 400_000
    found = numbers(buffer)
    newest = [number for number in range(400) if set(range(number, 400)) <= set(found)]
    assert 30 <= len(newest) <= 90
    older = [number for number in found if number < newest[0]]
    assert 30 <= len(older) <= 90
    assert min(older) < 100 < 200 < max(older)
    buffer.close()


def test_no_reservoir_means_the_newest_alone(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "b.sqlite", settings(max_megabytes=0.2, reservoir_fraction=0.0))
    buffer.append(entries(range(200), tokens=40, width=8))
    buffer.maintain()
    found = numbers(buffer)
    assert found == list(range(found[0], 200))
    assert 30 < len(found) < 90
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


def test_a_kill_between_the_deletions_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next upkeep comes to the same decision."""

    def made(name: str) -> Buffer:
        buffer = Buffer(tmp_path / name, settings(max_megabytes=0.2), clock=lambda: 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(buffer, "maintain", lambda: None)
            buffer.append(entries(range(200), tokens=40, width=8))
        return buffer

    whole, killed = made("whole"), made("killed")
    whole.maintain()
    delete, seen = killed._delete, []

    def torn(ids: list[int]) -> None:
        delete(ids[: len(ids) // 2])
        seen.append(len(ids))
        if ids:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(killed, "_delete", torn)
        with pytest.raises(KeyboardInterrupt):
            killed.maintain()
    assert seen[-1] > 50
    killed.maintain()
    assert set(numbers(killed)) <= set(numbers(whole))
    assert len(numbers(killed)) > 0.8 * len(numbers(whole))
    whole.close()
    killed.close()


def test_records_go_when_their_time_is_over_whatever_their_own_time_says(tmp_path: Path) -> None:
    clocks = Clocks()
    buffer = Buffer(
        tmp_path / "b.sqlite", settings(retention_days=3), clock=clocks.clock, uptime=clocks.uptime
    )
    for day in range(6):
        buffer.append([entry(day)])  # told to be of 1970
        clocks.pass_time(DAY)
    buffer.maintain()
    assert numbers(buffer) == [3, 4, 5]
    clocks.pass_time(1.5 * DAY)
    buffer.maintain()
    assert numbers(buffer) == [5]
    buffer.close()


def test_what_is_deleted_is_not_in_the_files_any_more(tmp_path: Path) -> None:
    clocks = Clocks()
    buffer = Buffer(
        tmp_path / "b.sqlite", settings(retention_days=3), clock=clocks.clock, uptime=clocks.uptime
    )

    def traces(number: int) -> int:
        """In how many pieces of what was stored the files still have it."""
        contents = [path.read_bytes() for path in tmp_path.iterdir()]
        blob = stored[number]
        pieces = [blob[start : start + 24] for start in range(40, len(blob) - 24, 1000)]
        return sum(piece in content for content in contents for piece in pieces)

    buffer.append(entries(range(100, 150), tokens=300, width=8))
    clocks.pass_time(2 * DAY)
    buffer.append(entries(range(150, 200)))
    with buffer._database.reading() as connection:
        blobs = connection.execute("SELECT content FROM records ORDER BY id").fetchall()
    stored = {number: blob for number, (blob,) in zip(range(100, 200), blobs, strict=True)}
    assert all(traces(number) for number in range(100, 200))
    clocks.pass_time(2 * DAY)
    buffer.maintain()
    assert [traces(number) for number in range(100, 150)] == [0] * 50
    assert all(traces(number) for number in range(150, 200))
    assert (tmp_path / "b.sqlite-wal").stat().st_size == 0
    assert (tmp_path / "b.sqlite").stat().st_size < 200_000
    buffer.close()


def test_files_that_were_set_aside_hold_text_too_and_go_after_a_day(tmp_path: Path) -> None:
    """Their oldest records were as old as any may be when they were set aside."""
    clocks = Clocks()
    clocks.wall = time.time() - 9 * DAY  # files are stamped by the machine's
    path, aside = tmp_path / "b.sqlite", tmp_path / "b.sqlite.damaged-1"

    def opened() -> Buffer:
        return Buffer(path, settings(retention_days=10), clock=clocks.clock, uptime=clocks.uptime)

    buffer = opened()
    buffer.append(entries(range(9)))
    buffer.close()
    clocks.pass_time(9 * DAY)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    os.utime(path, (clocks.wall - 5 * DAY,) * 2)  # of its last write, when nobody set it aside
    buffer = opened()
    for hours, there in ((0, True), (20, True), (7, False)):
        clocks.pass_time(3600 * hours)
        buffer.maintain()
        assert aside.exists() == there
    buffer.close()
