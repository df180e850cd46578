"""launch.md holds each engine's options, and the acceptance of the setting that it starts."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import PARD, PLAIN, SamplingConfig
from draftkit.engines.launch import expected, launch_text, launched_gammas
from draftkit.evaluation.engines import ARGMAX, LAUNCHED, MATCHED, SAMPLED, UNCUT
from draftkit.models.head_files import P_EAGLE
from draftkit.models.heads import EAGLE3, MEDUSA
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


def sections(target: str = "some/target", **options: Any) -> dict[str, str]:
    """The text of each engine, by its name."""
    given = {"judged": judged(), "revision": None, "kind": PLAIN} | options
    given["gammas"] = launched_gammas(given["judged"], 3, kind=given["kind"])
    text = launch_text(target, **{"sampling": SamplingConfig(), **given})
    _, *parts = text.split("\n## ")
    return dict(zip(given["gammas"], parts, strict=True))


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The words of each command, as a shell takes them."""
    return [shlex.split(line) for block in blocks(text, "sh") for line in block.splitlines()]


def options_of(words: list[str]) -> dict[str, str]:
    return dict(zip(words[::2], words[1::2], strict=True))


def test_vllm_gets_its_options_whole() -> None:
    (words,) = commands(sections("a target", revision="abc")["vllm"])
    assert words[:7] == ["vllm", "serve", "a target", "--revision", "abc", "--host", "127.0.0.1"]
    assert json.loads(options_of(words[7:])["--speculative-config"]) == {
        "method": "draft_model",
        "model": "./hf",
        "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    }


def test_a_head_is_launched_by_the_engines_that_load_it_each_by_its_own_word_for_it() -> None:
    texts = sections("/my target", kind=EAGLE3)
    assert [*texts] == ["vllm", "sglang", "llamacpp"]
    ((*_, options),) = commands(texts["vllm"])
    assert json.loads(options)["method"] == "eagle3"
    ((*_, algorithm, _, _, _, _, _, _, _, _),) = commands(texts["sglang"])
    assert algorithm == "EAGLE3"
    _, convert, server = commands(texts["llamacpp"])
    assert convert[-3:] == ["--target-model-dir", "/my target", "./hf"]
    assert options_of(server[1:])["--spec-type"] == "draft-eagle3"


def test_a_target_on_the_hub_becomes_a_folder_for_the_converter_of_its_head() -> None:
    text = sections("some/target", kind=EAGLE3, revision="abc")["llamacpp"]
    fetch, of_target, of_head, _ = commands(text)
    assert fetch == shlex.split("hf download some/target --revision abc --local-dir target")
    assert of_target[-1] == "target"
    assert of_head[-3:] == ["--target-model-dir", "target", "./hf"]


def test_a_head_of_one_pass_is_for_vllm_and_medusa_for_no_engine() -> None:
    ((*_, options),) = commands(sections(kind=P_EAGLE)["vllm"])
    assert [json.loads(options)[key] for key in ("method", "parallel_drafting")] == ["eagle3", True]
    assert [*sections(kind=P_EAGLE)] == ["vllm"]
    assert sections(kind=MEDUSA) == {}
    options = {"revision": None, "judged": None, "sampling": SamplingConfig()}
    text = launch_text("some/target", gammas={}, kind=MEDUSA, **options)
    assert "No engine loads Medusa heads any more; draftkit's own server does." in text


def test_sglang_drafts_a_chain_with_a_model_of_its_own() -> None:
    (words,) = commands(sections("/models/my target")["sglang"])
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert options_of(words[3:]) == {
        "--model-path": "/models/my target",
        "--host": "127.0.0.1",
        "--speculative-algorithm": "STANDALONE",
        "--speculative-draft-model-path": "./hf",
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "3",
    }


@pytest.mark.parametrize(
    ("target", "remote", "source"), [("some/target", ["--remote"], "-m"), ("/a b", [], "-i")]
)
def test_converters_are_called_on_both_models(target: str, remote: list[str], source: str) -> None:
    """A target on the hub, and a folder."""
    convert = ["python", "convert_hf_to_gguf.py", "--outtype", "q8_0", "--outfile"]
    of_target, of_draft, server = commands(sections(target)["llamacpp"])
    assert of_target == [*convert, "target.gguf", *remote, target]
    assert of_draft == [*convert, "draft.gguf", "./hf"]
    options = options_of(server[1:])
    assert server[0] == "llama-server"
    assert (options["-m"], options["-md"]) == ("target.gguf", "draft.gguf")
    assert options["--spec-draft-n-max"] == "2"
    build = ["python", "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    build += ["-c", "onnx/cache", "-o"]
    assert commands(sections(target)["onnx"]) == [
        [*build, "onnx/target", source, target],
        [*build, "onnx/draft", "-i", "./hf"],
    ]


def test_the_program_of_onnx_joins_both_models(tmp_path: Path) -> None:
    """In one configuration, searched as is served, of what both have room for."""
    for name, length in (("target", 64), ("draft", 32)):
        model = {"decoder": {"filename": f"{name}.onnx"}, "vocab_size": 9, "context_length": length}
        folder = tmp_path / "onnx" / name
        folder.mkdir(parents=True)
        config = {"model": model, "search": {"top_k": 50, "num_beams": 1}}
        (folder / "genai_config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(name)
    (tmp_path / "onnxruntime_genai.py").write_text("def Model(folder):\n    raise SystemExit\n")
    (code,) = blocks(sections(sampling=SamplingConfig(temperature=0.0, top_k=7))["onnx"], "python")
    (tmp_path / "generate.py").write_text(code)
    subprocess.run([sys.executable, "generate.py"], cwd=tmp_path, check=True)
    made = json.loads((tmp_path / "onnx" / "genai_config.json").read_text())
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
    assert made["speculative"] == {"max_draft_tokens": 5}
    assert (tmp_path / "onnx" / "tokenizer.json").read_text() == "target"


def test_the_program_for_transformers_takes_the_commit_that_was_judged() -> None:
    (code,) = blocks(sections("maker/model", revision="c" * 40)["hf"], "python")
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    loads = [ast.unparse(call) for call in calls if "from_pretrained" in ast.unparse(call.func)]
    of_target = [load for load in loads if "maker/model" in load]
    assert len(of_target) == 2  # its tokenizer and itself
    assert all(f"revision='{'c' * 40}'" in load for load in of_target)
    assert "num_assistant_tokens = 5" in code
    assert "revision" not in sections()["hf"]


# What to expect


@pytest.mark.parametrize("engine", LAUNCHED)
def test_each_engine_is_launched_at_and_expected_to_accept_what_its_setting_does(
    engine: str,
) -> None:
    rows = {(row["engine"], row["setting"]): row for row in judged()["engines"]}
    row = rows[LAUNCHED[engine]]
    best = expected(judged(), engine)
    assert best is not None
    assert (best["gamma"], best["acceptance_length"]) == tuple(row["at_best_gamma"].values())
    assert best["gamma"] == launched_gammas(judged(), 3, kind="plain")[engine]
    assert best["acceptance"] == row["acceptance"]
    mean = row["at_best_gamma"]["acceptance_length"]["mean"]
    text = sections()[engine]
    assert "- at temperature 1, computed" in text
    assert re.search(rf"{mean:.2f} \[.*\] tokens a pass at gamma {best['gamma']}\n", text)
    assert launched_gammas(None, 3, kind="plain")[engine] == 3
    assert expected(None, engine) is None
    assert "- no evaluation says what to expect" in sections(judged=None)[engine]
    one_by_one = "in one pass in vLLM; here one by one" in sections(kind=PARD)[engine]
    assert one_by_one == (engine != "vllm")


def test_gammas_are_those_of_how_the_engine_drafts() -> None:
    cut = judged()
    cut["best_gamma_by_mode"][UNCUT] = 3  # of a draft that vLLM does not cut
    for row in cut["engines"]:
        if (row["engine"], row["setting"]) == LAUNCHED["vllm"]:
            row["mode"] = UNCUT
    gammas = launched_gammas(cut, 1, kind="plain")
    assert [gammas[engine] for engine in ("hf", "vllm", "sglang")] == [5, 3, 2]
    # As of a proposer without a drafter, of which no engine has a row.
    without = {"batch_size": 1, "best_gamma": 4, "temperature": 1.0}
    assert {*launched_gammas(without, 1, kind="plain").values()} == {4}


@pytest.mark.parametrize(
    ("engine", "option"),
    [("sglang", "--speculative-num-steps 1"), ("llamacpp", "--spec-draft-n-max 1")],
)
def test_where_argmax_drafts_do_not_pay_the_text_says_so_and_still_starts(
    engine: str, option: str
) -> None:
    text = sections(judged=judged(argmax=0))
    why = "best gamma of argmax drafts at batch size 1, by draftkit's decoder: 0, which is not to"
    assert why in text[engine]
    assert "at gamma 1\n" in text[engine]
    assert option in text[engine]
    assert "best gamma at batch size 1, by draftkit's decoder: 5\n" in text["vllm"]
