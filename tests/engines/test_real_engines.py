"""Real engines on exported pairs: they load them, and greedy answers stay their own.

Run by `make engines`; each engine is skipped where it is not installed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from draftkit.config import ModelConfig
from draftkit.data.prompts import read_splits
from draftkit.models.loading import load_tokenizer, save_model
from pipelines.configuration import compose_config
from pipelines.texts import texts
from tests import tiny
from tests.engines.drivers import DRIVERS, Launch, environment_of, llamacpp
from tests.engines.gguf import write_gguf
from tests.engines.pairs import EMBEDDED, ROWS, SHAPES, text_rows, trained
from tests.engines.study import measure

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

PROMPTS, TOKENS, GAMMA = 20, 32, 4
STEPS = 60  # of training
VOCABULARY = 4096


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Briefly trained targets, each with a disturbed copy of itself, which agrees in part."""
    root = tmp_path_factory.mktemp("pairs")
    tokenizer = load_tokenizer(ModelConfig(path=str(EMBEDDED)), "target")
    rows = text_rows(STEPS * ROWS)
    for shape in SHAPES:
        target = trained(shape, 4, rows, seed=0)
        save_model(target, tokenizer, root / shape / "target")
        save_model(tiny.related(target, noise=0.3), tokenizer, root / shape / "draft")
    return {shape: root / shape for shape in SHAPES}


def installed(engine: str) -> None:
    """Skip the test, with the reason, where `engine` is not installed."""
    try:
        environment_of(engine)
    except ValueError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("engine", DRIVERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_exported_pair_is_loaded_and_greedy_answers_stay_the_engines_own(
    tmp_path: Path, pairs: dict[str, Path], shape: str, engine: str
) -> None:
    installed(engine)
    sides = (pairs[shape] / "target", pairs[shape] / "draft")
    summary = measure(engine, tmp_path, *sides, temperatures=[0.0], count=PROMPTS)
    assert [one["drafts"] for one in summary["greedy"]] == list(DRIVERS[engine].drafts)
    for one in summary["greedy"]:
        assert one == one | {"compared": PROMPTS, "same_as_plain": PROMPTS}
    for cell in summary["cells"]:
        assert cell["agrees"]
        assert cell["counted"]["mean"] > 1.05  # it did speculate


@pytest.fixture
def prompts(tmp_path: Path) -> list[list[int]]:
    text = ["data.max_rows=200", "data.domains=[python]"]
    config = compose_config([f"root={tmp_path}", "tracker=none", *text])
    examples = read_splits(texts.ensure(config)).test[:PROMPTS]
    return [list(one.prompt_ids) for one in examples]


Position = tuple[list[int], Any]  # the ids so far, and the log-probability of every next one


def log_probs_of_server(launch: Launch, prompts: list[list[int]]) -> Iterator[Position]:
    """What llama-server says of each next token while it continues `prompts`, one at a time.

    One that is a part of a character it says nothing of.
    """
    with llamacpp(launch) as server, httpx.Client(timeout=300) as client:
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(TOKENS):
                request = {
                    **{"prompt": ids, "n_predict": 1, "temperature": 0, "samplers": []},
                    **{"n_probs": VOCABULARY, "return_tokens": True, "cache_prompt": True},
                }
                made = client.post(f"{server.url}/completion", json=request).json()
                for position in made.get("completion_probabilities", []):
                    row = torch.full((VOCABULARY,), -torch.inf)
                    for one in position["top_logprobs"]:
                        row[one["id"]] = one["logprob"]
                    yield list(ids), row
                ids += made["tokens"][:1]


@pytest.mark.parametrize("name", ["embedded", *SHAPES])
def test_log_probabilities_of_llama_cpp_are_those_of_the_folder(
    tmp_path: Path, pairs: dict[str, Path], prompts: list[list[int]], name: str
) -> None:
    """F32 file and caches against float32 Hugging Face, read by llama-server's n_probs."""
    installed("llamacpp")
    folder = EMBEDDED if name == "embedded" else pairs[name] / "target"
    model = ModelConfig(path=str(folder))
    (tmp_path / "llamacpp").mkdir()
    write_gguf(model, tmp_path / "llamacpp" / "target-f32.gguf", kind="f32", key="target")
    launch = Launch(
        folder=tmp_path,
        target=str(folder),
        gamma=GAMMA,
        length=512,
        environment=environment_of("llamacpp"),
        log=tmp_path / "log",
    )
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert len(load_tokenizer(model, "target")) == VOCABULARY
    largest, positions = 0.0, 0
    for ids, row in log_probs_of_server(launch, prompts):
        with torch.no_grad():
            expected = own(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        likely = expected > -60  # below, a float32 probability has no digits
        largest = max(largest, float((row - expected).abs()[likely].max()))
        positions += 1
    assert positions >= 500
    assert largest < 1e-2, (largest, positions)
