"""The command's side of `benchmark.subject=gpu`: parts one after the other, and their report.

Each has its limit, so that all end within `gpu.seconds`; what one leaves, the next may use. The
report is written anew after every part, so that a kill of the command costs the part under way.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftkit.artifacts import fingerprint, read_json, sha256_file, write_text
from draftkit.config import Config
from draftkit.models.devices import resolve_device

from ...configuration import CONF_DIR
from ...plan import MANIFEST, Given, StageFolder
from .part import FOLDER, PLANS, result_path
from .report import report

ROOT = CONF_DIR.parent  # of a clone; of an installation the library's own folder
TESTS = ROOT / "tests"
IMPORTS = Path(__file__).parents[__name__.count(".")]  # what this package is imported from
CODE, SUFFIXES = ("conf", "draftkit", "pipelines", "tests"), (".py", ".yaml")
REPORT = "report.md"
ALL_SECONDS = 520.0  # for all; the seconds of plans are shares of it where `gpu.seconds` differs
LEAST_SECONDS = 10.0  # with less no part is begun
POLL_SECONDS = 0.1
SHOWN_CHARACTERS = 8_000  # of the last output of a part, in the report
# Warnings of libraries are no errors in a part, nothing is fetched, nothing is uploaded.
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "default",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "true",
    "WANDB_MODE": "disabled",
}
REHEARSAL = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def needs(config: Config) -> dict[str, Given]:
    """What a report is of: the code, the parts, and whether it is a rehearsal.

    Other code is no other experiment: what is measured of it takes the place of what was. Raises
    ValueError where there is no GPU, or no tests for part b.
    """
    if "b" in config.gpu.parts and not TESTS.is_dir():
        parts = ",".join(letter for letter in config.gpu.parts if letter != "b")
        raise ValueError(f"gpu.parts: b runs the tests of a clone: use one, or gpu.parts=[{parts}]")
    if not config.gpu.rehearse:
        try:
            resolve_device(config.hardware)
        except ValueError as error:
            raise ValueError(f"{error}; gpu.rehearse=true runs all parts on a CPU, small") from None
    folders = [ROOT / name for name in CODE] if TESTS.is_dir() else [ROOT]
    files = (file for folder in folders for file in sorted(folder.rglob("*")))
    code = {str(f.relative_to(ROOT)): sha256_file(f) for f in files if f.suffix in SUFFIXES}
    return {"code": Given(fingerprint(code)), "gpu": Given(fingerprint(asdict(config.gpu)))}


def command_of(letter: str, folder: Path, seconds: float) -> list[str]:
    """The process of a part."""
    module = [sys.executable, "-m", f"{__package__}.part"]
    return [*module, letter, str(folder), f"{seconds:.2f}"]


def environment_of(config: Config) -> dict[str, str]:
    """That of a part: our own, so that the code of this folder is found, and `ENVIRONMENT`."""
    path = os.pathsep.join(filter(None, [str(IMPORTS), os.environ.get("PYTHONPATH")]))
    own = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    return own | (REHEARSAL if config.gpu.rehearse else {})


def measure(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run the parts; the summary holds all that they have measured, and what became of them."""
    path, environment = folder.path.resolve(), environment_of(config)
    (path / FOLDER).mkdir(exist_ok=True)
    origin = read_json(path / MANIFEST)["provenance"]
    summary: dict[str, Any] = {"rehearsal": config.gpu.rehearse, "all_well": True, "parts": {}}
    left, share = config.gpu.seconds, config.gpu.seconds / ALL_SECONDS
    for number, letter in enumerate(config.gpu.parts, 1):
        plan = PLANS[letter]
        reserved = sum(PLANS[later].seconds for later in config.gpu.parts[number:])
        limit = min(plan.most * share, left - reserved * share)
        if limit < LEAST_SECONDS * share:
            part: dict[str, Any] = {"status": "skipped", "seconds": 0.0, "steps": {}}
            part["reason"] = f"{max(limit, 0.0):.0f} s were left of gpu.seconds"
        else:
            part = run_part(letter, path, limit, environment)
        left -= part["seconds"]
        summary["parts"][letter] = {"title": plan.title, "limit": limit} | part
        summary["all_well"] &= part["status"] in ("complete", "skipped")
        folder.note(f"part {letter} ({plan.title}): {part['status']}, {part['seconds']:.0f} s")
        write_text(path / REPORT, report(summary, origin))
    return summary


def run_part(
    letter: str, folder: Path, limit: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run one part for at most `limit` seconds; what became of it, and the steps it wrote."""
    result = result_path(folder, letter)
    result.unlink(missing_ok=True)
    ended = run_process(
        command_of(letter, folder, limit),
        log=folder / FOLDER / f"{letter}.log",
        seconds=limit,
        environment=environment,
    )
    if ended["status"] == "complete":
        ended["output"] = ""
    return ended | {"steps": read_json(result) if result.exists() else {}}


def run_process(
    command: Sequence[str], *, log: Path, seconds: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run `command` in a process group of its own; kill all of it after `seconds`.

    What it prints goes to `log`, so that nothing of it is lost by a kill, and is shown as it comes.
    Returns its status in a word or two, exit code, seconds and last output.
    """
    started, late = time.monotonic(), False
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
            while process.returncode is None and not late:
                print(reading.read(), end="", flush=True)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=POLL_SECONDS)
                late = process.returncode is None and time.monotonic() >= started + seconds
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # and whatever it has left behind
            process.wait()
        print(reading.read(), end="", flush=True)
    return {
        "status": "out of time" if late else status_of(process.returncode),
        "exit_code": process.returncode,
        "seconds": time.monotonic() - started,
        "output": log.read_text(encoding="utf-8", errors="replace")[-SHOWN_CHARACTERS:],
    }


def status_of(exit_code: int) -> str:
    """How a process with that exit code ended: a negative one is the signal that killed it."""
    if exit_code >= 0:
        return "failed" if exit_code else "complete"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-exit_code, f'signal {-exit_code}')}"


def show(summary: dict[str, Any], folder: Path) -> None:
    """Print the report. Ends with exit code 1 where a part did not come to its end."""
    print((folder / REPORT).read_text(encoding="utf-8"))
    print(f"benchmark: {folder / REPORT} and {folder / 'summary.json'}", flush=True)
    if not summary["all_well"]:
        ends = {letter: part["status"] for letter, part in summary["parts"].items()}
        bad = [letter for letter, end in ends.items() if end not in ("complete", "skipped")]
        print(f"benchmark: not all is well: part {', '.join(bad)}", file=sys.stderr, flush=True)
        raise SystemExit(1)
