"""`python -m pipelines.benchmarks.gpu [PART ...]`: all that needs a GPU, in nine minutes on one.

`tests` are those marked gpu, `decoder` and `training` the two benchmarks as `bench_gpu` has them.
Each part is a process, killed with all that it started when its time is over. All numbers go to
`outputs/bench_gpu/gpu.json`, and one table of them to the screen. Exit code 1 where a part did not
come to a good end, 2 without a GPU. The benchmarks print tables of their own.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftkit.artifacts import read_json, write_json
from draftkit.models.devices import resolve_device

from ..configuration import CONF_DIR, compose_config
from ..product import MANIFEST, SUMMARY

SECONDS = 530.0  # of all parts together
LIMITS = {"tests": 160.0, "decoder": 280.0, "training": 150.0}  # of each, where so much is left
EXPERIMENT = "bench_gpu"
HEADLINES = (
    *("ratio_to_plain", "ratio_to_hf_plain", "ratio_to_hf_assisted", "prediction_error"),
    *("ratio_to_trl", "chunked_peak_fraction", "chunked_time_ratio"),
)
RANDOM = ("weight_bytes_per_second", "likely_speedup", "tokens_per_second", "peak_memory_bytes")


def command_of(part: str, root: Path) -> list[str]:
    """The command of a part, whose folder lies below `root`."""
    if part == "tests":
        return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    given = [f"+experiment={EXPERIMENT}", f"name={EXPERIMENT}_{part}", f"root={root}"]
    return [sys.executable, "-m", f"{__package__}.{part}", *given, "overwrite=true"]


def run_part(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a command for at most `seconds`: how it ended, and how long it took."""
    started, status = time.monotonic(), "complete"
    process = subprocess.Popen(command, cwd=CONF_DIR.parent, start_new_session=True)
    try:
        if code := process.wait(timeout=seconds):
            status = f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        status = "out of time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it has left behind
        process.wait()
    return {"status": status, "seconds": time.monotonic() - started}


def measure(parts: Sequence[str], root: Path) -> dict[str, dict[str, Any]]:
    """Run the parts, in order, as long as there is time; what is known is written at once."""
    started, results = time.monotonic(), {}
    for part in parts:
        seconds = min(LIMITS[part], SECONDS - (time.monotonic() - started))
        print(f"gpu: {part}, at most {seconds:.0f} s", flush=True)
        results[part] = run_part(command_of(part, root), seconds)
        if part != "tests" and results[part]["status"] == "complete":
            folder = root / f"{EXPERIMENT}_{part}" / "benchmark"
            results[part]["summary"] = read_json(folder / SUMMARY)
            results[part]["provenance"] = read_json(folder / MANIFEST)["provenance"]
        write_json(root / EXPERIMENT / "gpu.json", results)
    return results


def rows(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """What the table shows: how each part ended, and what it measured in a few numbers."""
    for part, result in results.items():
        yield part, f"{result['status']} in {result['seconds']:.0f} s"
        summary = result.get("summary", {})
        yield from ((f"  {key}", f"{summary[key]:.3f}") for key in HEADLINES if key in summary)
        for name, measured in summary.get("random", {}).items():
            for key in RANDOM:
                if key in measured:
                    yield f"  {name}: {key}", f"{measured[key]:.3g}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that are named, all by default, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="pipelines.benchmarks.gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(LIMITS))
    parts = parser.parse_args(arguments).parts or list(LIMITS)
    config = compose_config([f"+experiment={EXPERIMENT}"])
    try:
        if unknown := sorted(set(parts) - set(LIMITS)):
            raise ValueError(f"there is no part {unknown[0]}: {', '.join(LIMITS)}")
        resolve_device(config.hardware)
    except ValueError as error:
        print(f"gpu: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    results, table = measure(parts, Path(config.root).resolve()), Table.grid(padding=(0, 2))
    for name, value in rows(results):
        table.add_row(name, value)
    Console(width=100, highlight=False).print(table)
    if any(result["status"] != "complete" for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
