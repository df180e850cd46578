"""What is said of a pair: good ones pass, and what is wrong with the others is named."""

import shutil
from pathlib import Path

import pytest

from draftkit.artifacts import read_json, write_json
from draftkit.models.compatibility import GOOD, NOTE, WRONG, Finding, findings
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


def test_a_padded_vocabulary_and_another_context_are_told(pairs: Path, tmp_path: Path) -> None:
    rows = read_json(pairs / "pair" / "draft" / "config.json")["vocab_size"]
    changes = {"vocab_size": rows + 64, "max_position_embeddings": 32}
    seen = of(copied(pairs, tmp_path, "draft", "config.json", **changes))
    assert seen["padding"].level == seen["context"].level == NOTE
    assert f"draft {rows + 64}" in seen["padding"].text
    assert "draft 32 tokens: the smaller one limits both" in seen["context"].text


def test_fewer_rows_than_ids_are_wrong(pairs: Path, tmp_path: Path) -> None:
    seen = of(copied(pairs, tmp_path, "target", "config.json", vocab_size=8))
    assert seen["padding"].level == WRONG
    assert "embedding rows" in seen["padding"].text


def test_an_encoder_decoder_beside_a_decoder_only_one_is_wrong(pairs: Path, tmp_path: Path) -> None:
    changes = {"model_type": "t5", "is_encoder_decoder": True, "architectures": None}
    changes |= {"num_layers": 2, "d_model": 16, "num_heads": 2}
    seen = of(copied(pairs, tmp_path, "draft", "config.json", **changes))
    assert seen["kind"].level == WRONG
    assert "both must be of one kind" in seen["kind"].text


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


def test_keys_of_the_target_that_nothing_serves_are_told(pairs: Path, tmp_path: Path) -> None:
    assert "sampling" not in of(pairs / "pair")
    advice = {"suppress_tokens": [65], "min_new_tokens": 3, "max_time": None}
    seen = of(copied(pairs, tmp_path, "target", "generation_config.json", **advice))
    assert seen["sampling"].level == NOTE
    assert "has min_new_tokens, suppress_tokens, which `generate` obeys" in seen["sampling"].text


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
