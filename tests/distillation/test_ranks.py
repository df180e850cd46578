"""Two processes take the steps of one that accumulates."""

import json

import pytest
import torch

from tests.distillation.ranks import losses
from tests.launching import run_processes


# Where gradients are tiny AdamW takes their signs, and the total variation has many such: what
# float32 rounds otherwise is another step. So its sameness is seen in float64.
@pytest.mark.parametrize(
    ("divergence", "dtype", "tolerance"),
    [("forward_kl", "float32", 1e-5), ("next_token", "float32", 1e-5), ("tvd", "float64", 1e-9)],
)
def test_two_processes_take_the_steps_of_one_that_accumulates(
    divergence: str, dtype: str, tolerance: float
) -> None:
    outputs = run_processes("tests.distillation.ranks", divergence, dtype)
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second
    alone = losses(divergence, getattr(torch, dtype), accumulation=2)
    assert first["tokens"] == alone["tokens"]
    for name in ("losses", "alphas", "norms", "weights"):
        assert first[name] == pytest.approx(alone[name], rel=tolerance), name
    assert alone["losses"][-1] < alone["losses"][0]
