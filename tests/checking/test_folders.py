"""What is read of a model's folder, and of a drafter that is yet to be made."""

from pathlib import Path

import pytest

from draftkit.checking.folders import read_folder, read_pair
from draftkit.config import ModelConfig
from pipelines.configuration import compose_config
from tests.checking.faults import save_good


def test_headers_are_read_and_no_weights(tmp_path: Path) -> None:
    save_good(tmp_path)
    one = read_folder(ModelConfig(path=str(tmp_path / "draft")), "draft")
    assert one.tensors is not None
    assert one.tensors["lm_head.weight"] == (258, 64)
    assert one.rows_of("embed_tokens.weight") == one.rows == 258
    assert one.rows_of("wte.weight") is None
    assert (one.heads, one.kv_heads, one.head_size, one.context) == (2, 1, 32, 128)
    assert one.end == 256
    assert one.rotates
    assert one.rope_types == {"default"}
    assert one.layer_types == set()


def test_a_window_and_its_layers_are_seen(tmp_path: Path) -> None:
    save_good(tmp_path / "one", "mistral")
    assert read_folder(ModelConfig(path=str(tmp_path / "one/draft")), "draft").layer_types == {
        "sliding_attention"
    }
    save_good(tmp_path / "two", "gemma3")
    two = read_folder(ModelConfig(path=str(tmp_path / "two/draft")), "draft")
    assert two.layer_types == {"sliding_attention", "full_attention"}
    assert two.rope_types == {"default"}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_good(tmp_path)
    path = tmp_path / "draft/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"draft/model\.safetensors is no safetensors file"):
        read_folder(ModelConfig(path=str(tmp_path / "draft")), "draft")


def test_a_drafter_that_is_yet_to_be_made_has_its_shapes() -> None:
    fresh = read_pair(compose_config(["target=embedded", "draft=fresh"]))
    assert fresh is not None
    target, draft = fresh
    assert (target.key, draft.key, draft.rows) == ("target", "draft", target.rows)
    assert draft.tensors is None
    assert draft.names is None
    assert draft.tokenizer is target.tokenizer
    cut = read_pair(compose_config(["target=embedded", "draft=shrunk"]))
    assert cut is not None
    assert cut[1].head_size == target.head_size
    assert cut[1].keeps_ids
    assert read_pair(compose_config(["target=fresh", "draft=fresh"])) is None
