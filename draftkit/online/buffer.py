"""The traffic buffer: what was served, in one SQLite file that the server writes and others read.

It stores records and counts; it does not know who serves, who trains, or what a drafter is. One
process writes it, any number may read it, and several threads may use one `Buffer`.

What `append` has stored survives the death of any process and a power cut. What is older than
`retention_days` by the clock, or behind the newest that fit `max_megabytes`, is deleted and
overwritten by the next `maintain`. A damaged row is left out; a damaged file is refused. A page of
SQLite's write-ahead log that goes bad on the disk costs the transactions from it on.
"""

import contextlib
import errno
import hashlib
import json
import logging
import random
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from draftkit.artifacts import first_line
from draftkit.config.service import BufferConfig
from draftkit.data.rollouts import SCHEMA, Record, document_of
from draftkit.data.store import UNREADABLE, pack, unpack
from draftkit.online.registry import require_same

_COUNTED = """
    requests INTEGER NOT NULL, tokens INTEGER NOT NULL, rounds INTEGER NOT NULL,
    drafted INTEGER NOT NULL, accepted INTEGER NOT NULL, tested INTEGER NOT NULL,
    acceptance REAL NOT NULL"""
TABLES = f"""
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, route TEXT NOT NULL,
    kept REAL NOT NULL, -- since, unix time
    split REAL NOT NULL,
    size INTEGER NOT NULL, content BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS records_by_route ON records (route, id, split, size);
CREATE INDEX IF NOT EXISTS records_by_time ON records (kept, route, size);
CREATE TABLE IF NOT EXISTS served (
    route TEXT NOT NULL, version TEXT NOT NULL, {_COUNTED}, UNIQUE (route, version));
CREATE TABLE IF NOT EXISTS served_by_minute (
    route TEXT NOT NULL,
    minute INTEGER NOT NULL, -- since 1970
    {_COUNTED}, PRIMARY KEY (route, minute)) WITHOUT ROWID;
"""
_SPLIT_BITS = 53  # what a float holds exactly
_GROWTH = 16  # the part of its room, 1 / this, after which a buffer is looked after
_DAY, _MINUTE = 86400.0, 60.0  # seconds
# The records of one side of a route; `held_out` by the split against the gate's fraction.
_SIDE = {
    held_out: f"FROM records INDEXED BY records_by_route WHERE route = ? AND split {sign} ?"
    for held_out, sign in ((True, "<"), (False, ">="))
}
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
_log = logging.getLogger(__name__)


def _code(error: sqlite3.DatabaseError) -> int:
    """SQLite's primary result code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


class Database:
    """A connection for several threads, whatever the tables hold.

    Errors of SQLite come out as OSError, one line.
    """

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


@dataclass(kw_only=True)
class Served:
    """Counts of what one drafter version did on one route. No text, so no opt-out and no limit."""

    route: str
    version: str
    requests: int = 0  # finished, by whatever reason
    tokens: int = 0  # that clients were told: no stop string takes them back
    rounds: int = 0
    drafted: int = 0  # tokens proposed
    accepted: int = 0  # of them
    tested: int = 0  # of them, those verified with everything before them accepted
    acceptance: float = 0.0  # sum over the tested ones of the probability of acceptance

    @property
    def alpha(self) -> float | None:
        """Mean of sum_x min(p, q) over the tested positions; null where nothing was tested."""
        return self.acceptance / self.tested if self.tested else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens for a pass of the target; null where nothing was drafted."""
        return 1 + self.accepted / self.rounds if self.rounds else None


COUNTS = [field.name for field in fields(Served)]


def total(rows: Sequence[Served]) -> Served:
    """The sums of all counts, of no one route or version."""
    sums = {name: sum(getattr(one, name) for one in rows) for name in COUNTS[2:]}
    return Served(route="", version="", **sums)


def split(record: Record) -> float:
    """A number in [0, 1), uniform over conversations, the same for all records of one.

    A record is held out where it is below the gate's fraction.
    """
    known = document_of(record)
    if isinstance(known, str):
        content, person = known.encode(), b"conversation"
    else:
        content, person = np.asarray(known, "<i4").tobytes(), b"held out"
    digest = hashlib.blake2b(content, digest_size=8, person=person).digest()
    return (int.from_bytes(digest, "little") >> (64 - _SPLIT_BITS)) / (1 << _SPLIT_BITS)


# Of every route's records the newest stay that fit into its share of the room.
TOO_MUCH = """
DELETE FROM records WHERE id IN (SELECT id FROM (
    SELECT id, sum(size) OVER (PARTITION BY route ORDER BY id DESC) AS total FROM records)
WHERE total > ? / (SELECT count(DISTINCT route) FROM records))
"""


