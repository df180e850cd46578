"""What is said of a pair: good ones pass, and what is wrong with the others is named."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, LlamaConfig, MistralConfig, PreTrainedConfig

from draftkit.artifacts import read_json, write_json
from draftkit.config import DraftConfig
from draftkit.models.compatibility import (
    GOOD,
    NOTE,
    WRONG,
    Finding,
    check_same_architecture,
    declare_target,
    findings,
    unknown_target,
)
from pipelines.configuration import compose_config
from tests.pairs import paths, save_pairs
from tests.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    save_pairs(folder)
    return folder


def of(folder: Path, *overrides: str) -> dict[str, Finding]:
    given = ["+experiment=pair", "data.path=rows.jsonl", "sampling.from=config"]
    config = compose_config([*given, *paths(folder), *overrides])
    return {one.subject: one for one in findings(config)}


def copied(pairs: Path, tmp_path: Path, model: str, file: str, **values: object) -> Path:
    """The pair with a file of one model changed."""
    shutil.copytree(pairs / "pair", tmp_path / "pair")
    path = tmp_path / "pair" / model / file
    content = {**(read_json(path) if path.exists() else {}), **values}
    write_json(path, {key: value for key, value in content.items() if value is not None})
    return tmp_path / "pair"


def test_a_good_pair_passes(pairs: Path) -> None:
    seen = of(pairs / "pair")
    assert {one.level for one in seen.values()} <= {GOOD, NOTE}
    assert seen["ids"].level == seen["end"].level == seen["context"].level == GOOD


def test_other_ids_are_wrong(pairs: Path, tmp_path: Path) -> None:
    other = copied(pairs, tmp_path, "target", "config.json") / "target"
    tokenizer = read_json(other / "tokenizer.json")
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    write_json(other / "tokenizer.json", tokenizer)
    seen = of(pairs / "pair", f"target.path={other}")
    assert seen["ids"].level == WRONG
    assert "different vocabularies" in seen["ids"].text


GIVEN: dict[str, tuple[str, str, dict[str, Any], dict[str, tuple[str, str]]]] = {
    "a padded vocabulary and another context": (
        "draft",
        "config.json",
        {"vocab_size": 3000, "max_position_embeddings": 32},
        {
            "padding": (NOTE, "draft 3,000"),
            "context": (NOTE, "draft 32 tokens: the smaller one limits both"),
        },
    ),
    "fewer rows than ids": (
        "target",
        "config.json",
        {"vocab_size": 8},
        {"padding": (WRONG, "embedding rows")},
    ),
    "an encoder-decoder beside a decoder-only one": (
        "draft",
        "config.json",
        {"model_type": "t5", "is_encoder_decoder": True, "architectures": None}
        | {"num_layers": 2, "d_model": 16, "num_heads": 2},
        {"kind": (WRONG, "both must be of one kind")},
    ),
    "keys of the target that nothing serves": (
        "target",
        "generation_config.json",
        {"suppress_tokens": [65], "min_new_tokens": 3, "max_time": None},
        {"sampling": (NOTE, "has min_new_tokens, suppress_tokens, which `generate` obeys")},
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_file_says_is_told(pairs: Path, tmp_path: Path, name: str) -> None:
    model, file, changes, told = GIVEN[name]
    seen, good = of(copied(pairs, tmp_path, model, file, **changes)), of(pairs / "pair")
    for subject, (level, text) in told.items():
        assert seen[subject].level == level
        assert text in seen[subject].text
        assert subject not in good or good[subject].level == GOOD


def test_weights_that_are_no_safetensors_are_wrong(pairs: Path, tmp_path: Path) -> None:
    folder = copied(pairs, tmp_path, "draft", "config.json")
    (folder / "draft" / "model.safetensors").rename(folder / "draft" / "pytorch_model.bin")
    seen = of(folder)["weights"]
    assert seen.level == WRONG
    assert "pytorch_model.bin is pickled" in seen.text
    assert "draft.path" in seen.text


def test_the_factors_of_longrope_that_are_served_are_told(pairs: Path, tmp_path: Path) -> None:
    shape = read_json(pairs / "pair" / "target" / "config.json")
    factors = [1.0] * (shape["head_dim"] // 2)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors}
    rope |= {"long_factor": factors, "original_max_position_embeddings": 64}
    folder = copied(pairs, tmp_path, "target", "config.json", rope_parameters=rope)
    assert "target 64, " in of(folder)["context"].text
    assert "of longrope the short factors" in of(folder)["context"].text


def shape(**changes: Any) -> PreTrainedConfig:
    return Gemma3Config(text_config={"num_hidden_layers": 2, "layer_types": BOTH, **changes})


BOTH = ["sliding_attention", "full_attention"]
ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 5e2}}
OTHER: dict[str, tuple[PreTrainedConfig, PreTrainedConfig, str]] = {
    "mask": (LlamaConfig(pard_token=5), LlamaConfig(pard_token=7), "pard_token of .* is 7, .* 5"),
    "kind": (LlamaConfig(pard_token=5), LlamaConfig(), "pard_token of .* is None, the drafter's 5"),
    "rope": (LlamaConfig(), LlamaConfig(rope_theta=5e2), r"rope_parameters\.rope_theta of"),
    "order": (shape(), shape(layer_types=BOTH[::-1]), r"text_config\.layer_types of its config"),
    "rope of a layer": (shape(), shape(rope_parameters=ROPE), r"sliding_attention\.rope_theta"),
    "window": (shape(), shape(sliding_window=8), r"text_config\.sliding_window of .* is 8, "),
    "family": (LlamaConfig(), MistralConfig(), "of its config.json is "),
}


@pytest.mark.parametrize(("own", "given", "message"), OTHER.values(), ids=OTHER)
def test_models_that_compute_otherwise_are_told_apart_by_the_key(
    own: PreTrainedConfig, given: PreTrainedConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_same_architecture(own, given)


def test_what_no_logits_depend_on_may_differ() -> None:
    given = LlamaConfig(
        pard_token=5, pard_k=8, use_cache=False, eos_token_id=[1, 2], dtype="float16"
    )
    check_same_architecture(LlamaConfig(pard_token=5, pard_k=4, architectures=["A"]), given)


def test_a_head_says_for_which_target_it_was_made() -> None:
    head, draft = LlamaConfig(architectures=["LlamaForCausalLMEagle3"]), DraftConfig(path="head")
    assert "the head names no target that" in unknown_target(draft, head, "abc")
    declare_target(head, "abc")
    assert unknown_target(draft, head, "abc") == ""
    assert "the head was made for another target" in unknown_target(draft, head, "other")
    check_same_architecture(head, LlamaConfig())  # the checksum is no part of how it computes
    plain = LlamaConfig()
    declare_target(plain, "abc")
    assert plain.to_dict() == LlamaConfig().to_dict()
    assert unknown_target(draft, plain, "other") == ""


def test_a_target_that_never_ends_a_text_is_wrong(pairs: Path, tmp_path: Path) -> None:
    folder = copied(pairs, tmp_path, "target", "generation_config.json", eos_token_id=None)
    path = folder / "target" / "tokenizer_config.json"
    write_json(path, {k: v for k, v in read_json(path).items() if k != "eos_token"})
    write_json(
        folder / "target" / "config.json",
        read_json(folder / "target" / "config.json") | {"eos_token_id": None},
    )
    assert of(folder)["end"].level == WRONG


def test_special_tokens_and_templates_that_differ_are_told(pairs: Path, tmp_path: Path) -> None:
    folder = copied(pairs, tmp_path, "draft", "tokenizer_config.json", pad_token="a")
    seen = of(folder)
    assert seen["special"].level == NOTE
    assert "pad_token" in seen["special"].text
    (folder / "target" / "chat_template.jinja").write_text("{{ messages }}")
    assert "differ" in of(folder)["template"].text
    assert "not used" in of(folder, "data.chat_template=never")["template"].text
    (folder / "draft" / "chat_template.jinja").write_text("{{ messages }}")
    assert of(folder)["template"].level == GOOD
    assert of(pairs / "pair")["template"].level == NOTE  # which has none


def test_added_tokens_that_differ_are_told_where_they_are_taken(
    pairs: Path, tmp_path: Path
) -> None:
    folder = copied(pairs, tmp_path, "target", "config.json", vocab_size=300)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(folder / "target")
    assert of(folder)["ids"].level == WRONG
    assert "draft.extra_tokens=never" in of(folder)["ids"].text
    seen = of(folder, "draft.extra_tokens=never")
    assert seen["ids"].level == NOTE
    assert "but for 1 of added tokens, which are never proposed" in seen["ids"].text


def test_what_is_made_here_needs_no_rules() -> None:
    cut = {one.subject: one.level for one in findings(compose_config([]))}
    assert cut["drafter"] == GOOD
    assert "ids" not in cut
