"""Two processes take the steps of one that accumulates."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distillation.ranks import losses

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def of_two_processes(divergence: str, dtype: str) -> list[dict]:
    """What each of two processes found."""
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    common |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distillation.ranks", divergence, dtype]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


# Where gradients are tiny AdamW takes their signs, and the total variation has many such: what
# float32 rounds otherwise is another step. So its sameness is seen in float64.
@pytest.mark.parametrize(
    ("divergence", "dtype", "tolerance"),
    [("forward_kl", "float32", 1e-5), ("next_token", "float32", 1e-5), ("tvd", "float64", 1e-9)],
)
def test_two_processes_take_the_steps_of_one_that_accumulates(
    divergence: str, dtype: str, tolerance: float
) -> None:
    first, second = of_two_processes(divergence, dtype)
    assert first == second
    alone = losses(divergence, getattr(torch, dtype), accumulation=2)
    assert first["tokens"] == alone["tokens"]
    for name in ("losses", "alphas", "norms", "weights"):
        assert first[name] == pytest.approx(alone[name], rel=tolerance), name
    assert alone["losses"][-1] < alone["losses"][0]
