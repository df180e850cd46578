"""The traffic buffer: what was served, in one SQLite file that the server writes and others read.

It stores records and counts; it does not know who serves, who trains, or what a drafter is. Any
number of processes may open the same file, and several threads may use one `Buffer`. A damaged
row is left out and counted; a damaged file is set aside and a new one begun.
"""

import contextlib
import json
import logging
import random
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

from draftkit.config.service import BufferConfig
from draftkit.data.rollouts import Record, from_bytes, to_bytes
from draftkit.online import upkeep
from draftkit.online.ages import Ledger, Uptime, look, seconds_since, uptime
from draftkit.online.database import Database
from draftkit.online.fingerprints import require_same
from draftkit.online.records import checksum, split

UPKEEP_SECONDS = 600.0  # between two upkeeps of a buffer that is written, unless it grows fast
_GROWTH = 16  # the part of its room, 1 / this, after which a buffer is looked after
_DAY = 86400.0
_SIGN = {True: "<", False: ">="}  # of the split against the gate's fraction, by `held_out`
_ASIDE_SECONDS = _DAY  # for which a damaged file is kept, whose records may be due any moment
_COLUMNS = "id, route, version, seconds, kept, split, checksum, content"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One served answer, as the server hands it over."""

    record: Record
    route: str
    version: str  # of the drafter that proposed
    seconds: float  # unix time of the answer; told, never relied on: ids order the records


@dataclass(frozen=True, kw_only=True)
class Stored(Entry):
    """An entry of the buffer."""

    id: int  # rises with every append, never used twice
    held_out: bool  # the gate's, never trained on


@dataclass(frozen=True, kw_only=True)
class Served:
    """Counts of what one drafter version did on one route. No text, so no opt-out and no limit."""

    route: str
    version: str
    requests: int = 0
    tokens: int = 0  # committed
    rounds: int = 0
    drafted: int = 0  # tokens proposed
    accepted: int = 0  # of them
    tested: int = 0  # of them, those verified with everything before them accepted
    acceptance: float = 0.0  # sum over the tested ones of the probability of acceptance
    seconds: float = 0.0  # of decoding: of every round the share of one row


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the server said it was, and how long ago."""

    queued: int
    running: int
    age_seconds: float  # by the uptime of the machine; infinite if it was before the last boot


