"""Chats through the commands: what is trained on, judged on and served is what the template gives.

Pairs shaped as Qwen3 (ChatML, reasoning dropped from history) and as Llama 3 (headers, a date).
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast as Fast

from draftkit.artifacts import read_json
from draftkit.config import Config
from draftkit.data.rollouts import read_parts, read_records
from draftkit.models.files import ModelFolder
from draftkit.models.loading import save_model
from pipelines.command import launch
from pipelines.configuration import compose_config
from pipelines.plan import DISTILL
from tests import tiny
from tests.launching import Forked
from tests.online.traffic import stored
from tests.services import buffer_of
from tests.serving.fakes import ask
from tests.smoke import smoke, splits_of
from tests.templates import chat, headers, thinking
from tests.test_serve import address_of

pytestmark = pytest.mark.usefixtures("one_pass")

CONTEXT = 512
KINDS: dict[str, tuple[str, Callable[[], Fast], dict[str, Any]]] = {
    "qwen3": ("qwen3", thinking, {}),
    "qwen3 without thinking": ("qwen3", thinking, {"enable_thinking": False}),
    "llama3": ("llama", headers, {"date_string": "1 May"}),
}
SHARES = ("prompts_cut_share", "completions_cut_share", "rows_dropped_share")


def conversation(number: int) -> list[dict[str, str]]:
    thought = f"<think>\nof {number}\n</think>\n\n"
    return chat(f"say {number}", f"{thought}it is {number}", "and then?", f"{thought}no more")


def save_pair(folder: Path, architecture: str, tokenizer: Fast, **changes: Any) -> None:
    options = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, **changes}
    target = tiny.model(architecture, **options)
    save_model(target, tokenizer, folder / "target")
    save_model(tiny.related(target), tokenizer, folder / "draft")


def given_in(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """The overrides that name the pair in `folder`, and `rows`."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = [f"target.path={folder / 'target'}", f"draft.path={folder / 'draft'}"]
    return [*pair, "data=local", f"data.path={path}"]


def config_of(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Config:
    """The smallest experiment on the pair in `folder` and on `rows`."""
    small = ["data.test_fraction=0.3", "optim.max_steps=2", "optim.eval_steps=2"]
    return smoke(folder / "outputs", *given_in(folder, rows), *small, *overrides)


def served(words: list[str], chats: list[list[dict[str, str]]]) -> list[list[int]]:
    """The prompts that a server of `words` has read of `chats`, as it recorded them."""
    fixed = ["name=served", "serve.port=0", "hardware.threads=1", "decode.compile='false'"]
    prompts = []
    with Forked("pipelines.serve", *words, *fixed) as server:
        address = address_of(server)
        for turns in chats:
            body = {"model": "target", "messages": turns, "max_tokens": 4, "temperature": 0}
            made = ask(address, "/v1/chat/completions", body)
            assert made.status == 200, made.body
            prompts.append(made.json["usage"]["prompt_tokens"])
        server.send_signal(signal.SIGINT)
        assert server.wait() == 0
    buffer = buffer_of(compose_config([*words, *fixed]))
    recorded = [one.prompt_ids for one in stored(buffer)]
    buffer.close()
    assert sorted(map(len, recorded)) == sorted(prompts)
    return recorded


@pytest.mark.parametrize(
    "kind",
    ["qwen3", *(pytest.param(one, marks=pytest.mark.soak) for one in [*KINDS][1:])],
)
def test_ids_are_those_of_the_template_from_the_data_to_the_server(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture, make, options = KINDS[kind]
    save_pair(tmp_path, architecture, make())
    chats = [conversation(number) for number in range(24)]
    words = [f"data.template_options={json.dumps(options)}".replace('"', "")] if options else []
    words += ["data.max_prompt_tokens=300", "data.max_completion_tokens=24"]
    config = config_of(tmp_path, [{"messages": turns} for turns in chats], *words)
    launch(DISTILL, config)

    tokenizer = ModelFolder(config.target).tokenizer
    seen = [turns[:n] for turns in chats for n in (1, 3)]
    by_template = [
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, **options)["input_ids"]
        for turns in seen
    ]
    splits, shared = splits_of(config), tmp_path / "outputs" / "shared"
    read = [e.prompt_ids for part in (splits.train, splits.validation, splits.test) for e in part]
    assert sorted(read) == sorted(by_template)
    rows = given_in(tmp_path, [{"messages": turns} for turns in chats])
    served_by = [*rows, *words, f"root={tmp_path / 'service'}", "tracker=none"]
    assert sorted(served(served_by, seen[:4])) == sorted(by_template[:4])

    (rollouts,), (contexts,) = shared.glob("generate/*"), shared.glob("contexts/*")
    sampled, judged = read_parts(rollouts), read_records(contexts / "test.parquet")
    for records in (sampled, judged):
        assert len({tuple(record.prompt_ids) for record in records}) >= 6
        assert all(record.prompt_ids in by_template for record in records)
    assert max(len(record.output_ids) for record in sampled) == 24
    printed = capsys.readouterr().out
    assert "texts: 48 prompts of at most 300 tokens, 0.0% cut; " in printed
    assert printed.count("train: the first row, ⟦what counts in the loss⟧:") == 1
    for stage in ("train", "distill", "evaluate"):
        summary = read_json(tmp_path / "outputs" / "smoke" / stage / "summary.json")
        assert [summary[name] for name in SHARES[::2]] == [0, 0]


def test_what_the_context_lowers_is_printed_and_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_pair(tmp_path, "llama", thinking(), max_position_embeddings=100)
    rows = [{"prompt": f"say {n}", "completion": "no " * 90} for n in range(30)]
    splits = splits_of(config_of(tmp_path, rows))
    assert (splits.room.new, splits.room.total) == (50, 100)
    assert max(len(example.token_ids) for example in splits.train) <= 100
    printed = capsys.readouterr().out
    assert (
        "texts: 30 prompts of at most 50 tokens, 0.0% cut; 30 answers of at most 50, 1" in printed
    )
    assert "rows of at most 100 tokens; the models' context has 100, the vocabulary" in printed
    assert "30 prompts became a user turn of the chat template" in printed


def test_a_draft_of_a_smaller_context_lowers_lengths_too(tmp_path: Path) -> None:
    save_pair(tmp_path, "llama", thinking())
    short = tiny.model(vocab_size=len(thinking()), max_position_embeddings=64)
    save_model(short, thinking(), tmp_path / "short")
    rows = [{"prompt": f"say {n}", "completion": "no"} for n in range(30)]
    whole, less = (
        splits_of(config_of(tmp_path, rows, f"draft.path={tmp_path / name}"))
        for name in ("draft", "short")
    )
    assert (whole.room.total, less.room.total) == (CONTEXT, 64)
