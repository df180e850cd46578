"""The target that comes with the package: it loads from anywhere, is small, and has learned."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import draftkit
from draftkit.config import DataConfig, HardwareConfig, TargetConfig
from draftkit.config.text import EMBEDDED
from draftkit.data.corpora import Document, read_documents
from draftkit.data.prompts import RowReader
from draftkit.models.loading import Target, load_target

FOLDER = Path(draftkit.__file__).parent / "embedded"
MODEL = TargetConfig(path=EMBEDDED)
HARDWARE = HardwareConfig(device="cpu", dtype="float32")
MOST_BYTES = 16e6


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(MODEL, HARDWARE)


def held_out(data: DataConfig) -> list[Document]:
    tested = [document for document in read_documents(data) if document.split == "test"]
    return sorted(tested, key=lambda document: document.key)


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


@torch.inference_mode()
def test_it_has_learned_its_text(target: Target) -> None:
    """In every domain it needs less than 2 bits a byte, and is sure of a third of the tokens."""
    reader = RowReader(target.tokenizer, DataConfig(max_length=256))
    windows: dict[str, list[list[int]]] = {}
    for document, examples in reader.read(held_out(DataConfig())):
        windows.setdefault(document.domain, []).extend(one.token_ids for one in examples)
    for domain, texts in windows.items():
        bits, size, sure = 0.0, 0, []
        for ids in texts[:6]:
            keep = torch.arange(len(ids)) < len(ids) - 1
            p = target.adapter.score(torch.tensor([ids]), keep[None]).double().softmax(-1)
            bits -= float(p[range(len(ids) - 1), ids[1:]].log2().sum())
            size += len(str(target.tokenizer.decode(ids[1:], skip_special_tokens=True)).encode())
            sure.append(p.max(-1).values)
        assert bits / size < 2, domain
        assert torch.cat(sure).mean() > 0.35, domain
