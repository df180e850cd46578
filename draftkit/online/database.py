"""One SQLite file of several processes: opening it, transactions, and what to do with damage.

What a finished transaction wrote survives the death of any process and, where it was flushed, a
power cut. A page of SQLite's write-ahead log that goes bad on the disk costs the transactions from
it on. A file in which SQLite finds damage is renamed to `*.damaged` by whoever opens it while
nobody else has it open, and a new one begins.

This module does not know what the tables hold.
"""

import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

APPLICATION, FORMAT = 0x64666274, 3  # in the file's header; the format rises with the tables
BUSY_SECONDS = 10.0  # how long a writer waits for another one
_VACUUMED = 256  # pages given back in one transaction, so that no writer waits for long
_PRAGMAS = (
    "auto_vacuum=INCREMENTAL",  # before there is a table
    "journal_mode=WAL",
    "synchronous=FULL",
    "secure_delete=ON",
    "temp_store=MEMORY",
    "cell_size_check=ON",
)
_DAMAGED = (errno.EIO, "it is damaged; whoever opens it alone begins a new one")
_ERRORS = {
    sqlite3.SQLITE_FULL: (errno.ENOSPC, "the disk is full"),
    sqlite3.SQLITE_BUSY: (errno.EBUSY, f"another writer held it for {BUSY_SECONDS:.0f} seconds"),
    sqlite3.SQLITE_READONLY: (errno.EROFS, "it cannot be written"),
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
}
_log = logging.getLogger(__name__)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _is_damage(error: sqlite3.Error) -> bool:
    return _ERRORS.get(_code(error)) is _DAMAGED


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_SECONDS,
    )


def _is_new(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether there are no tables. Raises ValueError if they are not ours or of another format."""
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return True
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise ValueError(f"{path} is not a traffic buffer: name another file for it")
    stored = connection.execute("PRAGMA user_version").fetchone()[0]
    if stored != FORMAT:
        raise ValueError(
            f"{path} is a traffic buffer of format {stored}, this is {FORMAT}:"
            " move it away, and a new one begins"
        )
    return False


def _is_whole(path: Path) -> bool:
    """Whether SQLite finds nothing wrong with the file and its log.

    Raises ValueError for a whole file that is not ours or of another format.
    """
    with contextlib.closing(_connect(path)) as connection:
        try:
            if connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                return False
            _is_new(connection, path)  # refuses it before anything changes it
            return True
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                return False
            raise


def _set_aside(path: Path) -> None:
    """Rename the file and its log; a kill in between leaves a damaged file without its log."""
    for ending in ("-wal", ""):
        with contextlib.suppress(FileNotFoundError):
            os.replace(f"{path}{ending}", f"{path}.damaged{ending}")
            os.utime(f"{path}.damaged{ending}")  # since when it lies there
    Path(f"{path}-shm").unlink(missing_ok=True)
    _log.warning("%s is damaged: it is now %s.damaged, a new one begins", path, path.name)


class Database:
    """A connection for several threads. Errors of SQLite come out as OSError, one line."""

    def __init__(self, path: str | Path, prepare: Callable[[sqlite3.Connection], None]) -> None:
        """Open `path`; `prepare` makes the tables that are not there, in a transaction.

        Raises ValueError for a file that is not ours or of another format, OSError else.
        """
        self.path = Path(path)
        self._prepare = prepare
        self._threads = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._lock = -1
        self._closed = False
        with self.session():
            pass

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock = os.open(f"{self.path}.lock", flags, 0o600)
        try:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.path.exists() and not _is_whole(self.path):
                    _set_aside(self.path)
            except BlockingIOError:  # others have it open, or one of them looks it over now
                fcntl.flock(self._lock, fcntl.LOCK_SH)
            # Served text is its owner's: nobody else on the machine reads it. A file that is
            # there must not be opened here: closing it would drop the locks that SQLite holds
            # on it for another connection of this process.
            with contextlib.suppress(FileExistsError):
                self.path.touch(mode=0o600, exist_ok=False)
            self._connection = connection = _connect(self.path)
            for pragma in _PRAGMAS:
                connection.execute(f"PRAGMA {pragma}")
            with self._transaction(connection, "BEGIN IMMEDIATE"):
                if _is_new(connection, self.path):
                    connection.execute(f"PRAGMA application_id={APPLICATION}")
                    connection.execute(f"PRAGMA user_version={FORMAT}")
                self._prepare(connection)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            return connection
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._connection, self._lock = None, -1

    @contextmanager
    def session(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time."""
        with self._threads:
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            try:
                yield self._connection or self._open()
            except sqlite3.DatabaseError as error:
                if _is_damage(error):  # let go, so that whoever opens it next may be alone
                    self._release()
                number, reason = _ERRORS.get(_code(error), (errno.EIO, str(error)))
                raise OSError(number, f"{self.path}: {reason}") from error

    @contextmanager
    def _transaction(self, connection: sqlite3.Connection, begin: str) -> Iterator[None]:
        connection.execute(begin)
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                connection.rollback()
            raise

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one moment of the file."""
        with self.session() as connection, self._transaction(connection, "BEGIN"):
            yield connection

    @contextmanager
    def writing(self, *, flushed: bool = True) -> Iterator[sqlite3.Connection]:
        """A connection whose changes happen together at the end, or not at all.

        `flushed`: they are on the disk then; else a power cut may take them, a kill does not.
        """
        with self.session() as connection:
            if not flushed:
                connection.execute("PRAGMA synchronous=NORMAL")
            try:
                with self._transaction(connection, "BEGIN IMMEDIATE"):
                    yield connection
            finally:
                if not flushed and self._connection is not None:
                    connection.execute("PRAGMA synchronous=FULL")

    def shrink(self) -> bool:
        """Give free pages back and empty the log; false where a reader is in the way of that."""
        with self.session() as connection:
            free = connection.execute("PRAGMA freelist_count").fetchone()[0]
        for _ in range(0, free, _VACUUMED):
            with self.session() as connection:
                # `execute` would stop after one page, as the pragma has no rows.
                connection.executescript(f"PRAGMA incremental_vacuum({_VACUUMED})")
        with self.session() as connection:
            # It holds up writers while it waits for readers: not for long.
            connection.execute("PRAGMA busy_timeout=1000")
            try:
                return connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
            finally:
                connection.execute(f"PRAGMA busy_timeout={int(1000 * BUSY_SECONDS)}")

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        with self._threads:
            self._closed = True
            self._release()
