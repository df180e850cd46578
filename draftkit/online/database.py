"""One SQLite file of several processes: opening it, transactions, and what to do with damage.

Whoever opens the file while nobody else has it open looks it over first: a log with a bad page, a
file that is no whole database. Nothing that is found needs a hand: what cannot be used is renamed
to `*.damaged-<n>` and a new file begun. This module does not know what the tables hold.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftkit.online.wal import inspect

APPLICATION, FORMAT = 0x64666274, 1  # in the file's header; the format rises with the tables
BUSY_SECONDS = 10.0  # how long a writer waits for another one
_ERRORS = {
    sqlite3.SQLITE_FULL: (errno.ENOSPC, "the disk is full"),
    sqlite3.SQLITE_BUSY: (errno.EBUSY, f"another writer held it for {BUSY_SECONDS:.0f} seconds"),
    sqlite3.SQLITE_READONLY: (errno.EROFS, "it cannot be written"),
    sqlite3.SQLITE_CORRUPT: (errno.EIO, "it is damaged; whoever opens it alone begins a new one"),
    sqlite3.SQLITE_NOTADB: (errno.EIO, "it is damaged; whoever opens it alone begins a new one"),
}
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What had to be done to open a file; false if nothing."""

    dropped_frames: int = 0  # pages of the log from its first bad one on
    dropped_commits: int = 0  # transactions that ended in them, lost if not in the file already
    set_aside: Path | None = None  # where a file is that could not be used

    def __bool__(self) -> bool:
        return self != Recovery()

    def __str__(self) -> str:
        told = []
        if self.dropped_frames:
            told.append(
                f"a page of the log is damaged: from there on up to {self.dropped_commits}"
                f" transactions ({self.dropped_frames} pages) are lost"
            )
        if self.set_aside is not None:
            told.append(f"the file is damaged: it is now {self.set_aside.name}, a new one begins")
        return "; ".join(told) or "nothing to recover"


def _code(error: sqlite3.Error) -> int:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _connect(path: Path, options: str = "mode=rw") -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{options}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_SECONDS,
    )


