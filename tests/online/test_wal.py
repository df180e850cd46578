"""The log is read as SQLite reads it: the same frames are used, and lost ones are told."""

import random
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from draftkit.online.wal import LogState, inspect

PAGE = 4096
FRAME = PAGE + 24


def transactions(path: Path, *, count: int = 12, page: int = PAGE, autocheckpoint: int = 0) -> Path:
    """A database with `count` transactions of three pages or so each; its log, as a kill left it.

    The writer is still open when both files are copied.
    """
    writer = sqlite3.connect(path / "live", isolation_level=None)
    writer.execute(f"PRAGMA page_size={page}")
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute(f"PRAGMA wal_autocheckpoint={autocheckpoint}")
    writer.execute("CREATE TABLE t (number INTEGER PRIMARY KEY, content BLOB)")
    for number in range(count):
        content = random.Random(number).randbytes(2 * page)
        writer.execute("INSERT INTO t VALUES (?, ?)", (number, content))
    for ending in ("", "-wal"):
        shutil.copy(path / f"live{ending}", path / f"copy{ending}")
    writer.close()
    return path / "copy-wal"


def rows(log: Path) -> int:
    """How many rows SQLite finds with that log."""
    reader = sqlite3.connect(log.with_name("copy"))
    made = reader.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    found = reader.execute("SELECT count(*) FROM t").fetchone()[0] if made else 0
    reader.close()
    return found


def commits(log: Path, frames: int, page: int = PAGE) -> int:
    content, size = log.read_bytes(), page + 24
    heads = (content[32 + size * at :][:8] for at in range(frames))
    return sum(struct.unpack(">II", head)[1] > 0 for head in heads)


@pytest.mark.parametrize("page", [512, 4096, 65536])
def test_a_whole_log_is_whole(tmp_path: Path, page: int) -> None:
    log = transactions(tmp_path, page=page)
    frames = (log.stat().st_size - 32) // (page + 24)
    assert inspect(log) == LogState(frames=frames)
    assert frames > 36


def test_there_may_be_no_log_or_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert not inspect(tmp_path / "empty").damaged
    assert not inspect(tmp_path / "none").damaged


def test_frames_of_an_earlier_use_are_not_lost_ones(tmp_path: Path) -> None:
    log = transactions(tmp_path, count=40, autocheckpoint=50)
    state = inspect(log)
    assert state.frames < (log.stat().st_size - 32) // FRAME
    assert not state.damaged


def test_a_torn_last_frame_is_not_a_damaged_one(tmp_path: Path) -> None:
    log = transactions(tmp_path)
    whole = inspect(log)
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 100)
    assert inspect(log) == LogState(frames=whole.frames - 1)


SOAKED = [pytest.param(case, marks=pytest.mark.soak) for case in range(12, 60)]


@pytest.mark.parametrize("case", [*range(12), *SOAKED])
def test_a_flipped_bit_loses_what_sqlite_loses_from_there_on(tmp_path: Path, case: int) -> None:
    log = transactions(tmp_path)
    frames = inspect(log).frames
    chance = random.Random(case)
    frame = chance.randrange(frames)
    place = chance.randrange(24) if case % 2 else chance.randrange(24, FRAME)
    content = bytearray(log.read_bytes())
    content[32 + frame * FRAME + place] ^= 1 << chance.randrange(8)
    log.write_bytes(content)
    used = commits(log, frame) - 1  # the first one made the table
    state = inspect(log)
    assert state.frames == frame
    assert state.dropped == frames - frame
    if not 4 <= place < 8:  # that says whether the frame ends a transaction
        assert state.dropped_commits == 12 - used
    assert rows(log) == max(0, used)


@pytest.mark.parametrize("place", [0, 8, 16, 20, 24, 31])
def test_a_damaged_header_loses_all(tmp_path: Path, place: int) -> None:
    log = transactions(tmp_path)
    content = bytearray(log.read_bytes())
    content[place] ^= 0x40
    log.write_bytes(content)
    state = inspect(log)
    assert (state.frames, state.damaged) == (0, True)
    assert rows(log) == 0
