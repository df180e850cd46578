"""A launch file holds its engine's options, and the acceptance of the setting that it starts."""

import ast
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import SamplingConfig
from draftkit.engines.launch import (
    LAUNCHES,
    Pair,
    best_gammas,
    expected,
    launched_gamma,
    ranges,
)
from draftkit.evaluation.engines import ARGMAX, LAUNCHED, MATCHED, SAMPLED, UNCUT
from tests.engines.onnx import joined
from tests.evaluation.test_report import estimate, summary


def judged(batch_size: int = 1, best: int = 5, argmax: int = 2) -> dict[str, Any]:
    """Each setting has a length of its own, at its gamma and at the best one of its mode."""
    modes = {SAMPLED: best, ARGMAX: argmax, MATCHED: 1}
    rows = [
        row
        | {"gamma": 4, "acceptance_length": estimate(2 + index / 10)}
        | {
            "at_best_gamma": {
                "gamma": max(modes[row["mode"]], 1),
                "acceptance_length": estimate(3 + index / 10),
            }
        }
        for index, row in enumerate(summary(0.6)["engines"])
    ]
    numbers = {"batch_size": batch_size, "best_gamma": best, "best_gamma_by_mode": modes}
    return summary(0.6) | numbers | {"engines": rows}


def pair(**options: Any) -> Pair:
    return Pair(**{"target": "some/target", "gamma": 3, "judged": [judged()]} | options)


def called(folder: Path, engine: str, one: Pair, *words: str) -> list[str]:
    """The words of the command that the script of `engine` runs, and where it runs it."""
    (folder / engine).mkdir(parents=True)
    for name, text in LAUNCHES[engine](one).items():
        (folder / engine / name).write_text(text)
    program = folder / "bin" / "program"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\npwd\nfor word in "$@"; do printf "%s\\n" "$word" | tr "\\n" " "; echo; done\n'
    )
    program.chmod(0o755)
    for name in ("vllm", "python", "llama-server"):
        (program.parent / name).symlink_to(program)
    done = subprocess.run(
        ["sh", str(folder / engine / "launch.sh"), *words],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{program.parent}:/usr/bin:/bin"},
    )
    where, *rest = done.stdout.splitlines()
    assert Path(where) == folder
    return [word.removesuffix(" ") for word in rest]


def test_vllm_gets_its_options_whole(tmp_path: Path) -> None:
    words = called(tmp_path, "vllm", pair(target="a target", revision="abc"), "--port", "9")
    assert words[:6] == ["serve", "a target", "--revision", "abc", "--host", "127.0.0.1"]
    assert words[-2:] == ["--port", "9"]
    options = json.loads(words[words.index("--speculative-config") + 1])
    assert options == {
        "method": "draft_model",
        "model": "./hf",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    }


def test_vllm_gets_a_table_where_several_batch_sizes_were_measured() -> None:
    files = LAUNCHES["vllm"](pair(judged=[judged(), judged(8, 2, 0), judged(64, 0, 0)]))
    options = json.loads(files["speculative_config.json"])
    assert options["num_speculative_tokens"] == 5
    table = options["num_speculative_tokens_per_batch_size"]
    assert table == [[1, 1, 5], [2, 8, 2], [9, 64, 0]]
    assert (
        "batch size 64, by draftkit's decoder: 0, which is not to speculate" in files["launch.sh"]
    )
    one = json.loads(LAUNCHES["vllm"](pair(judged=[judged(8, 2)]))["speculative_config.json"])
    assert "num_speculative_tokens_per_batch_size" not in one


def test_gammas_are_those_of_the_evaluations_by_batch_size_and_of_how_the_engine_drafts() -> None:
    measured = pair(judged=[judged(8, 2, 0), judged(1, 5, 2)])
    for engine, first, second in (("vllm", 5, 2), ("hf", 5, 2), ("sglang", 2, 0)):
        assert list(best_gammas(measured, engine).items()) == [(1, first), (8, second)]
        assert ranges(best_gammas(measured, engine)) == [[1, 1, first], [2, 8, second]]


