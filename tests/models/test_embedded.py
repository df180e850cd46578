"""The target that comes with the package: it loads from anywhere, and is small."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import draftkit
from draftkit.config import HardwareConfig, TargetConfig
from draftkit.config.text import EMBEDDED
from draftkit.models.loading import load_target

FOLDER = Path(draftkit.__file__).parent / "embedded"
MODEL = TargetConfig(path=EMBEDDED)
HARDWARE = HardwareConfig(device="cpu", dtype="float32")
MOST_BYTES = 16e6


def test_it_loads_from_any_folder_and_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = load_target(MODEL, HARDWARE).tokenizer
    assert len(tokenizer) >= 4096
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < MOST_BYTES + 1e6
    assert os.path.getsize(FOLDER / "model.safetensors") < MOST_BYTES
    with safe_open(FOLDER / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
