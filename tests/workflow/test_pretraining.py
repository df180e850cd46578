"""In a distributed launch one process trains a model that all then read."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from draftkit.config import ModelConfig, PretrainConfig
from draftkit.data.prompts import Example
from draftkit.distillation.ranks import agree
from draftkit.models.loading import load_target
from draftkit.tracking import Tracker, read_metrics
from draftkit.workflow.pretraining import pretrain
from tests import tiny
from tests.launching import fork_ranks
from tests.workflow.making import CONFIG

SHAPE = PretrainConfig(
    num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=32, max_steps=6
)


def make(folder: Path) -> None:
    prompts = tiny.prompts([12] * 16)
    pretrain(
        "target",
        replace(CONFIG, target=ModelConfig(pretrain=SHAPE)),
        tokenizer=tiny.byte_tokenizer(),
        texts=[Example(ids, [False] + [True] * (len(ids) - 1), "", "") for ids in prompts],
        folder=folder,
        tracker=Tracker(folder),
        note=lambda line: None,
    )


def read_by_all(folder: Path) -> list[float]:
    """What each of two processes reads of the model that the first has trained."""
    first = os.environ["RANK"] == "0"
    if first:
        make(folder)
    agree("it is there")
    target = load_target(ModelConfig(path=str(folder / "target")), CONFIG.hardware)
    return [float(weight.sum()) for weight in target.adapter.model.parameters()]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_one_of_two_processes_trains_what_both_read(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    make(tmp_path / "alone")
    first, second = fork_ranks(read_by_all, tmp_path)
    assert first == second
    losses = [
        [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]
        for folder in (tmp_path, tmp_path / "alone")
    ]
    assert losses[0] == losses[1]
    assert not list(tmp_path.rglob("*-training"))
