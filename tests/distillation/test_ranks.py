"""Two processes take the steps of one that accumulates, and agree where they could differ."""

from typing import Any

import pytest
import torch

from draftkit.distillation.ranks import agree
from tests.distillation.ranks import losses, measured
from tests.launching import fork_ranks

# Where gradients are tiny AdamW takes their signs, and the total variation has many such: what
# float32 rounds otherwise is another step. So its sameness is seen in float64.
RUNS = [("forward_kl", "float32", 1e-5), ("next_token", "float32", 1e-5), ("tvd", "float64", 1e-9)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """What each of two processes found in each run, and last what they could disagree about."""
    return fork_ranks(measured, tmp_path_factory.mktemp("ranks"), RUNS)


def of_both(ranks: list[list[dict[str, Any]]], name: str) -> tuple[Any, Any]:
    first, second = (found[-1][name] for found in ranks)
    return first, second


def test_each_process_and_each_step_has_a_dropout_mask_of_its_own_that_is_repeated(
    ranks: list[list[dict[str, Any]]],
) -> None:
    (first, again), (second, _) = of_both(ranks, "masks")
    assert first == again
    assert len({str(mask) for mask in (*first, *second)}) == 4
    assert all(0.8 < sum(mask) / len(mask) < 1 for mask in (*first, *second))


def test_a_gradient_that_one_process_spoils_is_refused_by_all(
    ranks: list[list[dict[str, Any]]],
) -> None:
    for said, stays in of_both(ranks, "refused"):
        assert said == ("the norm of the gradient became nan at step 0: lower optim.learning_rate")
        assert stays


def test_all_processes_keep_the_weights_that_the_first_finds_best(
    ranks: list[list[dict[str, Any]]],
) -> None:
    first, second = of_both(ranks, "best")
    assert first == second
    assert first[:2] == (2, 0.7)


def test_all_processes_take_the_value_of_the_first_and_one_its_own(
    ranks: list[list[dict[str, Any]]],
) -> None:
    assert of_both(ranks, "agreed") == (0, 0)
    assert agree("mine") == "mine"


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
