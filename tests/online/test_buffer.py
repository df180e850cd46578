"""The buffer gives back what it was given, by route, side and age; what is deleted is gone."""

import os
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftkit.online.buffer import TOO_MUCH, Buffer, Served, split
from tests.online.traffic import DAY, Clock, entries, entry, numbers, record, settings


@pytest.fixture
def buffer(tmp_path: Path):
    opened = Buffer(tmp_path / "b.sqlite", settings(), gate_fraction=0.25)
    yield opened
    opened.close()


def seeds(found: list) -> list[int]:
    return [stored.seed for stored in found]


def held(number: int, fraction: float = 0.25) -> bool:
    return split(record(number)) < fraction


def test_an_entry_comes_back_whole(buffer: Buffer) -> None:
    buffer.append(entries(range(40)))
    for held_out in (True, False):
        for stored in buffer.newest("default", 100, held_out=held_out):
            assert stored == record(stored.seed)
            assert held(stored.seed) == held_out


def test_the_newest_come_first_and_none_that_was_seen(buffer: Buffer) -> None:
    buffer.append(entries(range(30)))
    first = buffer.last_id("default")
    buffer.append(entries(range(30, 60)))
    trained = [number for number in range(60) if not held(number)]
    found = buffer.newest("default", 10, held_out=False)
    assert seeds(found) == trained[::-1][:10]
    fresh = [number for number in trained if number >= 30]
    assert seeds(buffer.newest("default", 99, held_out=False, after=first)) == fresh[::-1]
    assert buffer.count("default", held_out=False, after=first) == len(fresh)
    assert buffer.count("default", held_out=True) == 60 - len(trained)
    assert buffer.count("default", held_out=False, after=buffer.last_id("default")) == 0


def test_routes_are_apart(buffer: Buffer) -> None:
    buffer.append([*entries(range(10), "a"), *entries(range(10, 20), "b")])
    for route, of_route in (("a", range(10)), ("b", range(10, 20))):
        assert numbers(buffer, route) == list(of_route)
    assert buffer.last_id("a") < buffer.last_id("b")
    assert (buffer.last_id("c"), buffer.count("c", held_out=False)) == (0, 0)
    assert buffer.newest("c", 5, held_out=False) == []


def test_older_records_are_drawn_uniformly_from_their_part_and_the_seeds(buffer: Buffer) -> None:
    buffer.append(entries(range(60)))
    part = [number for number in range(60) if not held(number)][:-20]
    seen: Counter[int] = Counter()
    for seed in range(300):
        found = buffer.older("default", 5, held_out=False, seed=seed, recent=20)
        assert len(set(seeds(found))) == 5
        seen.update(seeds(found))
    expected = 1500 / len(part)
    assert set(seen) == set(part)
    # Chi-square with about 20 degrees of freedom: 60 has a chance below 1e-4.
    assert sum((seen[number] - expected) ** 2 / expected for number in part) < 60


def test_older_records_are_the_same_for_a_seed_and_as_many_as_can_be(buffer: Buffer) -> None:
    buffer.append(entries(range(60)))
    trained = [number for number in range(60) if not held(number)]

    def drawn(seed: int, count: int) -> list[int]:
        return seeds(buffer.older("default", count, held_out=False, seed=seed, recent=20))

    assert drawn(1, 10) == drawn(1, 10) != drawn(2, 10)
    assert len(drawn(1, 99)) == len(trained) - 20
    assert buffer.older("no", 5, held_out=True, seed=1, recent=5) == []


