"""A head's folder holds what engines load: names, ids and embeddings, and no option of another."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftkit.artifacts import read_json
from draftkit.config import DraftConfig, HardwareConfig, TargetConfig
from draftkit.engines.folder import write_folder, write_head_folder
from draftkit.models.loading import load_target
from tests.engines import making
from tests.engines.heads import Head, fitted
from tests.engines.making import REAL

ROWS = REAL + 14  # of a padded target
IDS = torch.tensor([3, 8, 9, 40])


@pytest.fixture(scope="module")
def model() -> Any:
    return making.model(vocab_size=ROWS, num_hidden_layers=7, num_key_value_heads=4)


@pytest.fixture
def target(tmp_path: Path, model: Any) -> TargetConfig:
    return making.saved(model, tmp_path / "target")


def head_of(model: Any, ids: torch.Tensor = IDS) -> Head:
    return fitted(model, torch.arange(48).view(2, 24), ids=ids, wide=16)


def exported(head: Head, target: TargetConfig, folder: Path, **options: Any) -> tuple[Any, ...]:
    """Tensors, configuration and notes of the folder of a head."""
    draft = DraftConfig(path=str(head.write(folder / "draft")))
    notes = write_head_folder(draft, target, folder / "hf", **options)
    return (
        load_file(folder / "hf" / "model.safetensors"),
        read_json(folder / "hf/config.json"),
        notes,
    )


@pytest.mark.parametrize("count", [len(IDS), REAL, ROWS])
def test_ids_are_named_where_they_are_not_all_rows_of_the_target(
    tmp_path: Path, model: Any, target: TargetConfig, count: int
) -> None:
    """Padding counts: engines compare with `vocab_size`."""
    head = head_of(model, IDS if count == len(IDS) else torch.arange(count))
    tensors, config, _ = exported(head, target, tmp_path)
    assert (config["draft_vocab_size"], config["vocab_size"]) == (count, ROWS)
    assert ("d2t" in tensors) == (count != ROWS)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in head.tensors.items())


def test_names_and_keys_are_those_that_all_engines_read(
    tmp_path: Path, model: Any, target: TargetConfig
) -> None:
    """Of a head whose trainer wrote others."""
    head, layers = head_of(model), [2, 3, 4]
    renamed = {name.replace("layers.0.", "midlayer."): one for name, one in head.tensors.items()}
    renamed["t2d"] = torch.isin(torch.arange(ROWS), IDS)
    renamed["embed_tokens.weight"] = head.embeddings.clone()
    more = {"eagle_aux_hidden_state_layer_ids": layers, "eagle_config": {"layer_ids": layers}}
    other = replace(head, tensors=renamed, config={**head.config, **more})
    tensors, config, notes = exported(other, target, tmp_path, dtype="bfloat16")
    assert tensors.keys() == head.tensors.keys()  # the target's embeddings are left out
    assert {one.dtype for name, one in tensors.items() if name != "d2t"} == {torch.bfloat16}
    assert config["head_dim"] == model.config.head_dim
    assert not {*more} & {*config}
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert not any("embeddings" in note for note in notes)
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_a_target_in_memory_is_not_loaded_again(
    tmp_path: Path, model: Any, target: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = load_target(target, HardwareConfig(device="cpu"))
    monkeypatch.delattr("draftkit.engines.folder.load_target")
    head = head_of(model)
    draft = DraftConfig(path=str(head.write(tmp_path / "draft")))
    write_folder(draft, target, tmp_path / "hf", gamma=3, untied=True, owner=owner)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert tensors.keys() == head.tensors.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in head.tensors.items())


def test_embeddings_of_another_trainer_are_kept_and_named(
    tmp_path: Path, model: Any, target: TargetConfig
) -> None:
    head = head_of(model)
    own = {"embed_tokens.weight": head.embeddings + 1}
    tensors, _, notes = exported(replace(head, tensors={**head.tensors, **own}), target, tmp_path)
    assert torch.equal(tensors["embed_tokens.weight"], own["embed_tokens.weight"])
    assert "the head has embeddings of its own; SGLang takes the target's instead" in notes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm_output": True}, "norm_output is True, which engines read in different ways"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is True"),
        ({"vocab_size": REAL}, rf"vocab_size is {REAL} and the target's {ROWS}"),
        ({"target_hidden_size": 8}, "hidden_size is 8 and the target's"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "eagle_.*_ids names the layers",
        ),
    ],
)
def test_what_engines_read_in_different_ways_is_refused(
    tmp_path: Path, model: Any, target: TargetConfig, changes: dict[str, Any], reason: str
) -> None:
    head = head_of(model)
    with pytest.raises(ValueError, match=rf"^draft\.path .*: {reason}"):
        exported(replace(head, config={**head.config, **changes}), target, tmp_path)
