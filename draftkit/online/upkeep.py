"""What stays in the traffic buffer: retention by time, and room by bytes.

Every route has an equal share of the room. Its newest records fill one part of the share; what no
longer fits there is aged, and of all aged ones a uniform sample fills the other part: those with
the lowest of the numbers that are drawn for their ids, as many as fit. Who is out has been beaten
by ones that are still there or have expired, so every aged record has the same chance, however
large it is and whenever it came. This module knows the tables, not what is in a record.
"""

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence

from draftkit.online.database import Database

TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY AUTOINCREMENT, route TEXT NOT NULL, version TEXT NOT NULL,
    seconds REAL NOT NULL, kept REAL NOT NULL, split REAL NOT NULL, size INTEGER NOT NULL,
    checksum BLOB NOT NULL, content BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS records_by_route ON records (route, id, split, size);
CREATE INDEX IF NOT EXISTS records_by_time ON records (kept);
CREATE TABLE IF NOT EXISTS served (
    route TEXT NOT NULL, version TEXT NOT NULL, requests INTEGER NOT NULL, tokens INTEGER NOT NULL,
    rounds INTEGER NOT NULL, drafted INTEGER NOT NULL, accepted INTEGER NOT NULL,
    tested INTEGER NOT NULL, acceptance REAL NOT NULL, seconds REAL NOT NULL,
    UNIQUE (route, version));
"""
_FILLED = 0.98  # of the bound: how full pages are changes with what is deleted
_BATCH = 64  # rows deleted in one transaction, so that no other writer waits for long


def draw(record_id: int) -> float:
    """The number in [0, 1) that an id has for ever."""
    digest = hashlib.blake2b(record_id.to_bytes(8, "little"), digest_size=8, person=b"reservoir")
    return (int.from_bytes(digest.digest(), "little") >> 11) / (1 << 53)


def fitting(rows: Iterable[tuple[int, int]], room: float) -> int:
    """How many of `rows` (id, bytes), taken in order, fit into `room` bytes."""
    count = 0
    for _, size in rows:
        room -= size
        if room < 0:
            break
        count += 1
    return count


def unsampled(rows: Sequence[tuple[int, int]], room: float) -> list[int]:
    """Of aged records `rows` (id, bytes), the ids that are not in a reservoir of `room` bytes."""
    drawn = sorted(rows, key=lambda row: draw(row[0]))
    return [record_id for record_id, _ in drawn[fitting(drawn, room) :]]


def _delete(database: Database, ids: Sequence[int]) -> None:
    for start in range(0, len(ids), _BATCH):
        with database.writing() as connection:
            chosen = [(record_id,) for record_id in ids[start : start + _BATCH]]
            connection.executemany("DELETE FROM records WHERE id = ?", chosen)


def expire(database: Database, before: float) -> int:
    """Delete the records kept since before that time of the ledger; how many they were."""
    with database.reading() as connection:
        query = "SELECT id FROM records WHERE kept < ? ORDER BY kept"
        ids = [row[0] for row in connection.execute(query, (before,))]
    _delete(database, ids)
    return len(ids)


def _room(connection: sqlite3.Connection, most_bytes: float) -> float:
    """How many bytes of content a file of `most_bytes` holds, by how full its pages are now."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_count", "freelist_count", "page_size")
    )
    total = connection.execute("SELECT coalesce(sum(size), 0) FROM records").fetchone()[0]
    used = (pages - free) * size
    return _FILLED * most_bytes * total / used if total else most_bytes


def bound(database: Database, *, most_bytes: float, reservoir_fraction: float) -> int:
    """Age and delete until the file fits into `most_bytes`; how many records went."""
    gone: list[int] = []
    with database.reading() as connection:
        routes = [row[0] for row in connection.execute("SELECT DISTINCT route FROM records")]
        share = _room(connection, most_bytes) / max(1, len(routes))
        for route in routes:
            query = "SELECT id, size FROM records WHERE route = ? ORDER BY id DESC"
            rows = connection.execute(query, (route,)).fetchall()
            recent = fitting(rows, (1 - reservoir_fraction) * share)
            gone += unsampled(rows[recent:], reservoir_fraction * share)
    _delete(database, gone)
    return len(gone)
