"""Two processes take the steps of one that accumulates."""

import json
from typing import Any

import pytest
import torch

from tests.distillation.ranks import losses
from tests.launching import run_processes

# Where gradients are tiny AdamW takes their signs, and the total variation has many such: what
# float32 rounds otherwise is another step. So its sameness is seen in float64.
RUNS = [("forward_kl", "float32", 1e-5), ("next_token", "float32", 1e-5), ("tvd", "float64", 1e-9)]


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    """What each of two processes found in each run: started once, as that takes long."""
    outputs = run_processes("tests.distillation.ranks", *(part for run in RUNS for part in run[:2]))
    return [[json.loads(line) for line in output.splitlines()[-len(RUNS) :]] for output in outputs]


@pytest.mark.parametrize("place", range(len(RUNS)), ids=[run[0] for run in RUNS])
def test_two_processes_take_the_steps_of_one_that_accumulates(
    ranks: list[list[dict[str, Any]]], place: int
) -> None:
    divergence, dtype, tolerance = RUNS[place]
    first, second = (found[place] for found in ranks)
    assert first == second
    alone = losses(divergence, getattr(torch, dtype), accumulation=2)
    assert first["tokens"] == alone["tokens"]
    for name in ("losses", "alphas", "norms", "weights"):
        assert first[name] == pytest.approx(alone[name], rel=tolerance), name
    assert alone["losses"][-1] < alone["losses"][0]