def _begun(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether there are tables. Raises ValueError if they are not ours or of another format."""
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return False
    application, found = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version")
    )
    if application != APPLICATION:
        raise ValueError(f"{path} is not a traffic buffer: name another file for it")
    if found != FORMAT:
        raise ValueError(
            f"{path} is a traffic buffer of format {found}, this is {FORMAT}:"
            " move it away, and a new one begins"
        )
    return True


def _last_id(path: Path, options: str = "mode=rw") -> int | None:
    """The highest id in a whole file, 0 if it is empty; None for a damaged one.

    Raises ValueError for a whole file that is not ours or of another format.
    """
    with contextlib.closing(_connect(path, options)) as connection:
        try:
            if connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                return None
            if not _begun(connection, path):
                return 0
            return connection.execute("SELECT coalesce(max(id), 0) FROM records").fetchone()[0]
        except sqlite3.DatabaseError as error:
            if _code(error) in _DAMAGE:
                return None
            raise


def _whole_without_log(path: Path) -> bool:
    """Whether the file alone is better than with the undamaged part of its log.

    So it is where the log was already copied into the file: older pages would then come back.
    """
    alone = _last_id(path, "immutable=1")
    look = _beside(path, ".look")
    try:
        look.mkdir(mode=0o700)  # the copies hold served text
        for ending in ("", "-wal"):
            shutil.copyfile(_beside(path, ending), look / f"copy{ending}")
        with_log = _last_id(look / "copy")
    except OSError:  # no room for a copy
        return False
    finally:
        shutil.rmtree(look, ignore_errors=True)
    return alone is not None and (with_log is None or alone > with_log)


def _set_aside(path: Path) -> Path:
    number = 1
    while any(_beside(path, f".damaged-{number}{ending}").exists() for ending in ("", "-wal")):
        number += 1
    aside = _beside(path, f".damaged-{number}")
    for ending in ("", "-wal"):
        if _beside(path, ending).exists():
            _beside(path, ending).rename(_beside(aside, ending))
            os.utime(_beside(aside, ending))  # since when it lies there
    _beside(path, "-shm").unlink(missing_ok=True)
    return aside


def recover(path: Path) -> Recovery:
    """Make what lies at `path` a file that can be opened; nobody else has it open.

    Raises ValueError for a whole file that is not ours or of another format.
    """
    log = _beside(path, "-wal")
    shutil.rmtree(_beside(path, ".look"), ignore_errors=True)
    if not path.exists():  # a kill fell between the two renames of `_set_aside`
        return Recovery(set_aside=_set_aside(path)) if log.exists() else Recovery()
    state = inspect(log)
    if state.damaged and _whole_without_log(path):
        log.unlink()
        _beside(path, "-shm").unlink(missing_ok=True)
        state = inspect(log)
    whole = _last_id(path) is not None
    return Recovery(
        dropped_frames=state.dropped,
        dropped_commits=state.dropped_commits,
        set_aside=None if whole else _set_aside(path),
    )


class Database:
    """A connection for several threads. Errors of SQLite come out as OSError, one line."""

    def __init__(self, path: str | Path, prepare: Callable[[sqlite3.Connection], None]) -> None:
        """Open `path`; `prepare` makes the tables that are not there, in a transaction.

        Raises ValueError for a file that is not ours or of another format, OSError else.
        """
        self.path = Path(path)
        self.recovery = Recovery()
        self._prepare = prepare
        self._threads = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._lock = -1
        self._closed = False
        with self._told():
            self._open()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = _code(error)
            if code in _DAMAGE:  # let go, so that whoever opens it next may be alone
                self._release()
            number, reason = _ERRORS.get(code, (errno.EIO, str(error)))
            raise OSError(number, f"{self.path}: {reason}") from error

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock = os.open(_beside(self.path, ".lock"), flags, 0o600)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.recovery = recover(self.path)
                if self.recovery:
                    _log.warning("%s: %s", self.path, self.recovery)
            except BlockingIOError:  # others have it open, or one of them looks it over now
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            # Served text is its owner's: nobody else on the machine reads it. A file that is
            # there must not be opened here: closing it would drop the locks that SQLite holds
            # on it for another connection of this process.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, flags | os.O_EXCL, 0o600))
            self._connection = connection = _connect(self.path)
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # before there is a table
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA secure_delete=ON")
            connection.execute("PRAGMA temp_store=MEMORY")
            connection.execute("PRAGMA cell_size_check=ON")
            connection.execute("BEGIN IMMEDIATE")
            if not _begun(connection, self.path):
                connection.execute(f"PRAGMA application_id={APPLICATION}")
                connection.execute(f"PRAGMA user_version={FORMAT}")
            self._prepare(connection)
            connection.execute("COMMIT")
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return connection
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        with self._threads:
            if self._connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.close()
            if self._lock >= 0:
                os.close(self._lock)
            self._connection, self._lock = None, -1

    @contextmanager
    def _session(self) -> Iterator[sqlite3.Connection]:
        with self._threads, self._told():
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            yield self._connection or self._open()

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection, begin: str) -> Iterator[None]:
        connection.execute(begin)
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                    connection.execute("ROLLBACK")
            raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one moment of the file."""
        with self._session() as connection, self._transaction(connection, "BEGIN"):
            yield connection

    @contextmanager
    def writing(self, *, flushed: bool = True) -> Iterator[sqlite3.Connection]:
        """A connection whose changes happen together at the end, or not at all.

        `flushed`: they are on the disk then; else a power cut may take them, a kill does not.
        """
        with self._session() as connection:
            if not flushed:
                connection.execute("PRAGMA synchronous=NORMAL")
            try:
                with self._transaction(connection, "BEGIN IMMEDIATE"):
                    yield connection
            finally:
                if not flushed and self._connection is not None:
                    connection.execute("PRAGMA synchronous=FULL")

    def shrink(self, pages: int = 256) -> bool:
        """Give free pages back and empty the log; false where a reader is in the way of that."""
        free = None
        while True:
            with self._session() as connection:
                left = connection.execute("PRAGMA freelist_count").fetchone()[0]
                if not left or left == free:
                    break
                free = left
                connection.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
        with self._session() as connection:
            # It holds up writers while it waits for readers: not for long.
            connection.execute("PRAGMA busy_timeout=1000")
            try:
                row = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                connection.execute(f"PRAGMA busy_timeout={int(1000 * BUSY_SECONDS)}")
        return row[0] == 0

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        with self._threads:
            self._closed = True
            self._release()
