"""`kill -9`, a full disk, a bad page: what was acknowledged stays, nothing is mixed.

Processes are forked and killed for real: the buffer's at random times, the registry's at each
touch of the disk in turn.
"""

import os
import random
import resource
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftkit.online.buffer import Buffer, Served
from draftkit.online.registry import Registry
from tests.online.drafters import TOLD, weights
from tests.online.traffic import entries, entry, numbers, settings, stored
from tests.test_stage_kill import killed_at

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
BATCH = 8
Tell = Callable[[int], None]


def killed_after(work: Callable[[Tell], None], seconds: float) -> list[int]:
    """What `work` told in a child that was killed that long after it first told something."""
    outlet, inlet = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(outlet)
        try:
            work(lambda number: os.write(inlet, f"{number}\n".encode()) and None)
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(inlet)
    told = os.read(outlet, 1 << 16)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and told:
        if select.select([outlet], [], [], left)[0]:
            told += os.read(outlet, 1 << 16)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
    while more := os.read(outlet, 1 << 16):
        told += more
    os.close(outlet)
    return [int(line) for line in told.split()]


def kept(buffer: Buffer) -> list[int]:
    """The numbers of all records, each compared with what was given."""
    assert all(one == entry(one.seed)[1] for one in stored(buffer))
    return numbers(buffer)


def serve(path: Path, first: int, tell: Tell) -> None:
    """Append for ever, with all else that a server and its upkeep write."""
    buffer = Buffer(path, settings(max_megabytes=1000))
    for number in range(first, 10**9, BATCH):
        buffer.append(entries(range(number, number + BATCH)))
        tell(number)
        buffer.set_queued(number)
        buffer.add_served([Served(route="default", version="v", requests=BATCH)])
        if number // BATCH % 5 == 0:
            buffer.maintain()


@pytest.mark.parametrize("rounds", [6, pytest.param(40, marks=pytest.mark.soak)])
def test_acknowledged_records_survive_every_kill(tmp_path: Path, rounds: int) -> None:
    path, chance, expected = tmp_path / "b.sqlite", random.Random(rounds), []
    for turn in range(rounds):
        first = 10_000 * turn
        told = killed_after(lambda tell, at=first: serve(path, at, tell), chance.uniform(0, 0.12))
        assert told == list(range(first, first + BATCH * len(told), BATCH))
        buffer = Buffer(path, settings(max_megabytes=1000))
        found = kept(buffer)
        # All that was acknowledged; one append more may have been under way, and is whole.
        expected += range(first, first + BATCH * len(told))
        if len(found) > len(expected):
            expected += range(expected[-1] + 1, expected[-1] + 1 + BATCH)
        assert found == expected
        assert sum(row.requests for row in buffer.served("default")) <= len(expected)
        buffer.maintain()
        counts = [buffer.count("default", held_out=held_out) for held_out in (True, False)]
        assert sum(counts) == len(expected)
        buffer.close()


@pytest.mark.parametrize("rounds", [3, pytest.param(12, marks=pytest.mark.soak)])
def test_a_reader_goes_on_while_writers_are_killed_beside_it(tmp_path: Path, rounds: int) -> None:
    path, chance, expected = tmp_path / "b.sqlite", random.Random(rounds), 0
    child = os.fork()
    if child == 0:  # holds the file open all the time, as a daemon does
        reader = Buffer(path, settings(max_megabytes=1000))
        while True:
            kept(reader)
    try:
        for turn in range(rounds):
            first = 10_000 * turn
            told = killed_after(
                lambda tell, at=first: serve(path, at, tell), chance.uniform(0, 0.1)
            )
            expected += len(told) * BATCH
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the reader failed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    buffer = Buffer(path, settings(max_megabytes=1000))
    assert expected <= len(kept(buffer)) <= expected + rounds * BATCH
    buffer.close()


