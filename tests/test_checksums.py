"""A checksum changes with what it stands for, and with nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import pipelines.product
from draftkit.config import Config, DataConfig, TargetConfig
from draftkit.models.files import KEPT_IDS
from draftkit.models.loading import save_model
from draftkit.tracking import Tracker
from pipelines.product import address_of_model, address_of_text
from pipelines.stage import StageFolder
from tests import tiny


def test_a_file_is_its_content(tmp_path: Path) -> None:
    path, root = tmp_path / "rows.jsonl", str(tmp_path / "outputs")
    path.write_text("{}")
    data = DataConfig(name="local", path=str(path))
    before = address_of_text(data, root)
    path.touch()
    assert address_of_text(data, root) == before
    path.write_text("{ }")
    assert address_of_text(data, root) != before


def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, root = tmp_path / "rows.jsonl", str(tmp_path / "outputs")
    path.write_text("{}")
    data = DataConfig(name="local", path=str(path))
    before = address_of_text(data, root)
    monkeypatch.setattr(pipelines.product, "sha256_file", lambda path: "read again")
    assert address_of_text(data, root) == before
    memory = tmp_path / "outputs" / "shared" / "checksums.json"
    for content in ("", "[]", "{"):  # deleted, or damaged: then it is read
        memory.write_text(content)
        assert address_of_text(data, root) == "read again"
    path.write_text("{ }")
    assert address_of_text(data, root) == "read again"


def test_a_model_of_the_hub_is_that_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache as the hub's client lays it out; nothing is fetched."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--maker--model"
    for name, commit in (("main", "a" * 40), ("old", "b" * 40)):
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text('{"model_type": "llama"}')
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / name).write_text(commit)
    for revision, commit in ((None, "a" * 40), ("old", "b" * 40)):
        target = TargetConfig(path="maker/model", revision=revision)
        address = address_of_model(target, str(tmp_path))
        assert address == f"maker/model@{commit}"
        folder = StageFolder(Path(), Tracker(None), digests={"target": address})
        assert folder.model(Config(target=target), "target").revision == commit
    way_out = "`hf download maker/model --revision unknown --local-dir FOLDER`"
    with pytest.raises(ValueError, match=way_out):
        address_of_model(TargetConfig(path="maker/model", revision="unknown"), str(tmp_path))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, as `hf download --local-dir` leaves it."""
    folder = tmp_path / "model"
    save_model(tiny.model(), tiny.byte_tokenizer(), folder)
    (folder / KEPT_IDS).write_text(json.dumps([*range(tiny.VOCAB_SIZE - 2)]))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_own.py").write_text("")
    (folder / ".cache" / "huggingface" / "download").mkdir(parents=True)
    return folder


def address(model: Path, **options: Any) -> str:
    root = str(model.parent / "outputs")
    return address_of_model(TargetConfig(path=str(model), **options), root)


def test_every_file_that_loading_reads_is_part_of_a_model(model: Path) -> None:
    read = ["config.json", "generation_config.json", "model.safetensors", "kept_ids.json"]
    read += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    seen = {address(model, trust_remote_code=True)}
    for name in [*read, "modeling_own.py"]:
        with (model / name).open("ab") as file:
            file.write(b" ")
        if name == "config.json":  # which must stay one of a model
            assert address(model) not in seen
        seen.add(address(model, trust_remote_code=True))
    assert len(seen) == len(read) + 2
