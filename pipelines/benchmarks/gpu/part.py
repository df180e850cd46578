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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftkit.artifacts import write_json
from draftkit.config import Config, HardwareConfig
from draftkit.models.devices import resolve_device

from ...configuration import read_config
from ...folder import CONFIG

FOLDER = "parts"
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
LAST_WORDS_SECONDS = 2.0  # before the limit, in which tracebacks are printed
SAFETY = 1.25  # a step may take so much longer than the one like it before

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The module whose `run(part)` a part is, and the seconds kept for it until its turn comes."""

    title: str
    module: str
    seconds: float
    most: float  # of what the parts before it have left


PLANS = {
    "a": Plan("ceilings and versions", "..ceilings", 20, 60),
    "b": Plan("tests on the GPU", ".suite", 115, 240),
    "c": Plan("decoder, acceptance given", ".decoder", 165, 300),
    "d": Plan("a trained pair", ".pair", 185, 300),
    "e": Plan("distillation at a vocabulary of 152k", ".loss", 35, 90),
    "f": Plan("server under load", ".server", 0, 180),
}


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
        if self.rehearses:
            hardware = HardwareConfig(device="cpu", dtype="float32", threads=1)
            config = replace(config, hardware=hardware)
        self.config = config
        self.steps: dict[str, dict[str, Any]] = {}
        self._longest: dict[str, float] = {}  # seconds, by kind of step
        self._clock = clock
        self._started = clock()

    @property
    def device(self) -> torch.device:
        return resolve_device(self.config.hardware)

    def size(self, real: T, rehearsed: T) -> T:
        """How large or long something is: `rehearsed` where nothing is measured."""
        return rehearsed if self.rehearses else real

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
        left = self.seconds - (self._clock() - self._started)
        if not self.rehearses and expected > left:
            reason = f"needs about {expected:.0f} s, {left:.0f} are left"
            print(f"{self.letter}: {name}: {reason}", flush=True)
            return self.write(name, {"left_out": reason})
        started = self._clock()
        try:
            value = function()
        except Exception:
            text = traceback.format_exc()
            self.write(name, {"seconds": self._clock() - started, "error": text})
            print(f"{self.letter}: {name} raised\n{text}", flush=True)
            if needed:
                raise
            return None
        seconds = self._clock() - started
        if kind:
            self._longest[kind] = max(seconds, self._longest.get(kind, 0.0))
        self.write(name, {"seconds": seconds} | ({"result": value} if kept else {}))
        print(f"{self.letter}: {name}: {seconds:.1f} s", flush=True)
        return value

    def write(self, name: str, step: dict[str, Any]) -> None:
        """Put what is known of a step where a kill of this process leaves it."""
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
        importlib.import_module(PLANS[letter].module, __package__).run(part)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.disable()
    return int(any("error" in step for step in part.steps.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
