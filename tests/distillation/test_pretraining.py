"""A small model trained from scratch learns its text, is saved whole and leaves nothing beside."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftkit.config import Config, HardwareConfig, ModelConfig, PretrainConfig
from draftkit.data.prompts import Example
from draftkit.distillation.pretraining import full_rows, pretrain
from draftkit.distillation.ranks import agree
from draftkit.models.loading import load_target
from draftkit.models.shrink import KEPT_IDS, read_kept_ids
from draftkit.tracking import Tracker, read_metrics
from tests import tiny
from tests.launching import fork_ranks

SHAPE = PretrainConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
    max_steps=30,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
)
CONFIG = Config(
    hardware=HardwareConfig(device="cpu", dtype="float32"), target=ModelConfig(pretrain=SHAPE)
)


def make(folder: Path, kept_ids: Tensor | None = None) -> list[float]:
    """Train the target in `folder`; its losses."""
    pretrain(
        "target",
        CONFIG,
        tokenizer=tiny.byte_tokenizer(),
        texts=[Example([1, 2, 3, 4] * 4, [True] * 16, "", "")] * 8,
        length=64,
        folder=folder,
        tracker=Tracker(folder),
        note=lambda line: None,
        kept_ids=kept_ids,
    )
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl")]


def weights(folder: Path) -> list[float]:
    """A number of each weight of the trained target."""
    path = replace(CONFIG.target, path=str(folder / "target"))
    model = load_target(path, CONFIG.hardware).adapter.model
    assert model.config.num_hidden_layers == 1
    return [float(weight.sum()) for weight in model.parameters()]


def read_by_all(folder: Path) -> list[float]:
    """What each of two processes reads of the model that the first has trained."""
    if os.environ["RANK"] == "0":
        make(folder)
    agree("it is there")
    return weights(folder)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_model_learns_and_is_saved_whole_by_one_of_several_processes(tmp_path: Path) -> None:
    alone, launched = tmp_path / "alone", tmp_path / "launched"
    alone.mkdir()
    launched.mkdir()
    losses = make(alone)
    assert losses[-1] < 0.5 * losses[0]
    assert not (alone / "target-training").exists()
    assert fork_ranks(read_by_all, launched) == 2 * [pytest.approx(weights(alone), rel=1e-3)]


def example(ids: list[int]) -> Example:
    return Example(ids, [True] * len(ids), "", "")


def test_rows_are_full_and_long_texts_stay_whole() -> None:
    texts = [[1, 2], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13], [14, 15]]
    rows = full_rows([example(ids) for ids in texts], length=4)
    assert rows.tolist() == [[3, 4, 5, 6], [10, 11, 12, 13], [1, 2, 7, 8]]  # 9, 14, 15 fill none
    assert full_rows([example([1, 2])], length=4).tolist() == [[1, 2]]


def test_what_a_draft_cannot_propose_it_is_not_taught(tmp_path: Path) -> None:
    """Its loss would be infinite; the rest of the text is learned."""
    kept = torch.tensor([1, 2, 4])
    make(tmp_path, kept_ids=kept)
    assert read_kept_ids(tmp_path / "target" / KEPT_IDS, 300).tolist() == kept.tolist()
    assert all(math.isfinite(line["loss"]) for line in read_metrics(tmp_path / "metrics.jsonl"))
