"""The dry run holds: under a real limit of memory, and beside what the run then takes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from draftkit.models.devices import CGROUP

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[1]
# Many rows make a batch of 1.5 GB beside a drafter of 7 MB.
LARGE = ["optim.per_device_train_batch_size=128", "optim.gradient_accumulation_steps=1"]
SHORT = ["optim.max_steps=4", "optim.eval_steps=4", "draft.shrink.steps=4", "evaluate.prompts=12"]
SHORT += ["evaluate.validation_prompts=6", "evaluate.timing_prompts=6", "decode.compile=false"]


@pytest.fixture
def group() -> Iterator[Callable[[int], Path]]:
    """Makes a control group with a limit in bytes; skips where this process must not."""
    made: list[Path] = []

    def limited(most: int) -> Path:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            root, limit = CGROUP, "memory.max"
            if "memory" in controllers.split(","):  # version 1
                root, limit = CGROUP / "memory", "memory.limit_in_bytes"
            parent = root / name.removeprefix("/")
            if not (parent / "cgroup.procs").exists():
                continue
            with suppress(OSError):
                made.append(parent / f"draftkit-{os.getpid()}-{len(made)}")
                made[-1].mkdir()
                (made[-1] / limit).write_text(str(most))
                return made[-1]
        pytest.skip("this process may not make control groups")

    yield limited
    for folder in filter(Path.exists, made):
        folder.rmdir()


def run(stage: str, root: Path, *options: str, group: Path | None = None) -> tuple[int, str]:
    """Exit status of a command in `group`, and what it printed."""
    given = ["+experiment=quickstart", f"root={root}", "tracker=none", "hardware.threads=1"]
    command = [sys.executable, "-m", f"pipelines.{stage}", *given, *LARGE, *SHORT, *options]

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, preexec_fn=enter
    )
    return done.returncode, done.stdout + done.stderr


def test_what_is_refused_fails_and_what_is_allowed_runs(
    tmp_path: Path, group: Callable[[int], Path]
) -> None:
    code, shown = run("check", tmp_path)
    assert code == 0, shown
    needed = float(re.search(r"fits: ([\d.]+) GB of", shown)[1]) * 1e9
    assert needed > 1.2e9
    for most, fits in ((0.7 * needed, False), (1.3 * needed, True)):
        code, shown = run("check", tmp_path, group=group(int(most)))  # or the system ends it
        assert (code == 0) == fits, shown
        code, shown = run("distill", tmp_path / str(fits), group=group(int(most)))
        assert (code == 0) == fits, shown


def seconds_of(text: str) -> float:
    """Of `1 min 5 s` and `4.5 s`."""
    minutes, rest = re.search(r"(?:(\d+) min )?([\d.]+) s", text).groups()
    return 60 * int(minutes or 0) + float(rest)


def test_the_dry_run_says_what_the_run_then_takes(tmp_path: Path) -> None:
    """Of a plain drafter: the masks of a parallel one are drawn, and leave gaps in the heap."""
    given = ["+experiment=quickstart", f"root={tmp_path}", "tracker=none", "hardware.threads=1"]
    given += ["draft.kind=plain", "decode.gamma=1"]

    def launched(*options: str) -> str:
        command = [sys.executable, "-m", "pipelines.distill", *given, *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = launched("limit=3")
    launched()
    for stage in ("train", "evaluate"):
        line = re.search(rf"dry run of {stage}\n  ([\d.]+) GB, .*: (.*) s for all", shown)
        summary = read_json(tmp_path / "quickstart" / stage / "summary.json")
        assert 1 / 1.5 < seconds_of(f"{line[2]} s") / summary["seconds"] < 1.5
        if "peak_memory_bytes" in summary:
            assert float(line[1]) == pytest.approx(summary["peak_memory_bytes"] / 1e9, rel=0.2)
