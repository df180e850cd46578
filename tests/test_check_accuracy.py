"""What `check` predicts of memory and time beside what the commands then take."""

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from draftkit.checking.shapes import DEMANDS
from pipelines.check import goal_of, probed
from pipelines.configuration import compose_config
from pipelines.plan import pending
from pipelines.texts import texts
from tests.launching import ROOT

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]

IMPORTS = "import pipelines.distill, torch; torch.ones(3)"
JUDGED = ["target.path=draftkit/embedded", "data=installed", "data.max_length=128"]
JUDGED += ["evaluate.max_new_tokens=64", "decode.compile=false"]


def taken(*words: str) -> tuple[float, float]:
    """Bytes of memory at most, and seconds of processors, of a Python process."""
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def predicted(words: list[str]) -> tuple[float, float]:
    """The same above the imports, as `check` has it, the medians of three."""
    config = compose_config(words)
    texts.ensure(config)
    names = [step.name for step in pending([goal_of(config)]) if step.name in DEMANDS]
    memory, seconds = [], []
    for _ in range(3):
        begun, steps, failure = probed(config, [*dict.fromkeys(names)])
        assert not failure
        memory.append(max(step["peak"] for step in steps.values()) - begun["baseline"])
        seconds.append(begun["start"] + sum(step["processor"] for step in steps.values()))
    return median(memory), median(seconds)


def test_memory_within_a_fifth_and_time_within_a_half(tmp_path: Path) -> None:
    """Of training with its evaluation, then of the evaluation of what it made, on two cores."""
    libraries, _ = taken("-c", IMPORTS)
    common = [f"root={tmp_path}", "tracker=none"]
    drafter = tmp_path / "quickstart" / "distill" / "draft"
    for stage, words in {
        "distill": ["+experiment=quickstart"],
        "evaluate": ["+experiment=evaluate_pair", f"draft.path={drafter}", *JUDGED],
    }.items():
        memory, seconds = predicted([*words, *common])
        peak, processor = taken("-m", f"pipelines.{stage}", *words, *common)
        assert memory == pytest.approx(peak - libraries, rel=0.2), stage
        assert processor / 1.5 < seconds < processor * 1.5, stage
