"""The command's side of `benchmark.subject=gpu`: parts one after the other, and their report.

Each has its limit, so that all end within `gpu.seconds`; what one leaves, the next may use. The
report is written anew after every part, so that a kill of the command costs the part under way.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftkit.artifacts import fingerprint, read_json, sha256_file, write_text
from draftkit.config import Config
from draftkit.models.devices import resolve_device
from pipelines.benchmarks.gpu import processes
from pipelines.benchmarks.gpu.part import FOLDER, result_path
from pipelines.benchmarks.gpu.report import report
from pipelines.configuration import CONF_DIR
from pipelines.plan import MANIFEST, Given, StageFolder

ROOT = CONF_DIR.parent
CODE, SUFFIXES = ("conf", "draftkit", "pipelines", "tests"), (".py", ".yaml")
REPORT = "report.md"
ALL_SECONDS = 520.0  # for all; seconds below are shares of it where `gpu.seconds` differs
LEAST_SECONDS = 10.0  # with less no part is begun
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


@dataclass(frozen=True)
class Plan:
    """What a part is called, and the seconds that are kept for it until its turn comes."""

    title: str
    seconds: float
    most: float  # of what the parts before it have left


PLANS = {
    "a": Plan("ceilings and versions", 20, 60),
    "b": Plan("tests on the GPU", 115, 240),
    "c": Plan("decoder, acceptance given", 165, 300),
    "d": Plan("a trained pair", 185, 300),
    "e": Plan("distillation at a vocabulary of 152k", 35, 90),
    "f": Plan("server under load", 0, 180),
}


def needs(config: Config) -> dict[str, Given]:
    """What a report is of: the code, the parts, and whether it is a rehearsal.

    Other code is no other experiment: what is measured of it takes the place of what was. Raises
    ValueError where there is no GPU.
    """
    if not config.gpu.rehearse:
        try:
            resolve_device(config.hardware)
        except ValueError as error:
            raise ValueError(f"{error}; gpu.rehearse=true runs all parts on a CPU, small") from None
    return {"code": Given(code_sha256()), "gpu": Given(fingerprint(asdict(config.gpu)))}


def code_sha256() -> str:
    """Of all that is run."""
    files = (file for name in CODE for file in sorted((ROOT / name).rglob("*")))
    sums = {str(f.relative_to(ROOT)): sha256_file(f) for f in files if f.suffix in SUFFIXES}
    return fingerprint(sums)


def command_of(letter: str, folder: Path, seconds: float) -> list[str]:
    """The process of a part."""
    module = [sys.executable, "-m", "pipelines.benchmarks.gpu.part"]
    return [*module, letter, str(folder), f"{seconds:.2f}"]


def environment_of(config: Config) -> dict[str, str]:
    """That of a part: our own, so that the code of this folder is found, and `ENVIRONMENT`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    return found | (REHEARSAL if config.gpu.rehearse else {})


def measure(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run the parts; the summary holds all that they have measured, and what became of them."""
    path, environment = folder.path.resolve(), environment_of(config)
    (path / FOLDER).mkdir(exist_ok=True)
    origin = read_json(path / MANIFEST)["provenance"]
    summary: dict[str, Any] = {"rehearsal": config.gpu.rehearse, "all_well": True, "parts": {}}
    left, share = config.gpu.seconds, config.gpu.seconds / ALL_SECONDS
    for place, letter in enumerate(config.gpu.parts):
        plan = PLANS[letter]
        kept = sum(PLANS[later].seconds for later in config.gpu.parts[place + 1 :])
        limit = min(plan.most * share, left - kept * share)
        part = run_part(letter, path, limit, share, environment)
        left -= part["seconds"]
        summary["parts"][letter] = {"title": plan.title} | part
        summary["all_well"] &= part["status"] in ("complete", "skipped")
        folder.note(f"part {letter} ({plan.title}): {part['status']}, {part['seconds']:.0f} s")
        write_text(path / REPORT, report(summary, origin))
    return summary


def run_part(
    letter: str, folder: Path, limit: float, share: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run one part for at most `limit` seconds; what became of it, and the steps it wrote."""
    result_path(folder, letter).unlink(missing_ok=True)
    if limit < LEAST_SECONDS * share:
        reason = f"{max(limit, 0.0):.0f} s were left of gpu.seconds"
        return {"status": "skipped", "reason": reason, "seconds": 0.0, "limit": limit, "steps": {}}
    ended = processes.run(
        command_of(letter, folder, limit),
        log=folder / FOLDER / f"{letter}.log",
        seconds=limit,
        environment=environment,
    )
    steps: dict[str, Any] = {}
    if (result := result_path(folder, letter)).exists():
        steps = read_json(result)
    return {
        "status": ended.status,
        "exit_code": ended.exit_code,
        "seconds": ended.seconds,
        "limit": limit,
        "steps": steps,
        "output": "" if ended.status == "complete" else ended.output,
    }


def show(summary: dict[str, Any], folder: Path) -> None:
    """Print the report. Ends with exit code 1 where a part did not come to its end."""
    print((folder / REPORT).read_text(encoding="utf-8"))
    print(f"benchmark: {folder / REPORT} and {folder / 'summary.json'}", flush=True)
    if not summary["all_well"]:
        bad = [
            letter
            for letter, part in summary["parts"].items()
            if part["status"] not in ("complete", "skipped")
        ]
        print(f"benchmark: not all is well: part {', '.join(bad)}", file=sys.stderr, flush=True)
        raise SystemExit(1)