@contextmanager
def small_disk(most_bytes: int) -> Iterator[None]:
    """No file grows beyond that: as a full disk, the write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def filled(buffer: Buffer) -> tuple[int, OSError]:
    """How many entries went in before one did not, and what was said then."""
    number = 0
    while True:
        try:
            buffer.append([entry(number, tokens=8)])
        except OSError as error:
            return number, error
        number += 1


def test_a_full_disk_refuses_the_append_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    buffer = Buffer(path, settings())
    with buffer._database.session() as connection:
        connection.execute("PRAGMA max_page_count=40")
    count, error = filled(buffer)
    assert count > 10
    assert str(path) in str(error)
    assert "disk is full" in str(error)
    assert kept(buffer) == list(range(count))
    with buffer._database.session() as connection:
        connection.execute("PRAGMA max_page_count=100000")
    buffer.append([entry(count)])
    buffer.close()
    buffer = Buffer(path, settings())
    assert kept(buffer) == list(range(count + 1))
    buffer.close()


def test_a_write_that_fails_in_the_middle_harms_nothing(tmp_path: Path) -> None:
    """The log cannot grow, so part of an append is written and then no more."""
    path = tmp_path / "b.sqlite"
    buffer = Buffer(path, settings())
    with small_disk(300_000):
        count, error = filled(buffer)
        assert count > 10
        assert isinstance(error, OSError)
        assert "\n" not in str(error)
        assert kept(buffer) == list(range(count))
    buffer.append([entry(count)])
    assert kept(buffer) == list(range(count + 1))
    shutil.copytree(tmp_path, tmp_path.with_name("copy"), dirs_exist_ok=True)
    buffer.close()
    for found in (path, tmp_path.with_name("copy") / path.name):  # closed well, and as by a kill
        again = Buffer(found, settings())
        assert kept(again) == list(range(count + 1))
        again.close()


def check(folder: Path) -> None:
    """The registry works as if nothing had been, with no hand laid on it."""
    registry = Registry(folder)
    current = registry.current()
    assert current is not None
    for version in registry.versions():
        assert registry.read(version)  # compared with their checksums
    names = set(registry.names())
    assert {current.name, *current.ancestors} <= names
    assert set(f"v{number:06d}" for number in (1, 2)) <= names  # published before any kill
    newest = registry.publish(weights(99.0), **TOLD)
    assert newest.name not in names
    assert registry.current() == newest
    assert newest.ancestors == (current.name, *current.ancestors)
    leftovers = [path for path in folder.rglob(".*") if "versions" in path.parts]
    assert leftovers == []


OPERATIONS: dict[str, Callable[[Registry], object]] = {
    "publish": lambda registry: registry.publish(weights(3.0), **TOLD),
    "rollback": lambda registry: registry.rollback(reason="worse"),
    "collect": lambda registry: registry.collect(0),
}


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_kill_at_any_moment_leaves_a_registry_that_works(
    tmp_path: Path, operation: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each (fifth) touch of the disk in turn is where the process dies."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses no cache
    before, folder = tmp_path / "before", tmp_path / "registry"
    made = Registry(before)
    made.seed(weights(1.0))
    made.publish(weights(2.0), **TOLD)
    made.publish(weights(3.0), **TOLD)
    made.rollback(reason="")
    made.publish(weights(4.0), **TOLD)
    event, killed = 0, True
    while killed:
        event += stride
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder)
        killed = killed_at(event, folder, lambda: OPERATIONS[operation](Registry(folder)))
        check(folder)
    assert event >= 5


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.soak)])
def test_a_kill_during_the_seed_leaves_a_registry_that_is_seeded_again(
    tmp_path: Path, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    event, killed, folder = 0, True, tmp_path / "registry"
    while killed:
        event += stride
        shutil.rmtree(folder, ignore_errors=True)
        killed = killed_at(event, folder, lambda: Registry(folder).seed(weights(1.0)))
        registry = Registry(folder)
        version = registry.seed(weights(2.0))
        assert version == registry.current()
        assert registry.read(version)
    assert version.name == "v000001"
    assert event > 10