class Buffer:
    """Records by route, bounded in bytes and in time, part of the conversations held out.

    A conversation, by `Record.document` or else by the prompt, is on the same side of the held-out
    split for ever (for one `gate_fraction`).
    `damaged` holds the ids of rows that were read and were not as they had been written.
    """

    def __init__(
        self,
        path: str | Path,
        settings: BufferConfig,
        *,
        gate_fraction: float = 0.2,
        fingerprints: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
        up: Callable[[], Uptime] = uptime,
    ) -> None:
        """Open or begin the file `path`. `clock` is the wall's, `up` the machine's uptime.

        `fingerprints`: of what its records are made with, by configuration key; a new file keeps
        them. None: whoever opens it does not ask. Raises ValueError, one line, for a file with
        other ones or of another format; OSError where the file cannot be opened or written.
        """
        self.settings = settings
        self.damaged: set[int] = set()
        self._gate_fraction = gate_fraction
        self._path, self._fingerprints = Path(path), fingerprints
        self._clock, self._up = clock, up
        self._ledger: Ledger | None = None
        self._grown, self._looked_after = 0, up()
        self._database = Database(path, self._prepare)

    @property
    def set_aside(self) -> Path | None:
        """Where a damaged file is whose place this one took when it was opened."""
        return self._database.set_aside

    def _prepare(self, connection: sqlite3.Connection) -> None:
        for statement in upkeep.TABLES.split(";"):
            connection.execute(statement)
        # Ids of a new file begin at its time in milliseconds, so that they come after those of
        # the file whose place it may have taken, and nobody who waits for higher ones waits on.
        first = max(0, int(1000 * self._clock()))
        if not connection.execute("SELECT count(*) FROM sqlite_sequence").fetchone()[0]:
            connection.execute("INSERT INTO sqlite_sequence VALUES ('records', ?)", (first,))
        self._belong(connection)
        self._look(connection)

    def _belong(self, connection: sqlite3.Connection) -> None:
        """Note in an empty file what it is for. ValueError for one that is for something else."""
        wanted = self._fingerprints
        if wanted is None:
            return
        stored = self._fact(connection, "fingerprints")
        used = "SELECT EXISTS (SELECT 1 FROM records) OR EXISTS (SELECT 1 FROM served)"
        if stored is None and not connection.execute(used).fetchone()[0]:
            self._set_fact(connection, "fingerprints", dict(wanted))
        else:
            require_same(self._path, stored=stored or {}, wanted=wanted)

    def _look(self, connection: sqlite3.Connection) -> Ledger:
        """The time of the file's ledger, which is stored."""
        told = self._fact(connection, "ledger")
        before = told and Ledger(**told | {"seen": Uptime(**told["seen"])})
        self._ledger = look(before, wall=self._clock(), up=self._up())
        self._set_fact(connection, "ledger", asdict(self._ledger))
        return self._ledger

    @staticmethod
    def _fact(connection: sqlite3.Connection, name: str) -> Any:
        query = "SELECT value FROM facts WHERE name = ?"
        row = connection.execute(query, (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    @staticmethod
    def _set_fact(connection: sqlite3.Connection, name: str, value: Any) -> None:
        connection.execute("REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(value)))

    def append(self, entries: Sequence[Entry]) -> None:
        """Store `entries` in one transaction that is on the disk when this returns.

        Raises OSError (ENOSPC: the disk is full) and stores none of them; ValueError for an id
        that does not fit 32 bits. Now and then `maintain` follows, by time and growth.
        """
        ledger = look(self._ledger, wall=self._clock(), up=self._up())
        rows = []
        for entry in entries:
            content = to_bytes(entry.record)
            told = (entry.route, entry.version, float(entry.seconds), ledger.now)
            place = (*told, split(entry.record))
            rows.append((*place, len(content), checksum(content, *place), content))
        with self._database.writing() as connection:
            connection.executemany(
                "INSERT INTO records (route, version, seconds, kept, split, size, checksum,"
                " content) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
        self._grown += sum(row[5] for row in rows)
        rested = seconds_since(self._looked_after, self._up())
        if self._grown > self._room / _GROWTH or rested is None or rested > UPKEEP_SECONDS:
            try:
                self.maintain()
            except OSError as error:  # the entries are stored all the same
                _log.warning("%s", error)

    @property
    def _room(self) -> float:
        return self.settings.max_megabytes * 1e6

    def add_served(self, rows: Sequence[Served]) -> None:
        """Add counts to those of the same route and version. Raises OSError as `append`."""
        names = [field.name for field in fields(Served)]
        sums = ", ".join(f"{name} = {name} + excluded.{name}" for name in names[2:])
        marks = ", ".join("?" for _ in names)
        with self._database.writing() as connection:
            connection.executemany(
                f"INSERT INTO served ({', '.join(names)}) VALUES ({marks})"
                f" ON CONFLICT (route, version) DO UPDATE SET {sums}",
                [astuple(row) for row in rows],
            )

    def served(self, route: str) -> list[Served]:
        """The counts of a route, a row a version, in the order in which they were first seen."""
        names = [field.name for field in fields(Served)]
        query = f"SELECT {', '.join(names)} FROM served WHERE route = ? ORDER BY rowid"
        with self._database.reading() as connection:
            rows = connection.execute(query, (route,)).fetchall()
        return [Served(**dict(zip(names, row, strict=True))) for row in rows]

    def set_load(self, *, queued: int, running: int) -> None:
        """Tell others how busy the server is; not flushed to the disk, so cheap."""
        told = {"queued": queued, "running": running, "told": asdict(self._up())}
        with self._database.writing(flushed=False) as connection:
            self._set_fact(connection, "load", told)

    def load(self) -> Load | None:
        """What was last told; None if nothing ever was."""
        with self._database.reading() as connection:
            told = self._fact(connection, "load")
        if told is None:
            return None
        age = seconds_since(Uptime(**told.pop("told")), self._up())
        return Load(**told, age_seconds=float("inf") if age is None else age)

    def count(self, route: str, *, held_out: bool, after: int = 0) -> int:
        """How many records of a side of `route` have an id above `after`."""
        with self._database.reading() as connection:
            return len(self._ids(connection, route, held_out=held_out, after=after))

    def conversations(self, route: str, *, held_out: bool, newest: int) -> int:
        """How many conversations the `newest` records of a side of `route` belong to."""
        query = (
            "SELECT count(DISTINCT split) FROM (SELECT split FROM records INDEXED BY"
            f" records_by_route WHERE route = ? AND split {_SIGN[held_out]} ?"
            " ORDER BY id DESC LIMIT ?)"
        )
        with self._database.reading() as connection:
            values = (route, self._gate_fraction, newest)
            return connection.execute(query, values).fetchone()[0]

    def last_id(self, route: str) -> int:
        """The highest id stored for `route`, 0 if there is none."""
        query = "SELECT coalesce(max(id), 0) FROM records WHERE route = ?"
        with self._database.reading() as connection:
            return connection.execute(query, (route,)).fetchone()[0]

    def _ids(
        self, connection: sqlite3.Connection, route: str, *, held_out: bool, after: int = 0
    ) -> list[int]:
        """Of one side of a route, the newest first."""
        query = (
            "SELECT id FROM records INDEXED BY records_by_route"
            f" WHERE route = ? AND id > ? AND split {_SIGN[held_out]} ? ORDER BY id DESC"
        )
        return [row[0] for row in connection.execute(query, (route, after, self._gate_fraction))]

    def _read(self, connection: sqlite3.Connection, ids: Sequence[int]) -> list[Stored]:
        """The records of `ids`, in their order, without damaged ones."""
        found = []
        for record_id in ids:
            query = f"SELECT {_COLUMNS} FROM records WHERE id = ?"
            row = connection.execute(query, (record_id,)).fetchone()
            _, route, version, seconds, kept, side, told, content = row
            try:
                if told != checksum(content, route, version, seconds, kept, side):
                    raise ValueError("its checksum differs")
                record = from_bytes(content)
            except ValueError as error:
                if record_id not in self.damaged:
                    _log.warning("%s: record %d: %s", self._database.path, record_id, error)
                self.damaged.add(record_id)
                continue
            found.append(
                Stored(
                    record=record,
                    route=route,
                    version=version,
                    seconds=seconds,
                    id=record_id,
                    held_out=side < self._gate_fraction,
                )
            )
        return found

    def newest(self, route: str, count: int, *, held_out: bool, after: int = 0) -> list[Stored]:
        """The `count` newest records of a side with an id above `after`, the newest first."""
        with self._database.reading() as connection:
            ids = self._ids(connection, route, held_out=held_out, after=after)
            return self._read(connection, ids[:count])

    def sample(
        self, route: str, count: int, *, held_out: bool, seed: int, recent: int, reservoir: bool
    ) -> list[Stored]:
        """`count` different records (fewer if there are fewer), uniform, in random order.

        Drawn from the newest `recent` of that side of `route`, or, with `reservoir`, from all
        older ones. The same content and seed give the same records.
        """
        with self._database.reading() as connection:
            ids = self._ids(connection, route, held_out=held_out)
            ids = ids[recent:] if reservoir else ids[:recent]
            chosen = random.Random(seed).sample(ids, min(count, len(ids)))
            return self._read(connection, chosen)

    def maintain(self) -> None:
        """Delete what is too old or too much, really: no deleted token stays in the files.

        Files that were set aside go after a day: how old their records are cannot be known.
        Call it now and then, with or without traffic. Raises OSError as `append`.
        """
        self._grown, self._looked_after = 0, self._up()
        keep_seconds = self.settings.retention_days * _DAY
        with self._database.writing() as connection:
            now = self._look(connection).now
        upkeep.expire(self._database, now - keep_seconds)
        share = self.settings.reservoir_fraction
        upkeep.bound(self._database, most_bytes=self._room, reservoir_fraction=share)
        if not self._database.shrink():
            _log.warning("%s: a reader is busy, the log is emptied later", self._database.path)
        for aside in self._database.path.parent.glob(f"{self._database.path.name}.damaged-*"):
            with contextlib.suppress(FileNotFoundError):  # others look after the file too
                if now - aside.stat().st_mtime > min(_ASIDE_SECONDS, keep_seconds):
                    aside.unlink()

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        self._database.close()
