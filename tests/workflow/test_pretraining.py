"""A small model trained from scratch learns its text, is saved whole and leaves nothing beside."""

from dataclasses import replace
from pathlib import Path

from draftkit.config import Config, HardwareConfig, ModelConfig, PretrainConfig
from draftkit.data.prompts import Example
from draftkit.models.loading import load_target
from draftkit.tracking import Tracker, read_metrics
from draftkit.workflow.pretraining import pretrain
from tests import tiny


def test_a_model_learns_and_is_saved_whole(tmp_path: Path) -> None:
    shape = PretrainConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        max_steps=30,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
    )
    hardware = HardwareConfig(device="cpu", dtype="float32")
    config = Config(hardware=hardware, target=ModelConfig(pretrain=shape))
    texts = [Example([1, 2, 3, 4] * 4, [True] * 16, "", "")] * 8
    pretrain(
        "target",
        config,
        tokenizer=tiny.byte_tokenizer(),
        texts=texts,
        folder=tmp_path,
        tracker=Tracker(tmp_path),
        note=lambda line: None,
    )
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]
    assert not (tmp_path / "target-training").exists()
    path = replace(config.target, path=str(tmp_path / "target"))
    model = load_target(path, hardware).adapter.model
    assert model.config.num_hidden_layers == 1