def test_a_draft_that_the_engine_does_not_cut_is_launched_by_its_own_acceptance() -> None:
    cut = judged()
    cut["best_gamma_by_mode"][UNCUT] = 3
    for row in cut["engines"]:
        if (row["engine"], row["setting"]) == LAUNCHED["vllm"]:
            row["mode"] = UNCUT
    gammas = [launched_gamma(pair(judged=[cut]), engine) for engine in ("hf", "vllm", "sglang")]
    assert gammas == [5, 3, 2]


def test_a_summary_that_knows_one_best_gamma_alone_gives_it_to_every_engine() -> None:
    """As of a proposer without a drafter, of which no engine has a row."""
    bare = {"batch_size": 1, "best_gamma": 4, "temperature": 1.0}
    assert {launched_gamma(pair(judged=[bare]), engine) for engine in LAUNCHED} == {4}
    one = {key: value for key, value in judged().items() if key != "best_gamma_by_mode"}
    assert {launched_gamma(pair(judged=[one]), engine) for engine in LAUNCHED} == {5}


@pytest.mark.parametrize("engine", ["sglang", "llamacpp"])
def test_where_argmax_drafts_do_not_pay_the_file_says_so_and_still_runs(engine: str) -> None:
    text = LAUNCHES[engine](pair(judged=[judged(argmax=0)]))["launch.sh"]
    assert "argmax drafts at batch size 1, by draftkit's decoder: 0, which is not to spec" in text
    assert "at gamma 1: " in text
    option = {"sglang": "--speculative-num-steps 1", "llamacpp": "--spec-draft-n-max 1"}[engine]
    assert option in text
    sampled = LAUNCHES["vllm"](pair(judged=[judged(argmax=0)]))
    assert "Best gamma at batch size 1, by draftkit's decoder: 5." in sampled["launch.sh"]
    assert json.loads(sampled["speculative_config.json"])["num_speculative_tokens"] == 5


