"""A drafter is new or cut out of the target; either is trained for as long as it is to be."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from draftkit.config import Config, HardwareConfig, ModelConfig, PretrainConfig
from draftkit.config.text import ShrinkConfig
from draftkit.data.prompts import Example
from draftkit.distillation.drafting import make_draft
from draftkit.models.loading import load_model, new_llama, save_model
from draftkit.tracking import Tracker, read_metrics
from tests import tiny

SHAPE = PretrainConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    max_position_embeddings=64,
    per_device_train_batch_size=2,
    max_steps=4,
)
TEXT = Example([1, 2, 3, 4] * 4, [True] * 16, "", "")
CPU = torch.device("cpu")


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    tokenizer = tiny.byte_tokenizer()
    save_model(new_llama(SHAPE, tokenizer, seed=0, device=CPU), tokenizer, tmp_path / "target")
    return ModelConfig(path=str(tmp_path / "target"))


def made(target: ModelConfig, folder: Path, **draft: object) -> tuple[PreTrainedModel, int]:
    """The drafter of section `draft`, and how many steps it was trained for."""
    folder.mkdir()
    section = replace(ModelConfig(pretrain=replace(SHAPE, num_hidden_layers=1)), **draft)
    make_draft(
        Config(hardware=HardwareConfig(device="cpu", dtype="float32"), draft=section),
        target,
        tokenizer=tiny.byte_tokenizer(),
        texts=[TEXT] * 8,
        held_out=[TEXT],
        length=64,
        folder=folder,
        tracker=Tracker(folder),
        note=lambda line: None,
    )
    lines = read_metrics(folder / "metrics.jsonl")
    path = ModelConfig(path=str(folder / "draft"))
    model = load_model(path, "draft", dtype=torch.float32, device=CPU)
    return model, lines[-1]["step"] if lines else 0


def test_a_drafter_is_new_or_cut_and_trained_as_long_as_it_is_to_be(
    target: ModelConfig, tmp_path: Path
) -> None:
    whole = load_model(target, "target", dtype=torch.float32, device=CPU)
    new, steps = made(target, tmp_path / "new")
    assert (new.config.num_hidden_layers, steps) == (1, 4)
    cut, steps = made(target, tmp_path / "cut", shrink=ShrinkConfig(layers=[0, 2]))
    assert (cut.config.num_hidden_layers, steps) == (2, 0)
    for name, weight in cut.named_parameters():
        same = whole.get_parameter(name.replace("layers.1.", "layers.2."))
        assert torch.equal(weight, same), name
    trained, steps = made(target, tmp_path / "trained", shrink=ShrinkConfig(layers=[0], steps=3))
    assert (trained.config.num_hidden_layers, steps) == (1, 3)
    assert not torch.equal(
        trained.get_input_embeddings().weight, whole.get_input_embeddings().weight
    )
