"""What is said of a pair for each engine: good pairs pass, and every planted fault is named."""

from pathlib import Path

import pytest

from draftkit.checking.engines import (
    ENGINES,
    RULES,
    EngineFinding,
    Pair,
    engine_findings,
)
from draftkit.checking.folders import read_folder
from draftkit.checking.rules import GOOD, NOTE, WRONG
from draftkit.checking.supported import ARCHITECTURES
from draftkit.config import CHECKED_NAMES, ModelConfig
from tests.checking.faults import FAULTS, SHAPES, VLLM, edit, plant, save_good


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pair of each architecture."""
    folder = tmp_path_factory.mktemp("good")
    return {name: save_good(folder / name, name) for name in SHAPES}


def seen(folder: Path, *engines: str, tensor_parallel: int = 1) -> list[EngineFinding]:
    pair = (read_folder(ModelConfig(path=str(folder / key)), key) for key in ("target", "draft"))
    return [*engine_findings(Pair(*pair, tensor_parallel), engines)]


def wrong(lines: list[EngineFinding]) -> dict[str, set[str]]:
    """The engines that are said to fail, by rule."""
    titles = {title: name for name, title in ENGINES.items()}
    rules = {one.rule for one in lines if one.level == WRONG}
    return {
        rule: {titles[one.subject] for one in lines if (one.level, one.rule) == (WRONG, rule)}
        for rule in rules
    }


def test_every_engine_has_its_name_in_the_settings() -> None:
    assert tuple(ENGINES) == CHECKED_NAMES
    assert {*ARCHITECTURES} == {*ENGINES} - {"transformers"}
    assert all({"LlamaForCausalLM", "Qwen3ForCausalLM"} <= one for one in ARCHITECTURES.values())


@pytest.mark.parametrize("architecture", SHAPES)
def test_a_good_pair_passes(good: dict[str, Path], architecture: str) -> None:
    lines = seen(good[architecture])
    expected = {"architecture": {"onnx"}} if architecture == "gpt_neox" else {}
    assert wrong(lines) == expected
    passed = [one for one in lines if one.level == GOOD]
    assert len(passed) == len(ENGINES) - len(expected)
    notes = {one.rule for one in lines if one.level == NOTE}
    assert notes == {"rounds", "pre_tokenizer", "dtype"} | {*expected}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_and_nothing_else(
    good: dict[str, Path], tmp_path: Path, name: str
) -> None:
    fault = FAULTS[name]
    folder = plant(fault, good[fault.architecture], tmp_path / "pair")
    assert wrong(seen(folder, tensor_parallel=fault.tensor_parallel)) == {fault.rule: fault.engines}


def test_every_rule_that_can_fail_has_a_fault() -> None:
    harmless = {"dtype", "rounds", "kept_ids", "pre_tokenizer"}
    assert {fault.rule for fault in FAULTS.values()} == {r.__name__ for r in RULES} - harmless
    assert all(rule.__doc__ for rule in RULES)


def test_what_is_worth_knowing_is_a_note(good: dict[str, Path], tmp_path: Path) -> None:
    folder = plant(FAULTS["a short context"], good["llama"], tmp_path / "pair")
    edit(folder / "target/config.json", dtype="bfloat16")
    edit(folder / "draft/config.json", tie_word_embeddings=True)
    (folder / "draft/kept_ids.json").write_text("[1]")
    notes = {(one.rule, one.subject): one.text for one in seen(folder) if one.level == NOTE}
    assert notes["context", "vLLM"].startswith("serves no text beyond 32 tokens")
    assert notes["context", "vLLM on CPU"].startswith("drafts id 0 alone beyond 32 tokens")
    assert notes["dtype", "vLLM"].endswith("which is float32, in bfloat16 as the target")
    assert "uses the embeddings for a head" in notes["output_head", "mlx-lm"]
    assert {subject for rule, subject in notes if rule == "kept_ids"} == {*ENGINES.values()}


def test_a_target_of_float32_is_halved_unless_vllm_is_kept_from_it(good: dict[str, Path]) -> None:
    texts = [one.text for one in seen(good["llama"], "vllm") if one.rule == "dtype"]
    assert texts[0].endswith("--dtype float32 keeps it")


def test_a_draft_that_says_how_many_it_proposes_is_left_alone(
    good: dict[str, Path], tmp_path: Path
) -> None:
    fault = FAULTS["min_p"]
    folder = plant(fault, good["llama"], tmp_path / "pair")
    edit(folder / "draft/generation_config.json", num_assistant_tokens=4)
    assert [one.rule for one in seen(folder, "transformers")] == [""]
    assert wrong(seen(folder, "vllm")) == {"sampling": {"vllm"}}


def test_a_sentence_of_both_models_is_said_once(tmp_path: Path) -> None:
    save_good(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    (line,) = [one for one in seen(tmp_path, "vllm_cpu") if one.level == WRONG]
    assert line.text.startswith("both: fails with heads of 16: it takes 32, 64")


@pytest.mark.parametrize(
    ("devices", "uneven"),
    [(1, ""), (2, ""), (4, "heads 2"), (3, "heads 2, intermediate size 128, padded vocabulary")],
)
def test_what_does_not_divide_is_named(good: dict[str, Path], devices: int, uneven: str) -> None:
    lines = seen(good["llama"], *sorted(VLLM), tensor_parallel=devices)
    texts = [one.text for one in lines if one.level == WRONG]
    assert bool(texts) == bool(uneven)
    assert all(f"divide by {devices} ({uneven}" in text for text in texts)


def test_positions_of_a_table_end(tmp_path: Path) -> None:
    save_good(tmp_path, "gpt2")
    edit(tmp_path / "draft/config.json", n_positions=32)
    lines = seen(tmp_path, "transformers")
    assert wrong(lines) == {"context": {"transformers"}}
    assert "take another draft" in lines[0].text
