"""A model in parts scores as a whole one, and each process holds its part."""

from typing import Any

import pytest

from draftkit.models.sharding import shard_layers
from tests import tiny
from tests.launching import fork_ranks
from tests.models.sharded import measured

ARCHITECTURES = ["llama", "gpt2"]


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    """What each of two processes found of each architecture."""
    return fork_ranks(measured, ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_processes_hold_half_of_the_layers_each_and_score_the_same(
    ranks: list[list[dict[str, Any]]], architecture: str
) -> None:
    for found in ranks:
        mine = found[ARCHITECTURES.index(architecture)]
        assert mine["difference"] < 1e-5
        assert mine["share"] == pytest.approx(0.5, abs=0.02)
        assert mine["roots"] == 0  # of the layers: what is above them sees all of them


def test_one_process_has_nobody_to_share_with() -> None:
    with pytest.raises(ValueError, match=r"^hardware\.shard_target: there is one process"):
        shard_layers(tiny.model())
