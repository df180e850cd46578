"""A launch file holds its engine's options, and the acceptance of the setting that it starts."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import SamplingConfig
from draftkit.engines.launch import LAUNCHES, Pair, expected, launched_gamma
from draftkit.evaluation.engines import ARGMAX, LAUNCHED, MATCHED, SAMPLED, UNCUT
from tests.evaluation.test_report import estimate, summary


def judged(best: int = 5, argmax: int = 2) -> dict[str, Any]:
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
    numbers = {"batch_size": 1, "best_gamma": best, "best_gamma_by_mode": modes}
    return summary(0.6) | numbers | {"engines": rows}


def pair(**options: Any) -> Pair:
    return Pair(**{"target": "some/target", "gamma": 3, "judged": judged()} | options)


def called(folder: Path, engine: str, one: Pair, *words: str, script: str = "launch.sh") -> Any:
    """The commands that a script runs, a list of words each, and that it runs them in `folder`."""
    (folder / engine).mkdir(parents=True)
    for name, text in LAUNCHES[engine](one).items():
        (folder / engine / name).write_text(text)
    program = folder / "bin" / "program"
    program.parent.mkdir()
    code = "import json, os, sys; print(json.dumps([os.getcwd(), sys.argv[1:]]))"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    for name in ("vllm", "python", "llama-server"):
        (program.parent / name).symlink_to(program)
    environment = {"PATH": f"{program.parent}:/usr/bin:/bin", "CONVERT": "convert.py"}
    done = subprocess.run(
        ["sh", str(folder / engine / script), *words],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {where for where, _ in made} == {str(folder)}
    return [words for _, words in made]


def options_of(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def test_vllm_gets_its_options_whole(tmp_path: Path) -> None:
    one = pair(target="a target", revision="abc")
    (words,) = called(tmp_path, "vllm", one, "--port", "9")
    assert words[:6] == ["serve", "a target", "--revision", "abc", "--host", "127.0.0.1"]
    assert words[-2:] == ["--port", "9"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "draft_model",
        "model": "./hf",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    }


def test_sglang_drafts_a_chain_with_a_model_of_its_own(tmp_path: Path) -> None:
    (words,) = called(tmp_path, "sglang", pair(target="/models/my target"))
    assert words[:2] == ["-m", "sglang.launch_server"]
    assert options_of(words[2:]) == {
        "--model-path": "/models/my target",
        "--host": "127.0.0.1",
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": "./hf",
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "3",
    }


def test_llama_cpp_gets_both_files(tmp_path: Path) -> None:
    (words,) = called(tmp_path, "llamacpp", pair())
    options = options_of(words)
    assert options["-m"] == "llamacpp/target-q8_0.gguf"
    assert options["-md"] == "llamacpp/draft-q8_0.gguf"
    assert options["--spec-draft-n-max"] == "2"


@pytest.mark.parametrize(
    ("target", "llamacpp", "onnx"),
    [
        ("some/target", ["some/target", "--remote"], ["-m", "some/target"]),
        ("/a b", ["/a b"], ["-i", "/a b"]),
    ],
)
def test_converters_are_called_on_both_models(
    tmp_path: Path, target: str, llamacpp: list[str], onnx: list[str]
) -> None:
    """By the very words, of a target on the hub and of a folder."""
    converted = {
        engine: called(tmp_path / engine, engine, pair(target=target), script="convert.sh")
        for engine in ("llamacpp", "onnx")
    }
    kind = ["--outtype", "q8_0", "--outfile"]
    assert converted["llamacpp"] == [
        ["convert.py", "./hf", *kind, "llamacpp/draft-q8_0.gguf"],
        ["convert.py", *llamacpp, *kind, "llamacpp/target-q8_0.gguf"],
    ]
    builder = ["-m", "onnxruntime_genai.models.builder"]
    options = ["-p", "fp32", "-e", "cpu", "-c", "onnx/cache", "-o"]
    assert converted["onnx"] == [
        [*builder, *onnx, *options, "onnx/target"],
        [*builder, "-i", "./hf", *options, "onnx/draft"],
    ]


def test_the_program_of_onnx_joins_both_models(tmp_path: Path) -> None:
    """In one configuration, searched as is served, of what both have room for."""
    for name, length in (("target", 64), ("draft", 32)):
        model = {"decoder": {"filename": f"{name}.onnx"}, "vocab_size": 9, "context_length": length}
        (tmp_path / name).mkdir()
        config = {"model": model, "search": {"top_k": 50, "num_beams": 1}}
        (tmp_path / name / "genai_config.json").write_text(json.dumps(config))
        (tmp_path / name / "tokenizer.json").write_text(name)
    (tmp_path / "onnxruntime_genai.py").write_text("def Model(folder):\n    raise SystemExit\n")
    one = pair(sampling=SamplingConfig(temperature=0.0, top_k=7))
    (tmp_path / "generate.py").write_text(LAUNCHES["onnx"](one)["generate.py"])
    subprocess.run([sys.executable, str(tmp_path / "generate.py")], check=True)
    made = json.loads((tmp_path / "genai_config.json").read_text())
    assert made["model"] == {
        "decoder": {"filename": "target/target.onnx"},
        "draft": {"filename": "draft/draft.onnx"},
        "vocab_size": 9,
        "context_length": 32,
    }
    assert made["search"] == {
        **{"num_beams": 1, "max_length": 32, "do_sample": False, "temperature": 1.0},
        **{"top_k": 7, "top_p": 1.0, "repetition_penalty": 1.0},
    }
    assert made["speculative"] == {"max_draft_tokens": launched_gamma(one, "onnx")}
    assert (tmp_path / "tokenizer.json").read_text() == "target"


def test_the_program_for_transformers_takes_the_commit_that_was_judged() -> None:
    code = LAUNCHES["hf"](Pair(target="maker/model", revision="c" * 40))["generate.py"]
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    loads = [ast.unparse(call) for call in calls if "from_pretrained" in ast.unparse(call.func)]
    of_target = [load for load in loads if "maker/model" in load]
    assert len(of_target) == 2  # its tokenizer and itself
    assert all(f"revision='{'c' * 40}'" in load for load in of_target)
    assert "num_assistant_tokens" in code
    assert "revision" not in LAUNCHES["hf"](Pair(target="maker/model"))["generate.py"]


# What to expect


@pytest.mark.parametrize("engine", LAUNCHED)
def test_each_engine_is_launched_at_and_expected_to_accept_what_its_setting_does(
    engine: str,
) -> None:
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
    bare = pair(judged=None)
    assert launched_gamma(bare, engine) == 3
    assert expected(bare, engine) is None
    assert "# No evaluation says what to expect" in "".join(LAUNCHES[engine](bare).values())


def test_gammas_are_those_of_how_the_engine_drafts() -> None:
    cut = judged()
    cut["best_gamma_by_mode"][UNCUT] = 3  # of a draft that vLLM does not cut
    for row in cut["engines"]:
        if (row["engine"], row["setting"]) == LAUNCHED["vllm"]:
            row["mode"] = UNCUT
    gammas = [launched_gamma(pair(judged=cut), engine) for engine in ("hf", "vllm", "sglang")]
    assert gammas == [5, 3, 2]
    # As of a proposer without a drafter, of which no engine has a row.
    without = {"batch_size": 1, "best_gamma": 4, "temperature": 1.0}
    assert {launched_gamma(pair(judged=without), engine) for engine in LAUNCHED} == {4}


@pytest.mark.parametrize(
    ("engine", "option"),
    [("sglang", "--speculative-num-steps 1"), ("llamacpp", "--spec-draft-n-max 1")],
)
def test_where_argmax_drafts_do_not_pay_the_file_says_so_and_still_runs(
    engine: str, option: str
) -> None:
    text = LAUNCHES[engine](pair(judged=judged(argmax=0)))["launch.sh"]
    assert "argmax drafts at batch size 1, by draftkit's decoder: 0, which is not to spec" in text
    assert "at gamma 1: " in text
    assert option in text
    sampled = LAUNCHES["vllm"](pair(judged=judged(argmax=0)))
    assert "Best gamma at batch size 1, by draftkit's decoder: 5." in sampled["launch.sh"]
