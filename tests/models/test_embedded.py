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
from draftkit.evaluation.compression import TextScore, score_texts
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


def scores(target: Target, documents: list[Document], windows: int) -> dict[str, TextScore]:
    reader = RowReader(target.tokenizer, DataConfig(max_length=256))
    by_domain: dict[str, list] = {}
    for document, examples in reader.read(documents):
        by_domain.setdefault(document.domain, []).extend(examples)
    some = [example for examples in by_domain.values() for example in examples[:windows]]
    return score_texts(target.adapter, target.tokenizer, some, batch_size=16)


def test_it_has_learned_its_text(target: Target) -> None:
    documents = held_out(DataConfig())
    for domain, score in scores(target, documents, windows=6).items():
        assert score.bits_per_byte < 2, domain
        assert score.argmax_probability > 0.35, domain
