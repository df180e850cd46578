"""One command in a process group of its own, ended with all that it started at its limit.

What it prints goes to a file, so that nothing of it is lost when it is killed, and is shown as it
comes. This module does not know what is run.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

POLL_SECONDS = 0.1
SHOWN_CHARACTERS = 8_000  # of the last output of a process, in the report


@dataclass(frozen=True)
class Ended:
    """How a process ended: by itself with an exit code (negative: by that signal), or `late`."""

    exit_code: int
    late: bool
    seconds: float
    output: str  # the last of it

    @property
    def status(self) -> str:
        """In a word or two."""
        if self.late:
            return "out of time"
        if self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        return "failed" if self.exit_code else "complete"


def signal_name(number: int) -> str:
    """`SIGKILL`, or the number of one without a name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def run(
    command: Sequence[str], *, log: Path, seconds: float, environment: Mapping[str, str]
) -> Ended:
    """Run `command` for at most `seconds`; what it prints goes to `log` and to our own output."""
    started = time.monotonic()
    with (
        log.open("w", encoding="utf-8") as written,
        log.open(encoding="utf-8", errors="replace") as reading,
    ):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            late = not _wait(process, started + seconds, reading)
        finally:
            _kill_group(process)
        _show(reading)
    output = log.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:]
    return Ended(process.returncode, late, time.monotonic() - started, output)


def _wait(process: subprocess.Popen[bytes], deadline: float, reading: TextIO) -> bool:
    """Whether the process ended before `deadline`."""
    while time.monotonic() < deadline:
        _show(reading)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=POLL_SECONDS)
            return True
    return False


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it still runs, and whatever it has left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show(reading: TextIO) -> None:
    if text := reading.read():
        sys.stdout.write(text)
        sys.stdout.flush()