def test_a_record_that_is_deleted_during_a_look_is_left_out(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer.append(entries(range(60)))
    trained = [number for number in range(60) if not held(number)]
    rows = buffer._rows

    def meanwhile(query: str, *values: object) -> list:
        found = rows(query, *values)
        if "OFFSET" in query:  # the ids to draw from
            with buffer._database.writing() as connection:
                connection.execute("DELETE FROM records WHERE id <= ?", (first + 9,))
        return found

    first = buffer.last_id("default") - 59
    monkeypatch.setattr(buffer, "_rows", meanwhile)
    found = buffer.older("default", 99, held_out=False, seed=1, recent=0)
    assert sorted(seeds(found)) == [number for number in trained if number > 9] != trained


def test_counts_are_added_up_by_route_and_version(buffer: Buffer) -> None:
    row = Served(route="a", version="v000002", requests=1, tokens=9, rounds=3, drafted=12)
    row = replace(row, accepted=6, tested=8, acceptance=0.5)
    buffer.add_served([row, row, replace(row, version="v000001")])
    buffer.add_served([replace(row, acceptance=0.25), replace(row, route="b")])
    double = replace(row, requests=3, tokens=27, rounds=9, drafted=36, accepted=18, tested=24)
    assert buffer.served("a") == [replace(double, acceptance=1.25), replace(row, version="v000001")]
    assert buffer.served("c") == []


def test_counts_and_records_are_known_by_time_for_as_long_as_records_are_kept(
    tmp_path: Path,
) -> None:
    clock = Clock()
    clock.seconds = 100 * DAY + 125
    buffer = Buffer(tmp_path / "b.sqlite", settings(retention_days=3), clock=clock)
    one = Served(route="a", version="v000002", requests=1, rounds=2, tested=3, acceptance=0.5)
    known, minute = replace(one, version=""), 100 * DAY + 120
    double = replace(known, requests=2, rounds=4, tested=6, acceptance=1.0)
    buffer.add_served([one, replace(one, route="b")])
    buffer.append([*entries(range(2), "a"), entry(2, "b")])
    clock.pass_time(50)  # the same minute
    buffer.add_served([replace(one, version="v000001")])
    assert buffer.served_by_time("a", 60) == [(minute, double)]
    clock.pass_time(60)
    buffer.add_served([one])
    assert buffer.served_by_time("a", 60) == [(minute, double), (minute + 60, known)]
    assert buffer.served_by_time("a", 60, most=1) == [(minute + 60, known)]
    for since, requests in ((minute, 3), (minute + 1, 1), (minute + 60, 1), (minute + 61, 0)):
        rows = buffer.served_by_time("a", 86400, since=since)
        assert [(at, row.requests) for at, row in rows] == [(100 * DAY, requests)] * bool(requests)
    clock.pass_time(2 * DAY)
    buffer.add_served([one])
    buffer.append([entry(3, "b")])
    days = [(100 * DAY, "a", 2), (100 * DAY, "b", 1), (102 * DAY, "b", 1)]
    assert [tuple(row[:3]) for row in buffer.days()] == days
    assert all(row[3] > 0 for row in buffer.days())
    clock.pass_time(2 * DAY)
    buffer.maintain()
    assert buffer.served_by_time("a", 86400) == [(102 * DAY, known)]
    assert [tuple(row[:3]) for row in buffer.days()] == days[2:]
    assert sum(row.requests for row in buffer.served("a")) == 4  # totals stay
    buffer.close()


def test_how_many_wait_is_known_while_it_is_new(tmp_path: Path) -> None:
    clock = Clock()
    buffer = Buffer(tmp_path / "b.sqlite", settings(), clock=clock)
    assert buffer.queued(within=9) == 0
    buffer.set_queued(3)
    clock.pass_time(7)
    assert [buffer.queued(within=seconds) for seconds in (6, 7, 9)] == [0, 3, 3]
    clock.pass_time(-1000)  # set back: what is told is as little of now
    assert [buffer.queued(within=seconds) for seconds in (9, 993)] == [0, 3]
    buffer.close()


def test_all_of_an_append_is_stored_or_nothing(buffer: Buffer) -> None:
    wrong = replace(record(2), output_ids=[2**31] * 8)
    with pytest.raises(ValueError, match=r"^a row cannot be stored: Value 2147483648.*$"):
        buffer.append([entry(1), ("default", wrong)])
    assert buffer.last_id("default") == 0
    buffer.append([])
    buffer.append([entry(1)])
    assert buffer.last_id("default") > 0


def test_appends_are_flushed_and_deletions_overwritten(buffer: Buffer) -> None:
    names = ("synchronous", "journal_mode", "secure_delete", "temp_store")
    with buffer._database.session() as connection:
        values = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert values == [2, "wal", 1, 2]


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda content: b"\0" * len(content),
    lambda content: content[:40],
    lambda content: content[:-1],
    lambda content: b"",
    lambda content: b"\7" + content[1:],
    lambda content: zlib.compress(b"x" * 99),
]


