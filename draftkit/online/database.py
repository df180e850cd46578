"""One SQLite file of several processes: opening it, transactions, and what to do with damage.

What a finished transaction wrote survives the death of any process and, where it was flushed, a
power cut: that is SQLite's write-ahead log. Whoever opens the file while nobody else has it open
lets SQLite check it whole; one that is damaged is renamed to `*.damaged-<n>` and a new one begun,
without a hand. A page of the log that goes bad on the disk costs the transactions from it on.

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

APPLICATION, FORMAT = 0x64666274, 2  # in the file's header; the format rises with the tables
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


def _code(error: sqlite3.Error) -> int:
    return (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _connect(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
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


def _whole(path: Path) -> bool:
    """Whether SQLite finds nothing wrong with the file and its log.

    Raises ValueError for a whole file that is not ours or of another format.
    """
    with contextlib.closing(_connect(path)) as connection:
        try:
            if connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                return False
            _begun(connection, path)  # refuses what is not ours
            return True
        except sqlite3.DatabaseError as error:
            if _code(error) in _DAMAGE:
                return False
            raise


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


def recover(path: Path) -> Path | None:
    """Make what lies at `path` a file that can be opened; nobody else has it open.

    Returns where a file is that could not be used. Raises ValueError for a whole file that is not
    ours or of another format.
    """
    if not path.exists():  # a kill may have fallen between the two renames of `_set_aside`
        return _set_aside(path) if _beside(path, "-wal").exists() else None
    return None if _whole(path) else _set_aside(path)


class Database:
    """A connection for several threads. Errors of SQLite come out as OSError, one line."""

    def __init__(self, path: str | Path, prepare: Callable[[sqlite3.Connection], None]) -> None:
        """Open `path`; `prepare` makes the tables that are not there, in a transaction.

        Raises ValueError for a file that is not ours or of another format, OSError else.
        """
        self.path = Path(path)
        self.set_aside: Path | None = None  # where a damaged file is
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
                self.set_aside = recover(self.path)
                if self.set_aside is not None:
                    name = self.set_aside.name
                    _log.warning("%s is damaged: it is now %s, a new one begins", self.path, name)
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
