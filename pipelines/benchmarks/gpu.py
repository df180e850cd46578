"""`python -m pipelines.benchmarks.gpu [PART ...]`: all that needs a GPU, in nine minutes on one.

`tests` are those marked gpu, `decoder` and `training` the two benchmarks as `bench_gpu` has them.
Each part is a process, killed with all that it started when its time is over. All numbers go to
`outputs/bench_gpu/gpu.json`. Exit code 1 where a part did not come to a good end, 2 without a GPU.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def command_of(part: str, root: Path) -> list[str]:
    """The command of a part, whose folder lies below `root`."""
    if part == "tests":
        return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    given = [f"+experiment={EXPERIMENT}", f"name={EXPERIMENT}_{part}", f"root={root}"]
    return [sys.executable, "-m", f"{__package__}.{part}", *given, "overwrite=true"]


def run_part(command: Sequence[str], seconds: float) -> str:
    """Run a command for at most `seconds`; how it ended."""
    process = subprocess.Popen(command, cwd=CONF_DIR.parent, start_new_session=True)
    try:
        code = process.wait(timeout=seconds)
        return f"failed with exit code {code}" if code else "complete"
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and whatever it has left behind
        process.wait()


def measure(parts: Sequence[str], root: Path) -> dict[str, dict[str, Any]]:
    """Run the parts, in order, as long as there is time; what is known is written at once."""
    started, results = time.monotonic(), dict[str, dict[str, Any]]()
    for part in parts:
        begun = time.monotonic()
        seconds = min(LIMITS[part], SECONDS - (begun - started))
        print(f"gpu: {part}, at most {seconds:.0f} s", flush=True)
        status, folder = run_part(command_of(part, root), seconds), root / f"{EXPERIMENT}_{part}"
        results[part] = {"status": status, "seconds": time.monotonic() - begun}
        if part != "tests" and status == "complete":
            results[part]["summary"] = read_json(folder / "benchmark" / SUMMARY)
            manifest = read_json(folder / "benchmark" / MANIFEST)
            results[part]["provenance"] = manifest["provenance"]
        write_json(root / EXPERIMENT / "gpu.json", results)
    return results


def main(parts: Sequence[str]) -> None:
    """Run the parts that are named, all by default, and print how each ended, and its numbers."""
    config = compose_config([f"+experiment={EXPERIMENT}"])
    try:
        if unknown := sorted(set(parts) - set(LIMITS)):
            raise ValueError(f"there is no part {unknown[0]}: {', '.join(LIMITS)}")
        resolve_device(config.hardware)
    except ValueError as error:
        print(f"gpu: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    results = measure(parts or [*LIMITS], Path(config.root).resolve())
    for part, result in results.items():
        print(f"{part}: {result['status']} in {result['seconds']:.0f} s")
        for key in HEADLINES:
            if key in (summary := result.get("summary", {})):
                print(f"  {key:<22}{summary[key]:.3f}")
    if any(result["status"] != "complete" for result in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
