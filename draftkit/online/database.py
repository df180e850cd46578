"""One SQLite file of several processes: opening it, transactions, and what to do with damage.

What a finished transaction wrote survives the death of any process and a power cut. A page of
SQLite's write-ahead log that goes bad on the disk costs the transactions from it on. A file in
which SQLite finds damage is renamed to `*.damaged` by whoever opens it, and a new one begins;
others that have it open go over to the new one. This module does not know what the tables hold.
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

FORMAT = 6  # in the file's header; rises with the tables
BUSY_SECONDS = 10.0  # how long a writer waits for another one
_PRAGMAS = (
    "auto_vacuum=INCREMENTAL",  # before there is a table
    "journal_mode=WAL",
    "synchronous=FULL",
    "secure_delete=ON",
    "temp_store=MEMORY",
    "cell_size_check=ON",
)
_log = logging.getLogger(__name__)


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """A connection for several threads. Errors of SQLite come out as OSError, one line."""

    def __init__(self, path: Path, prepare: Callable[[sqlite3.Connection], None]) -> None:
        """Open `path`; `prepare` makes the tables that are not there, in a transaction.

        Raises ValueError for a file of another format, which stays as it is; OSError else.
        """
        self.path = path
        self._prepare = prepare
        self._threads = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0  # of the file that is open
        self._closed = False
        with self.session():
            pass

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # alone meanwhile, so that a file is set aside once
            # Served text is its owner's: nobody else on the machine reads it. A file that is there
            # must not be opened here: closing it would drop the locks that SQLite holds on it for
            # another connection of this process.
            with contextlib.suppress(FileExistsError):
                self.path.touch(mode=0o600, exist_ok=False)
            self._inode = self.path.stat().st_ino
            connection = self._connection = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
            )
            if self._is_whole(connection):
                for pragma in _PRAGMAS:
                    connection.execute(f"PRAGMA {pragma}")
                with connection:
                    connection.execute("BEGIN IMMEDIATE")
                    connection.execute(f"PRAGMA user_version={FORMAT}")
                    self._prepare(connection)
                return connection
            self._release()
            for ending in ("-wal", "-shm", ""):  # a kill in between leaves the file without its log
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self.path}{ending}", f"{self.path}.damaged{ending}")
                    os.utime(f"{self.path}.damaged{ending}")  # since when it lies there
            _log.warning("%s is damaged: it is now *.damaged, a new one begins", self.path)
        except BaseException:
            self._release()
            raise
        finally:
            os.close(folder)
        return self._open()

    def _is_whole(self, connection: sqlite3.Connection) -> bool:
        """Whether SQLite finds no damage. Raises ValueError for a whole file of another format."""
        try:
            faults = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
            stored = connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            return False
        if faults == "ok" and stored not in (0, FORMAT):  # 0: new
            raise ValueError(
                f"{self.path} is a traffic buffer of format {stored}, this is {FORMAT}:"
                " move it away, and a new one begins"
            )
        return faults == "ok"

    def _release(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    @contextmanager
    def session(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time."""
        with self._threads:
            if self._closed:
                raise ValueError(f"{self.path} is closed")
            if not (self.path.exists() and self._inode == self.path.stat().st_ino):
                self._release()  # another process has set it aside
            try:
                yield self._connection or self._open()
            except sqlite3.DatabaseError as error:
                if _is_damage(error):  # it is looked over when it is opened next
                    self._release()
                is_full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
                number = errno.ENOSPC if is_full else errno.EIO
                raise OSError(number, str(error), str(self.path)) from error

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees one moment of the file."""
        with self.session() as connection, connection:
            connection.execute("BEGIN")
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A connection whose changes are on the disk together at the end, or not at all."""
        with self.session() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    def shrink(self) -> bool:
        """Give free pages back and empty the log; false where a reader is in the way of that."""
        with self.session() as connection:
            # `execute` would stop after one page, as the pragma has no rows.
            connection.executescript("PRAGMA incremental_vacuum")
            connection.execute("PRAGMA busy_timeout=1000")  # for readers writers need not wait
            try:
                return connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
            finally:
                connection.execute(f"PRAGMA busy_timeout={int(1000 * BUSY_SECONDS)}")

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        with self._threads:
            self._closed = True
            self._release()