@dataclass(eq=False)
class Buffer:
    """Records by route, bounded in bytes and in time, part of the conversations held out.

    A conversation, by `Record.document` or else by the prompt, is on the same side of the held-out
    split for ever (for one `gate_fraction`).
    `fingerprints`: of what the records are made with, by configuration key; a new file keeps them.
    None: whoever opens it does not ask. Raises ValueError, one line, for a file with other ones,
    of another format, or damaged; OSError where the file cannot be opened or written.
    """

    path: Path
    settings: BufferConfig
    _: KW_ONLY
    gate_fraction: float = 0.2
    fingerprints: Mapping[str, str] | None = None
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._room = self.settings.max_megabytes * 1e6
        self._grown = 0  # bytes since the last upkeep
        self._database = Database(self.path, self._prepare)

    def _prepare(self, connection: sqlite3.Connection) -> None:
        for statement in TABLES.split(";"):
            connection.execute(statement)
        # Ids of a new file begin at its time in milliseconds, so that they come after those of
        # the file whose place it may have taken, and nobody who waits for higher ones waits on.
        first = max(0, int(1000 * self.clock()))
        if not connection.execute("SELECT count(*) FROM sqlite_sequence").fetchone()[0]:
            connection.execute("INSERT INTO sqlite_sequence VALUES ('records', ?)", (first,))
        if self.fingerprints is None:
            return
        stored, wanted = self._fact(connection, "fingerprints"), dict(self.fingerprints)
        used = "SELECT EXISTS (SELECT 1 FROM records) OR EXISTS (SELECT 1 FROM served)"
        if stored is None and not connection.execute(used).fetchone()[0]:
            self._set_fact(connection, "fingerprints", wanted)
        else:
            require_same(self.path, stored=stored or {}, wanted=wanted)

    @staticmethod
    def _fact(connection: sqlite3.Connection, name: str) -> Any:
        query = "SELECT value FROM facts WHERE name = ?"
        row = connection.execute(query, (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    @staticmethod
    def _set_fact(connection: sqlite3.Connection, name: str, value: Any) -> None:
        connection.execute("REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def append(self, entries: Sequence[tuple[str, Record]]) -> None:
        """Store records, each with its route, in one transaction, on the disk when this returns.

        Raises OSError (a full disk) and stores none of them; ValueError for an id that does not
        fit 32 bits. Where the buffer has grown enough, `maintain` follows.
        """
        now, rows = self.clock(), []
        for route, record in entries:
            content = zlib.compress(pack([record], SCHEMA).serialize(), level=1)
            rows.append((route, now, split(record), len(content), content))
        with self._database.writing() as connection:
            connection.executemany(
                "INSERT INTO records (route, kept, split, size, content) VALUES (?, ?, ?, ?, ?)",
                rows,
            )
        self._grown += sum(len(row[-1]) for row in rows)
        if self._grown > self._room / _GROWTH:
            try:
                self.maintain()
            except OSError as error:  # the entries are stored all the same
                _log.warning("%s", error)

    def add_served(self, rows: Sequence[Served]) -> None:
        """Add counts to those of their route and version, and to those of their route this minute.

        Raises OSError as `append`.
        """
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in COUNTS[2:])
        minute = {"minute": int(self.clock() // _MINUTE)}
        with self._database.writing() as connection:
            for table, key in (("served", "version"), ("served_by_minute", "minute")):
                names = ["route", key, *COUNTS[2:]]
                connection.executemany(
                    f"INSERT INTO {table} ({', '.join(names)}) VALUES (:{', :'.join(names)})"
                    f" ON CONFLICT (route, {key}) DO UPDATE SET {sums}",
                    [asdict(row) | minute for row in rows],
                )

    def served(self, route: str) -> list[Served]:
        """The counts of a route, a row a version, in the order in which they were first seen."""
        query = f"SELECT {', '.join(COUNTS)} FROM served WHERE route = ? ORDER BY rowid"
        return [Served(**dict(zip(COUNTS, row, strict=True))) for row in self._rows(query, route)]

    def served_by_time(
        self, route: str, width: int, *, since: float = 0.0, most: int = -1
    ) -> list[tuple[float, Served]]:
        """When each stretch of `width` seconds (whole minutes) begins, and what a route served in
        it under all versions; the oldest first, the `most` newest.

        Of minutes that begin at `since` or later, in seconds since 1970, as long as records are
        kept.
        """
        minutes, sums = int(width // _MINUTE), ", ".join(f"sum({name})" for name in COUNTS[2:])
        query = (
            f"SELECT minute / {minutes} * {minutes} AS start, route, '', {sums} FROM"
            " served_by_minute WHERE route = ? AND minute >= ? GROUP BY start ORDER BY start DESC"
        )
        rows = self._rows(f"{query} LIMIT ?", route, since / _MINUTE, most)
        return [
            (start * _MINUTE, Served(**dict(zip(COUNTS, row, strict=True))))
            for start, *row in reversed(rows)
        ]

    def days(self) -> list[tuple[float, str, int, int]]:
        """When a day (UTC) begins, a route, its records of that day, their bytes; oldest first."""
        day = f"CAST(kept / {_DAY} AS INTEGER)"
        query = f"SELECT {day} * {_DAY}, route, count(*), sum(size) FROM records GROUP BY 1, 2"
        return self._rows(query)

    def set_queued(self, queued: int) -> None:
        """Tell others how many requests wait at the server."""
        load = {"queued": queued, "seconds": self.clock()}
        with self._database.writing() as connection:
            self._set_fact(connection, "server", load)

    def queued(self, *, within: float) -> int:
        """How many requests wait, by what was told in the last `within` seconds; 0 else."""
        with self._database.session() as connection:
            load = self._fact(connection, "server")
        is_new = load is not None and abs(self.clock() - load["seconds"]) <= within
        return load["queued"] if is_new else 0

    def count(self, route: str, *, held_out: bool, after: int = 0) -> int:
        """How many records of a side of `route` have an id above `after`."""
        query = f"SELECT count(*) {_SIDE[held_out]} AND id > ?"
        return self._rows(query, route, self.gate_fraction, after)[0][0]

    def conversations(self, route: str, *, held_out: bool, newest: int) -> int:
        """How many conversations the `newest` records of a side of `route` belong to."""
        side = f"SELECT split {_SIDE[held_out]} ORDER BY id DESC LIMIT ?"
        query = f"SELECT count(DISTINCT split) FROM ({side})"
        return self._rows(query, route, self.gate_fraction, newest)[0][0]

    def last_id(self, route: str) -> int:
        """The highest id stored for `route`, 0 if there is none."""
        return self._rows("SELECT coalesce(max(id), 0) FROM records WHERE route = ?", route)[0][0]

    def newest(self, route: str, count: int, *, held_out: bool, after: int = 0) -> list[Record]:
        """The `count` newest records of a side with an id above `after`, the newest first."""
        query = f"SELECT id, content {_SIDE[held_out]} AND id > ? ORDER BY id DESC LIMIT ?"
        return self._records(self._rows(query, route, self.gate_fraction, after, count))

    def older(
        self, route: str, count: int, *, held_out: bool, seed: int, recent: int
    ) -> list[Record]:
        """`count` different records (fewer if there are fewer), uniform, in random order.

        Drawn from all of that side of `route` but the newest `recent`. The same content and seed
        give the same records; one that another process deletes meanwhile is left out.
        """
        query = f"SELECT id {_SIDE[held_out]} ORDER BY id DESC LIMIT -1 OFFSET ?"
        ids = self._rows(query, route, self.gate_fraction, recent)
        chosen = random.Random(seed).sample(ids, min(count, len(ids)))
        one = "SELECT id, content FROM records WHERE id = ?"
        return self._records(row for drawn in chosen for row in self._rows(one, *drawn))

    def _rows(self, query: str, *values: object) -> list[Any]:
        with self._database.session() as connection:
            return connection.execute(query, values).fetchall()

    def _records(self, rows: Iterable[tuple[int, bytes]]) -> list[Record]:
        """The records of ids and contents, without damaged ones."""
        records = []
        for record_id, content in rows:
            try:
                batch = pa.ipc.read_record_batch(zlib.decompress(content), SCHEMA)
                records.append(unpack(pa.Table.from_batches([batch]), 0, Record))
            except (zlib.error, *UNREADABLE) as error:
                reason = first_line(error)
                _log.warning("%s: record %d is damaged (%s)", self.path, record_id, reason)
        return records

    def maintain(self) -> None:
        """Delete what is too old or too much, really: no deleted token stays in the files.

        Call it now and then, with or without traffic. Raises OSError as `append`.
        """
        self._grown = 0
        oldest = self.clock() - self.settings.retention_days * _DAY
        with self._database.writing() as connection:
            connection.execute("DELETE FROM records WHERE kept < ?", (oldest,))
            connection.execute("DELETE FROM served_by_minute WHERE minute < ?", (oldest / _MINUTE,))
            connection.execute(TOO_MUCH, (self._room,))
        if not self._database.shrink():
            _log.warning("%s: a reader is busy, the log is emptied later", self.path)

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        self._database.close()
