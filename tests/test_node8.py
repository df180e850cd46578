"""The configuration for a node of eight accelerators, tried with eight processes on the CPU."""

from pathlib import Path
from typing import Any

import pytest

from draftkit.tracking import read_metrics
from pipelines.configuration import compose_config
from pipelines.plan import TRAIN
from pipelines.stage import ensure
from tests.launching import run_processes

RANKS = 8
STEPS = ["optim.max_steps=3", "optim.eval_steps=3", "optim.logging_steps=1", "optim.save_steps=3"]
EXACT = ["hardware.device=cpu", "hardware.dtype=float32", "divergence=forward_kl"]


def overrides(root: Path, name: str, *, rows: int, accumulation: int) -> list[str]:
    """A short run whose steps see `rows` x `accumulation` rows a process."""
    batch = [
        f"optim.per_device_train_batch_size={rows}",
        f"optim.gradient_accumulation_steps={accumulation}",
    ]
    given = ["+experiment=smoke", f"root={root}", f"name={name}", "tracker=none"]
    return [*given, "decode.compile=false", *EXACT, *STEPS, *batch]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["section"] == "train"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    return lines


@pytest.mark.soak
def test_eight_processes_train_as_one_that_accumulates(tmp_path: Path) -> None:
    """Sharded target, each process its rows of the draft's own texts, the same losses."""
    alone = compose_config(overrides(tmp_path, "alone", rows=2, accumulation=RANKS))
    expected = steps_of(ensure(TRAIN, alone))
    node = overrides(tmp_path, "node", rows=2, accumulation=1)
    run_processes("pipelines.distill", "hardware=node8", *node, count=RANKS, seconds=500)
    found = steps_of(tmp_path / "node" / "train")
    for mine, other in zip(found, expected, strict=True):
        assert mine["total_tokens"] == other["total_tokens"]
        for name in ("loss", "alpha", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=1e-4), name
    assert (tmp_path / "node" / "distill" / "summary.json").exists()
