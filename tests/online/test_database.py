"""Opening a file: what is refused, what a kill leaves, who may use it at once, and whose it is."""

import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from draftkit.online.buffer import Buffer, Database, Served
from draftkit.online.registry import require_same
from tests.online.traffic import entries, entry, numbers, settings


def made(path: Path, count: int = 20) -> None:
    """A buffer that was closed well."""
    buffer = Buffer(path, settings())
    buffer.append(entries(range(count)))
    buffer.close()


def test_a_damaged_page_of_the_log_costs_what_follows(tmp_path: Path) -> None:
    live, path = tmp_path / "live", tmp_path / "b.sqlite"
    with closing(Buffer(live, settings())) as buffer:
        for number in range(20):
            buffer.append([entry(number)])
        for ending in ("", "-wal"):  # as a killed writer leaves them
            shutil.copy(f"{live}{ending}", f"{path}{ending}")
    log = Path(f"{path}-wal")
    content = bytearray(log.read_bytes())
    content[-100] ^= 0xFF
    log.write_bytes(content)
    with closing(Buffer(path, settings())) as buffer:
        assert numbers(buffer) == list(range(19))
        buffer.append([entry(30)])
        assert numbers(buffer) == [*range(19), 30]


@pytest.mark.parametrize("damage", ["no database", "cut", "inner page", "zeros"])
def test_a_damaged_file_is_refused_untouched_and_a_new_one_begins_when_it_is_moved(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "b.sqlite"
    made(path, 300)
    content = path.read_bytes()
    damaged = {
        "no database": b"this is no database, whatever its name says" * 100,
        "cut": content[: len(content) // 2],
        "inner page": content[:8192] + b"\xa5" * 16384 + content[24576:],
        "zeros": b"\0" * len(content),
    }[damage]
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^.*b\.sqlite is damaged: move it away.*$"):
            Buffer(path, settings())
        assert path.read_bytes() == damaged
    path.rename(tmp_path / "aside")
    Path(f"{path}-wal").write_bytes(b"the log of the old one")
    with closing(Buffer(path, settings())) as buffer:
        buffer.append([entry(5)])
        assert numbers(buffer) == [5]


def test_a_file_that_breaks_while_it_is_open_is_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    made(path, 300)
    buffer = Buffer(path, settings())
    with buffer._database.session() as connection:
        connection.execute("PRAGMA shrink_memory")  # what is read comes from the disk
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(OSError, match=r"malformed: .*b\.sqlite"):
        numbers(buffer)
    buffer.close()
    with pytest.raises(ValueError, match="is damaged"):
        Buffer(path, settings())


def test_another_format_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    made(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version=1")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"^.* of format 1, this is 7: move it away.*$"):
        Buffer(path, settings())
    assert path.read_bytes() == before


def test_a_file_without_counts_by_minute_begins_them(tmp_path: Path) -> None:
    """They came later than the format: no traffic is lost for them."""
    path, row = tmp_path / "b.sqlite", Served(route="a", version="v000001", requests=1)
    with closing(Buffer(path, settings())) as buffer:
        buffer.add_served([row])
    with closing(sqlite3.connect(path)) as other:
        other.execute("DROP TABLE served_by_minute")
    with closing(Buffer(path, settings())) as buffer:
        buffer.add_served([row])
        assert [one.requests for _, one in buffer.served_by_time("a", 60)] == [1]
        assert [one.requests for one in buffer.served("a")] == [2]


def test_a_file_that_others_use_is_opened_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    first = Buffer(path, settings())
    first.append(entries(range(5)))
    second = Buffer(path, settings())
    first.append([entry(7)])
    assert numbers(second) == [*range(5), 7]
    first.close()
    second.close()


LOCKED = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002)
"""


def test_a_second_buffer_of_a_process_leaves_the_first_its_locks(tmp_path: Path) -> None:
    """Closing any descriptor of a file drops all locks of the process on it."""
    path = tmp_path / "b.sqlite"
    buffer = Buffer(path, settings())
    Buffer(path, settings())._database.close()
    buffer.append([entry(1)])
    second = Buffer(path, settings())
    done = subprocess.run([sys.executable, "-c", LOCKED, path], capture_output=True, check=False)
    assert b"BlockingIOError" in done.stderr
    second.close()
    buffer.close()


def begin(path: Path) -> None:
    Buffer(path, settings()).append([entry(os.getpid())])


def test_many_begin_a_file_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=begin, args=(tmp_path / "new" / "b.sqlite",)) for _ in range(6)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    buffer = Buffer(tmp_path / "new" / "b.sqlite", settings())
    assert len(numbers(buffer)) == 6
    buffer.close()


def test_a_folder_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Buffer(tmp_path / "file" / "b.sqlite", settings())


def test_an_exception_undoes_the_transaction(tmp_path: Path) -> None:
    database = Database(tmp_path / "d", lambda c: c.execute("CREATE TABLE IF NOT EXISTS t (x)"))

    def doomed() -> None:
        with database.writing() as connection:
            connection.execute("INSERT INTO t VALUES (1)")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doomed()
    with database.session() as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)
    database.close()


MINE = {"target": "a", "draft": "b"}


@pytest.mark.parametrize(
    ("stored", "told"),
    [
        ({"target": "a", "draft": "c"}, "with another draft:"),
        ({"target": "x", "draft": "y"}, "with another target and draft:"),
        ({"target": "a"}, "with another draft:"),
        ({**MINE, "top_k": "8"}, "with another top_k:"),
        ({}, "does not tell with which target and draft it was made:"),
    ],
)
def test_what_differs_is_named_in_one_line_with_the_ways_out(
    stored: dict[str, str], told: str
) -> None:
    require_same(Path("x"), stored=dict(MINE), wanted=MINE)
    with pytest.raises(ValueError, match=r"^x .*name=.*overwrite=true") as error:
        require_same(Path("x"), stored=stored, wanted=MINE)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_buffer_that_tells_nothing_is_adopted_while_it_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    Buffer(path, settings()).close()
    Buffer(path, settings(), fingerprints=MINE).close()
    with pytest.raises(ValueError, match="another draft"):
        Buffer(path, settings(), fingerprints={**MINE, "draft": "c"})


@pytest.mark.parametrize("left", ["records", "counts"])
def test_a_used_buffer_that_tells_nothing_is_refused(tmp_path: Path, left: str) -> None:
    """As one of an earlier version, or of a program that gives none: who knows whose it is?"""
    path = tmp_path / "b.sqlite"
    buffer = Buffer(path, settings())
    if left == "records":
        buffer.append(entries(range(1)))
    else:
        buffer.add_served([Served(route="default", version="v000001", requests=1)])
    buffer.close()
    with pytest.raises(ValueError, match="does not tell with which target and draft it was made"):
        Buffer(path, settings(), fingerprints=MINE)