def test_sglang_drafts_a_chain_with_a_model_of_its_own(tmp_path: Path) -> None:
    words = called(tmp_path, "sglang", pair())
    assert words[:2] == ["-m", "sglang.launch_server"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options == {
        "--model-path": "some/target",
        "--host": "127.0.0.1",
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": "./hf",
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "3",
    }


def test_llama_cpp_gets_both_files(tmp_path: Path) -> None:
    words = called(tmp_path, "llamacpp", pair())
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["-m"] == "llamacpp/target-q8_0.gguf"
    assert options["-md"] == "llamacpp/draft-q8_0.gguf"
    assert options["--spec-draft-n-max"] == "2"


@pytest.mark.parametrize(
    ("target", "llamacpp", "onnx"),
    [("some/target", "some/target --remote", "-m some/target"), ("/a b", "/a b", "-i /a b")],
)
def test_converters_are_called_on_both_models(
    tmp_path: Path, target: str, llamacpp: str, onnx: str
) -> None:
    """By the very words, of a target on the hub and of a folder."""
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s " "$@"; echo\n')
    program.chmod(0o755)
    converted = {}
    for engine in ("llamacpp", "onnx"):
        (tmp_path / engine).mkdir()
        script = tmp_path / engine / "convert.sh"
        script.write_text(LAUNCHES[engine](pair(target=target))["convert.sh"])
        done = subprocess.run(
            ["sh", str(script)],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": f"{program.parent}:/usr/bin:/bin", "CONVERT": "convert.py"},
        )
        converted[engine] = [line.rstrip() for line in done.stdout.splitlines()]
    assert converted["llamacpp"] == [
        "convert.py ./hf --outtype q8_0 --outfile llamacpp/draft-q8_0.gguf",
        f"convert.py {llamacpp} --outtype q8_0 --outfile llamacpp/target-q8_0.gguf",
    ]
    builder = "-m onnxruntime_genai.models.builder"
    options = "-p fp32 -e cpu -c onnx/cache -o"
    assert converted["onnx"] == [
        f"{builder} {onnx} {options} onnx/target",
        f"{builder} -i ./hf {options} onnx/draft",
    ]


def test_the_program_of_onnx_joins_both_models(tmp_path: Path) -> None:
    """As `joined` does, which real engines have run; greedy sampling samples nothing."""
    parts = {}
    for name, length in (("target", 64), ("draft", 32)):
        model = {"decoder": {"filename": f"{name}.onnx"}, "vocab_size": 9, "context_length": length}
        parts[name] = {"model": model, "search": {"top_k": 50, "num_beams": 1}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "genai_config.json").write_text(json.dumps(parts[name]))
        (tmp_path / name / "tokenizer.json").write_text(name)
    (tmp_path / "onnxruntime_genai.py").write_text("def Model(folder):\n    raise SystemExit\n")
    sampling = SamplingConfig(temperature=0.0, top_k=7)
    one = pair(sampling=sampling)
    (tmp_path / "generate.py").write_text(LAUNCHES["onnx"](one)["generate.py"])
    subprocess.run([sys.executable, str(tmp_path / "generate.py")], check=True)
    made = json.loads((tmp_path / "genai_config.json").read_text())
    gamma = launched_gamma(one, "onnx")
    assert made == joined(parts["target"], parts["draft"], gamma=gamma, sampling=sampling)
    assert (tmp_path / "tokenizer.json").read_text() == "target"


@pytest.mark.parametrize("engine", ["hf", "onnx"])
def test_programs_are_programs(engine: str) -> None:
    text = LAUNCHES[engine](pair())["generate.py"]
    names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    assert ("num_assistant_tokens" if engine == "hf" else "set_speculative_options") in names


@pytest.mark.parametrize("engine", LAUNCHED)
def test_each_engine_is_expected_to_accept_what_its_setting_does(engine: str) -> None:
    rows = {(row["engine"], row["setting"]): row for row in judged()["engines"]}
    row = rows[LAUNCHED[engine]]
    best = expected(pair(), engine)
    assert best is not None
    assert (best["gamma"], best["acceptance_length"]) == tuple(row["at_best_gamma"].values())
    assert best["gamma"] == launched_gamma(pair(), engine)
    assert best["acceptance"] == row["acceptance"]
    text = "".join(LAUNCHES[engine](pair()).values())
    mean = row["at_best_gamma"]["acceptance_length"]["mean"]
    assert "# Expect at temperature 1" in text
    assert f"at gamma {best['gamma']}: {mean:.2f} [" in text


def test_without_an_evaluation_nothing_is_expected() -> None:
    bare = pair(judged=[])
    for engine, launch in LAUNCHES.items():
        assert launched_gamma(bare, engine) == 3
        assert expected(bare, engine) is None
        assert "# No evaluation says what to expect" in "".join(launch(bare).values())


def test_words_with_spaces_stay_one_word() -> None:
    text = LAUNCHES["sglang"](pair(target="/models/my target"))["launch.sh"]
    line = next(line for line in text.splitlines() if line.startswith("exec"))
    assert "/models/my target" in shlex.split(line)


def test_the_program_for_transformers_takes_the_commit_that_was_judged() -> None:
    code = LAUNCHES["hf"](Pair(target="maker/model", revision="c" * 40))["generate.py"]
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    loads = [ast.unparse(call) for call in calls if "from_pretrained" in ast.unparse(call.func)]
    of_target = [load for load in loads if "maker/model" in load]
    assert len(of_target) == 2  # its tokenizer and itself
    assert all(f"revision='{'c' * 40}'" in load for load in of_target)
    assert "revision" not in LAUNCHES["hf"](Pair(target="maker/model"))["generate.py"]
