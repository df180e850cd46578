"""The recording proxy before a real vLLM: OpenAI's client sees no difference, ids are the engine's.

Run by `pytest -m engines` after `make engines`.
"""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from draftkit.models.loading import save_model
from pipelines.configuration import compose_config
from tests import tiny
from tests.engines.pairs import EMBEDDED
from tests.engines.servers import NOTHING, Launch, serving
from tests.engines.test_real_engines import installed
from tests.launching import Forked
from tests.online.traffic import stored
from tests.services import buffer_of
from tests.serving.fakes import wait_for
from tests.test_capture import words
from tests.tiny import byte_tokenizer

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

SHAPE: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.0}
USAGE = {"stream_options": {"include_usage": True}}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}assistant:"
)
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once?"}]
CHAT: dict[str, Any] = {"messages": TURNS, "max_tokens": 12, "temperature": 0.0}
SCORES = {"logprobs": True, "top_logprobs": 2}
NOTHING_ASKED = {"type": "object", "properties": {}, "additionalProperties": False}
NAMED = {"type": "function", "function": {"name": "clock"}}
TOOL = {"tools": [NAMED | {"function": {"name": "clock", "parameters": NOTHING_ASKED}}]}
CALL = {**CHAT, **TOOL, "tool_choice": NAMED, "max_tokens": 64}
ASKED: list[dict[str, Any]] = [
    SHAPE,
    {**SHAPE, "n": 3, "temperature": 1.0, "seed": 5},
    {**SHAPE, "prompt": ["The cat", "A dog"], "stop": [" a"], "logprobs": 2},
    {**SHAPE, "prompt": [5, 9, 300], "frequency_penalty": 0.5},
    {**SHAPE, "stream": True},
    {**SHAPE, "stream": True, "n": 2, "temperature": 0.7, "seed": 1, **USAGE},
    {**SHAPE, "stream": True, "logprobs": 2},
    CHAT,
    {**CHAT, **SCORES},
    {**CHAT, "n": 2, "temperature": 1.0, "seed": 3, "stream": True, **SCORES, **USAGE},
    {**CHAT, **TOOL},
    {**CHAT, **TOOL, "stream": True},
    CALL,
    {**CALL, "stream": True},
    {**CHAT, "messages": [*TURNS, {"role": "assistant", "content": "There"}]},
    {**CHAT, "messages": []},
    {**SHAPE, "extra_body": {"return_token_ids": True}},
    {**SHAPE, "model": "another"},
    {**SHAPE, "max_tokens": 10_000},
]
LONG = 100  # tokens of an answer that nobody waits for
RECORDED = 1 + 3 + 2 + 0 + 1 + 2 + 1 + 1 + 1 + 2 + 1 + 1 + 0 + 0 + 1 + 0 + 1 + 0 + 0
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def answer(client: openai.OpenAI, body: dict[str, Any]) -> list[Any]:
    """All that a client sees of it, but for random names and times."""
    try:
        asked: Any = client.chat.completions if "messages" in body else client.completions
        made = asked.create(**{"model": str(EMBEDDED), **body})
        parts = list(made) if body.get("stream") else [made]
    except openai.APIStatusError as error:
        return [error.status_code, error.body]
    return [plain(part.model_dump()) for part in parts]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if k not in ("id", "created", "metrics")}
    return [*map(plain, value)] if isinstance(value, list) else value


def test_openais_client_sees_no_difference_before_vllm(tmp_path: Path) -> None:
    installed("vllm")
    target = tiny.model()
    save_model(target, byte_tokenizer(), tmp_path / "draft")
    pair = [f"target.path={EMBEDDED}", f"draft.path={tmp_path / 'draft'}"]
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    options = (*TOOLS, "--chat-template", str(tmp_path / "chat.jinja"))
    shape: dict[str, Any] = {"gamma": 1, "drafts": NOTHING, "length": 128, "words": options}
    launch = Launch(folder=tmp_path, target=EMBEDDED, **shape)
    with serving("vllm", launch) as url:
        arguments = words(pair, tmp_path, f"engine.url={url}", "draft.extra_tokens=never")
        with Forked("pipelines.capture", *arguments) as process:
            line = next((one for one in process.stdout if " is recorded at " in one), "")
            clients: list[Callable[..., openai.OpenAI]] = [
                lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0),
                lambda: openai.OpenAI(
                    base_url=line.rpartition(" at ")[2].strip(), api_key="k", max_retries=0
                ),
            ]
            with clients[0]() as direct, clients[1]() as passed:
                for body in ASKED:
                    assert answer(passed, body) == answer(direct, body), body
                told = {"extra_body": {"return_token_ids": True}}
                (own,) = answer(direct, SHAPE | told)
                (chat,) = answer(direct, CHAT | told)
                (called,) = answer(passed, CALL)
                with passed.completions.create(
                    **{"model": str(EMBEDDED), **SHAPE, "max_tokens": LONG, "stream": True}
                ) as left:
                    next(iter(left))
            records = buffer_of(compose_config(arguments))
            assert wait_for(lambda: len(stored(records)) >= RECORDED)
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        # Who left may have had the answer, before the proxy noticed.
        kept = [one for one in stored(records) if len(one.output_ids) < LONG]
        assert len(kept) == RECORDED
        message = called["choices"][0]["message"]
        assert message["tool_calls"], message
        same = [one for one in kept if one.sampling["temperature"] == 0.0 and one.row == 0]
        (choice,), (turn,) = own["choices"], chat["choices"]
        for ids, greedy in (
            ((choice["prompt_token_ids"], choice["token_ids"]), 4),
            ((chat["prompt_token_ids"], turn["token_ids"]), 2),
        ):
            assert sum((one.prompt_ids, one.output_ids) == ids for one in same) == greedy