def test_a_damaged_row_is_left_out(buffer: Buffer, caplog: pytest.LogCaptureFixture) -> None:
    count = len(DAMAGES)
    buffer.append(entries(range(count + 2)))
    first = buffer.last_id("default") - count - 1
    with buffer._database.writing() as connection:
        for number, damage in enumerate(DAMAGES, first):
            query = "SELECT content FROM records WHERE id = ?"
            (content,) = connection.execute(query, (number,)).fetchone()
            update = "UPDATE records SET content = ? WHERE id = ?"
            connection.execute(update, (damage(content), number))
    assert numbers(buffer) == [count, count + 1]
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == count
    assert all(re.fullmatch(r".*b\.sqlite: record [0-9]+ is damaged \(.+\)", one) for one in told)


def test_a_conversation_has_one_number_in_the_split_and_they_are_spread_evenly() -> None:
    def side(*prompt: int, document: str = "") -> float:
        return split(replace(record(0), prompt_ids=list(prompt), document=document))

    assert split(replace(record(3), output_ids=[1] * 8, seed=900)) == split(record(3))
    numbers = np.sort([side(number, 1) for number in range(4000)])
    assert side(7, 1) == side(7, 1) != side(1, 7)
    assert side(7, 1, document="talk") == side(2, document="talk") != side(7, 1)
    # Kolmogorov: at 4000 numbers a larger distance has a chance below 1e-6.
    assert np.abs(numbers - (np.arange(4000) + 0.5) / 4000).max() < 2.7 / 4000**0.5


def test_ids_rise_over_deletions_and_over_a_new_file(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "b.sqlite"
    last = 0
    for _ in range(3):
        buffer = Buffer(path, settings(), clock=clock)
        for _ in range(3):
            buffer.append([entry(1)])
            assert buffer.last_id("default") > last
            last = buffer.last_id("default")
            with buffer._database.writing() as connection:
                connection.execute("DELETE FROM records")
        buffer.close()
        path.unlink()
        clock.pass_time(1)


def test_a_reader_in_the_middle_of_a_look_does_not_hold_up_a_writer(buffer: Buffer) -> None:
    buffer.append(entries(range(5)))
    reader = sqlite3.connect(buffer._database.path, isolation_level=None)
    reader.execute("BEGIN")
    seen = reader.execute("SELECT count(*) FROM records").fetchone()
    buffer.append(entries(range(5, 10)))
    assert reader.execute("SELECT count(*) FROM records").fetchone() == seen == (5,)
    buffer.maintain()  # the log is emptied another time
    reader.execute("COMMIT")
    assert reader.execute("SELECT count(*) FROM records").fetchone() == (10,)
    reader.close()


def test_the_files_are_for_their_owner_alone(buffer: Buffer) -> None:
    buffer.append([entry(1)])
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in buffer._database.path.parent.iterdir()
    }
    assert set(modes.values()) == {0o600}
    assert len(modes) == 3


def test_a_closed_buffer_says_so(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "b.sqlite", settings())
    buffer.close()
    buffer.close()
    with pytest.raises(ValueError, match=r"b\.sqlite is closed"):
        buffer.append([entry(1)])
    assert sorted(os.listdir(tmp_path)) == ["b.sqlite"]


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
