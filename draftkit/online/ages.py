"""How old something is, for retention, whatever the wall clock does meanwhile.

Time here is a ledger: it starts at the wall clock's time and moves by what the machine's uptime
counts, so a clock set forward or back changes no age. Uptime knows nothing of the time that the
machine was off; for that there is only the wall clock, and a clock that is ahead of the ledger
may be a wrong one. It is believed once it has been ahead for `PROOF_SECONDS` of uptime: a jump by
years that is put right within a day deletes nothing, and after a long time off what is due goes
one day late. A clock that is behind is never believed.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

PROOF_SECONDS = 86400.0
SMALL_SECONDS = 600.0  # believed at once: a restart, a correction
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_PROCESS = f"process {time.time_ns()}"  # stands for a boot where the system does not tell


@dataclass(frozen=True, kw_only=True)
class Uptime:
    """Seconds since a boot, of which there is one identity; comparable within one boot only."""

    boot: str
    seconds: float


def uptime() -> Uptime:
    """The machine's, sleep included, where the system tells; else the process's."""
    if _BOOT.is_file() and hasattr(time, "CLOCK_BOOTTIME"):
        boot = _BOOT.read_text(encoding="ascii").strip()
        return Uptime(boot=boot, seconds=time.clock_gettime(time.CLOCK_BOOTTIME))
    return Uptime(boot=_PROCESS, seconds=time.monotonic())


def seconds_since(earlier: Uptime, later: Uptime) -> float | None:
    """Seconds between two uptimes; None where they are of different boots."""
    return max(0.0, later.seconds - earlier.seconds) if earlier.boot == later.boot else None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Time that never goes back, as of one look at the clocks."""

    now: float  # seconds; unix time as long as the wall clock is right
    seen: Uptime  # when it was
    ahead_since: float | None = None  # `now` when the wall clock was first seen to be ahead


def look(ledger: Ledger | None, *, wall: float, up: Uptime) -> Ledger:
    """The ledger of this moment; null begins one at the wall clock's time."""
    if ledger is None:
        return Ledger(now=wall, seen=up)
    now = ledger.now + (seconds_since(ledger.seen, up) or 0.0)
    ahead = wall - now
    since = ledger.ahead_since
    if ahead <= 0:
        return Ledger(now=now, seen=up)
    since = now if since is None else since
    if ahead <= SMALL_SECONDS or now - since >= PROOF_SECONDS:
        return Ledger(now=wall, seen=up)
    return replace(ledger, now=now, seen=up, ahead_since=since)
