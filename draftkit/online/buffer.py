"""The traffic buffer: what was served, in one SQLite file that the server writes and others read.

It stores records and counts; it does not know who serves, who trains, or what a drafter is. Any
number of processes may open the same file; a `Buffer` may be used by several threads.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftkit.config.service import BufferConfig
from draftkit.data.rollouts import Record


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One served answer, as the server hands it over."""

    record: Record
    route: str
    version: str  # of the drafter that proposed
    seconds: float  # unix time of the answer; told, never relied on: ids order the records


@dataclass(frozen=True, kw_only=True)
class Stored(Entry):
    """An entry of the buffer. Log-probabilities and masses come back rounded to float32."""

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


@dataclass(frozen=True, kw_only=True)
class Load:
    """How busy the server said it was, and how long ago."""

    queued: int
    running: int
    age_seconds: float  # by the uptime of the machine; infinite if it was before the last boot


class Buffer:
    """Records by route, bounded in bytes and in time, half of each prompt's hash held out.

    A prompt is on the same side of the held-out split for ever (for one `gate_fraction`).
    """

    def __init__(
        self,
        path: str | Path,
        settings: BufferConfig,
        *,
        gate_fraction: float = 0.2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or begin the file `path`.

        `recovered` tells what had to be done for that. Raises ValueError, one line, for a file of
        another format; OSError where the file cannot be opened or written.
        """
        raise NotImplementedError

    def append(self, entries: Sequence[Entry]) -> None:
        """Store `entries` in one transaction that is on the disk when this returns.

        Raises OSError (ENOSPC: the disk is full) and stores none of them; ValueError for an id
        that does not fit 32 bits.
        """
        raise NotImplementedError

    def add_served(self, rows: Sequence[Served]) -> None:
        """Add counts to those of the same route and version. Raises OSError as `append`."""
        raise NotImplementedError

    def served(self, route: str) -> list[Served]:
        """The counts of a route, a row a version, in the order in which they were first seen."""
        raise NotImplementedError

    def set_load(self, *, queued: int, running: int) -> None:
        """Tell others how busy the server is; not flushed to the disk, so cheap."""
        raise NotImplementedError

    def load(self) -> Load | None:
        """What was last told; None if nothing ever was."""
        raise NotImplementedError

    def count(self, route: str, *, held_out: bool, after: int = 0) -> int:
        """How many records of a side of `route` have an id above `after`."""
        raise NotImplementedError

    def last_id(self, route: str) -> int:
        """The highest id stored for `route`, 0 if there is none."""
        raise NotImplementedError

    def newest(self, route: str, count: int, *, held_out: bool, after: int = 0) -> list[Stored]:
        """The `count` newest records of a side with an id above `after`, the newest first."""
        raise NotImplementedError

    def sample(
        self, route: str, count: int, *, held_out: bool, seed: int, recent: int, reservoir: bool
    ) -> list[Stored]:
        """`count` different records (fewer if there are fewer), uniform, in random order.

        Drawn from the newest `recent` of that side of `route`, or, with `reservoir`, from all
        older ones. The same content and seed give the same records.
        """
        raise NotImplementedError

    def maintain(self) -> None:
        """Delete what is too old or too much, really: no deleted token stays in the files.

        Call it now and then, with or without traffic. Raises OSError as `append`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        raise NotImplementedError
