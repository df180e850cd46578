"""One SQLite file of several processes: opening it, and transactions.

What a finished transaction wrote survives the death of any process and a power cut. A page of
SQLite's write-ahead log that goes bad on the disk costs the transactions from it on. A file in
which SQLite finds damage is refused. This module does not know what the tables hold.
"""

import contextlib
import errno
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

FORMAT = 7  # in the file's header; rises with the tables
BUSY_SECONDS = 10.0  # how long a writer waits for another one
_PRAGMAS = (
    "auto_vacuum=INCREMENTAL",  # before there is a table
    "journal_mode=WAL",
    "synchronous=FULL",
    "secure_delete=ON",
    "temp_store=MEMORY",
    "cell_size_check=ON",
)


def _code(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


class Database:
    """A connection for several threads. Errors of SQLite come out as OSError, one line."""

    def __init__(self, path: Path, prepare: Callable[[sqlite3.Connection], None]) -> None:
        """Open `path`; `prepare` makes the tables that are not there, in a transaction.

        Raises ValueError for a file that is damaged or of another format, which stays as it is;
        OSError else.
        """
        self.path = path
        self._threads = threading.RLock()
        path.parent.mkdir(parents=True, exist_ok=True)
        # Served text is its owner's: nobody else on the machine reads it. A file that is there
        # must not be opened here: closing it would drop the locks that SQLite holds on it for
        # another connection of this process.
        with contextlib.suppress(FileExistsError):
            path.touch(mode=0o600, exist_ok=False)
        with self._as_os_error():
            self._connection: sqlite3.Connection | None = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
            )
        try:
            with self.session() as connection:
                self._check(connection)
                for pragma in _PRAGMAS:
                    connection.execute(f"PRAGMA {pragma}")
            with self.writing() as connection:
                connection.execute(f"PRAGMA user_version={FORMAT}")
                prepare(connection)
        except BaseException:
            self.close()
            raise

    def _check(self, connection: sqlite3.Connection) -> None:
        """Raise ValueError for a damaged file, and for a whole one of another format."""
        is_whole, stored = False, 0
        try:
            is_whole = connection.execute("PRAGMA integrity_check(1)").fetchone()[0] == "ok"
            stored = connection.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            if _code(error) not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
        way_out = "move it away, and a new one begins"
        if not is_whole:
            raise ValueError(f"{self.path} is damaged: {way_out}")
        if stored not in (0, FORMAT):  # 0: new
            raise ValueError(
                f"{self.path} is a traffic buffer of format {stored}, this is {FORMAT}: {way_out}"
            )

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            number = errno.ENOSPC if _code(error) == sqlite3.SQLITE_FULL else errno.EIO
            raise OSError(number, str(error), str(self.path)) from error

    @contextmanager
    def session(self) -> Iterator[sqlite3.Connection]:
        """The connection, for one thread at a time; a statement sees one moment of the file."""
        with self._threads, self._as_os_error():
            if self._connection is None:
                raise ValueError(f"{self.path} is closed")
            yield self._connection

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
            if self._connection is not None:
                self._connection.close()
            self._connection = None
