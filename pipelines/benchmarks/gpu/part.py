"""`python -m pipelines.benchmarks.gpu.part LETTER FOLDER SECONDS`: one part, its own process.

What it measures is a step of the part, written to `<FOLDER>/parts/<LETTER>.json` as soon as it is
known: a kill costs the step under way. A step that raises leaves its traceback there, and the next
one is tried; one for which there is no time is left out, which is no failure. The exit code is 0
where no step failed. Shortly before its time is over the process prints where all its threads are.
"""

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from draftkit.artifacts import write_json
from draftkit.config import Config, HardwareConfig
from pipelines.configuration import read_config
from pipelines.folder import CONFIG

MODULES = {
    "a": "pipelines.benchmarks.gpu.ceilings",
    "b": "pipelines.benchmarks.gpu.suite",
    "c": "pipelines.benchmarks.gpu.decoder",
    "d": "pipelines.benchmarks.gpu.pair",
    "e": "pipelines.benchmarks.gpu.loss",
    "f": "pipelines.benchmarks.gpu.server",
}
FOLDER = "parts"
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
LAST_WORDS_SECONDS = 2.0  # before the limit, in which tracebacks are printed
SAFETY = 1.25  # a step may take so much longer than the one like it before

T = TypeVar("T")


class Part:
    """One part at work: its configuration, its time, and what it has measured so far."""

    def __init__(
        self,
        letter: str,
        folder: Path,
        config: Config,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.letter = letter
        self.folder = folder
        self.seconds = seconds  # for all of it
        self.rehearses = config.gpu.rehearse
        self.config = config
        if self.rehearses:
            hardware = HardwareConfig(device="cpu", dtype="float32", threads=1)
            self.config = replace(config, hardware=hardware)
        self.steps: dict[str, dict[str, Any]] = {}
        self._longest: dict[str, float] = {}  # seconds, by kind of step
        self._clock = clock
        self._started = clock()

    @property
    def left(self) -> float:
        """Seconds until the process is killed."""
        return self.seconds - (self._clock() - self._started)

    @property
    def failed(self) -> bool:
        return any("error" in step for step in self.steps.values())

    def step(
        self,
        name: str,
        function: Callable[[], T],
        *,
        kind: str = "",
        guess: float = 0.0,
        needed: bool = False,
        kept: bool = True,
    ) -> T | None:
        """The value of `function`, written down under `name`; None where it raised or had no time.

        guess: seconds that the first step of its `kind` may take, on a GPU; the next ones are
        expected to take what the longest before them took. needed: what it raises is raised,
        since nothing else can be measured then. kept: the value belongs in the report.
        """
        expected = SAFETY * self._longest[kind] if kind in self._longest else guess
        if not self.rehearses and expected > self.left:
            reason = f"needs about {expected:.0f} s, {self.left:.0f} are left"
            return self._note(name, {"left_out": reason})
        started = self._clock()
        try:
            value = function()
        except Exception:
            text = traceback.format_exc()
            self._note(name, {"seconds": self._clock() - started, "error": text})
            print(text, flush=True)
            if needed:
                raise
            return None
        seconds = self._clock() - started
        if kind:
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        self._note(name, {"seconds": seconds} | ({"result": value} if kept else {}))
        return value

    def keep(self, name: str, value: Any) -> None:
        """Write down what of the step under way is known by now."""
        self._write(name, {"unfinished": True, "result": value})

    def _note(self, name: str, step: dict[str, Any]) -> None:
        self._write(name, step)
        told = step.get("left_out") or f"{step['seconds']:.1f} s"
        print(f"{self.letter}: {name}: {'raised, ' if 'error' in step else ''}{told}", flush=True)

    def _write(self, name: str, step: dict[str, Any]) -> None:
        self.steps[name] = step
        write_json(result_path(self.folder, self.letter), self.steps)


def result_path(folder: Path, letter: str) -> Path:
    """Where a part of the stage folder writes its steps."""
    return folder / FOLDER / f"{letter}.json"


def _die_with_parent() -> None:
    """Let a kill of the command reach this process, which has a session of its own."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main(letter: str, folder: str, seconds: str) -> int:
    """Do the part; returns the exit code."""
    _die_with_parent()
    path, limit = Path(folder), float(seconds)
    with os.fdopen(os.dup(2), "w") as errors:  # whoever captures ours meanwhile
        faulthandler.enable(errors)  # a crash in compiled code, too, tells where
        faulthandler.dump_traceback_later(max(0.1, limit - LAST_WORDS_SECONDS), file=errors)
        part = Part(letter, path, read_config(path / CONFIG), limit)
        importlib.import_module(MODULES[letter]).run(part)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    return int(part.failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
