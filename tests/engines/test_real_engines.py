"""Real engines on exported pairs: they load them, and count what is predicted of them.

Run by `pytest -m engines` after `make engines`; an engine that is not installed is skipped.
"""

import os
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftkit.config import SamplingConfig, TargetConfig
from draftkit.engines.launch import launch_text
from draftkit.models.files import ModelFolder
from draftkit.models.loading import save_model
from pipelines.command import launch
from pipelines.configuration import compose_config
from pipelines.plan import CERTIFY
from tests import tiny
from tests.engines import study
from tests.engines.environments import FOLDER, missing
from tests.engines.pairs import EMBEDDED, ROWS, SHAPES, text_rows, trained
from tests.engines.servers import DRAFTS, NOTHING, PLUGIN, Launch, export_pair, serving

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPTS, TOKENS = 20, 32
STEPS = 60  # of training
KINDS = ("sh", "python")  # of blocks in launch.md


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Briefly trained targets, each with a disturbed copy of itself, which agrees in part."""
    root = tmp_path_factory.mktemp("pairs")
    tokenizer = ModelFolder(TargetConfig(path=str(EMBEDDED))).tokenizer
    rows = text_rows(STEPS * ROWS)
    for shape in SHAPES:
        target = trained(shape, 4, rows, seed=0)
        save_model(target, tokenizer, root / shape / "target")
        save_model(tiny.related(target, noise=0.3), tokenizer, root / shape / "draft")
    return {shape: root / shape for shape in SHAPES}


def installed(engine: str) -> None:
    """Skip the test, with the reason, where `engine` is not installed."""
    if (reason := missing(engine)) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("engine", DRAFTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_exported_pair_is_loaded_and_counts_what_is_predicted(
    tmp_path: Path,
    pairs: dict[str, Path],
    shape: str,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(engine)
    monkeypatch.setattr(study, "TEMPERATURES", (0.0,))
    sizes = {"evaluate__prompts": PROMPTS, "evaluate__max_new_tokens": TOKENS}
    sides = (pairs[shape] / "target", pairs[shape] / "draft")
    rows = [*study.measured(engine, tmp_path, *sides, **sizes)]
    assert [row["drafts"] for row in rows] == list(DRAFTS[engine])
    for row in rows:
        assert row["counted"]["mean"] > 1.05  # it did speculate
        low, high = row["difference"]["ci95"]
        assert low <= 0 <= high


@pytest.mark.parametrize("engine", DRAFTS)
def test_greedy_answers_are_the_targets_own(
    tmp_path: Path, pairs: dict[str, Path], engine: str
) -> None:
    installed(engine)
    target, draft = (pairs["llama"] / side for side in ("target", "draft"))
    export_pair(engine, tmp_path, target, draft, gamma=4)
    prompts = [row[:16].tolist() for row in text_rows(PROMPTS)]
    model: Any = AutoModelForCausalLM.from_pretrained(target)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
    own = [model.generate(torch.tensor([one]), **options)[0, 16:].tolist() for one in prompts]
    launch = Launch(folder=tmp_path, target=target, gamma=4, drafts=DRAFTS[engine][-1], length=128)
    with serving(engine, launch) as url, httpx.Client(base_url=url, timeout=300) as client:
        assert [greedy(client, engine, prompt) for prompt in prompts] == own


@pytest.mark.parametrize(("plugin", "certified"), [("", False), (PLUGIN, True)])
def test_the_certificate_fails_vllms_broken_kernel_and_passes_the_mended_one(
    tmp_path: Path, pairs: dict[str, Path], plugin: str, certified: bool
) -> None:
    installed("vllm")
    target, draft = (pairs["llama"] / side for side in ("target", "draft"))
    sides = {}
    with ExitStack() as stack:
        for side, drafts in (("with", "probabilistic"), ("without", NOTHING)):
            export_pair("vllm", tmp_path / side, target, draft, gamma=4)
            one = Launch(
                folder=tmp_path / side,
                target=target,
                gamma=4,
                drafts=drafts,
                length=128,
                plugin=plugin,
                rows=32,
            )
            sides[side] = stack.enter_context(serving("vllm", one))
        summary = launch(
            CERTIFY,
            compose_config(
                [
                    *("+experiment=evaluate_pair", "name=certificate", "data=corpus"),
                    *(f"root={tmp_path}", "tracker=none", "decode.gamma=4"),
                    *(f"target.path={target}", f"draft.path={draft}", "sampling.temperature=1"),
                    *(
                        "data.max_length=64",
                        "data.max_rows=300",
                        "evaluate.prompts=24",
                        "evaluate.max_new_tokens=32",
                    ),
                    *(f"certify.{side}={url}" for side, url in sides.items()),
                    "evaluate.batch_size=32",
                ]
            ),
        )
    assert summary["greedy"]["passed"]
    assert summary["certified"] is certified


def greedy(client: httpx.Client, engine: str, prompt: list[int]) -> list[int]:
    """The ids of an answer."""
    body: dict[str, Any] = {"prompt": prompt, "temperature": 0}
    if engine == "llamacpp":
        body |= {"n_predict": TOKENS, "return_tokens": True, "samplers": ["temperature"]}
        return client.post("/completion", json=body).json()["tokens"]
    body |= {"max_tokens": TOKENS, "return_token_ids": True}
    return client.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]


def test_the_exported_program_of_onnx_builds_both_models_and_drafts(
    tmp_path: Path, pairs: dict[str, Path]
) -> None:
    installed("onnx")
    target, draft = (pairs["llama"] / side for side in ("target", "draft"))
    export_pair("onnx", tmp_path, target, draft, gamma=4)
    given = {"revision": None, "judged": None, "kind": "plain", "sampling": SamplingConfig()}
    text = launch_text(str(target), gammas={"onnx": 4}, **given)
    ((commands,), (code,)) = (re.findall(rf"```{k}\n(.*?)```", text, re.DOTALL) for k in KINDS)
    environment = os.environ | {"PATH": f"{FOLDER}/onnx/bin:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    for command in (["sh", "-ec", commands], ["python", "-c", code]):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
    accepted = re.search(r"'draft_tokens_accepted': (\d+)", done.stdout)
    assert accepted is not None
    assert int(accepted[1]) > 0
