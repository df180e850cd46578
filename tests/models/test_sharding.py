"""A model in parts scores as a whole one, and each process holds its part."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from draftkit.artifacts import read_json
from draftkit.config import HardwareConfig, TargetConfig
from draftkit.models.loading import save_model
from draftkit.models.sharding import load_sharded_target
from tests import tiny
from tests.launching import fork_ranks, run_processes
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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight layers of 31 MB each in float32, as it is stored."""
    folder = tmp_path_factory.mktemp("wide")
    model = tiny.model(num_hidden_layers=8, intermediate_size=40_000)
    save_model(model, tiny.byte_tokenizer(), folder)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
def test_a_process_never_holds_more_than_its_part_and_a_layer(wide: Path, dtype: str) -> None:
    """As it is stored, and converted: half of the layers, and one of eight while it is split."""
    run_processes("tests.models.sharded", str(wide), dtype, count=1)
    for rank in read_json(wide / "ranks.json"):
        assert rank["itemsize"] == getattr(torch, dtype).itemsize
        assert rank["size"] > 60e6 * rank["itemsize"]
        assert 0.4 < rank["held"] < 0.6
        assert rank["peak"] < 0.5 + 1 / 8 + 0.1
        assert rank["difference"] < (1e-5 if dtype == "float32" else 0.05)


def test_one_process_alone_shares_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^hardware\.shard_target: there is no second process"):
        load_sharded_target(TargetConfig(path=str(tmp_path)), HardwareConfig(device="cpu"))
