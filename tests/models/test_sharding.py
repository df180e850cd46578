"""A model in parts scores as a whole one, and each process holds its part."""

import json

import pytest

from draftkit.models.sharding import shard_layers
from tests import tiny
from tests.launching import run_processes


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_two_processes_hold_half_of_the_layers_each_and_score_the_same(architecture: str) -> None:
    for output in run_processes("tests.models.sharded", architecture):
        found = json.loads(output.splitlines()[-1])
        assert found["difference"] < 1e-5
        assert found["share"] == pytest.approx(0.5, abs=0.02)


def test_one_process_has_nobody_to_share_with() -> None:
    with pytest.raises(ValueError, match=r"^hardware\.shard_target: there is one process"):
        shard_layers(tiny.model())
