"""Twelve requests over HTTP at fixed seeds, and all that a client is told but for
names, times and the last digits of numbers.

`python -m tests.serving.test_transcripts` writes what is expected anew.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import running
from tests.serving.fakes import Reply, ask, chat, completion, events, serving

EXPECTED = Path(__file__).with_name("transcripts.json")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
HEADERS = ("content-type", "retry-after", "cache-control", "www-authenticate")
NAMES = re.compile(r"\b(chatcmpl|cmpl)-[0-9a-f]+$")  # of replies
ROUNDED = 3  # digits: another machine adds in another order

REQUESTS: dict[str, tuple[str, Any]] = {
    "a completion": (COMPLETIONS, completion(max_tokens=20, seed=5)),
    "several prompts, choices and stop strings": (
        COMPLETIONS,
        completion(prompt=["Say: ", "Tell: "], n=2, best_of=2, seed=3, stop=["1v", "MP", "\x00"])
        | {"user": "me", "frequency_penalty": 0.0, "suffix": "", "max_tokens": 24},
    ),
    "scores of an echoed prompt": (
        COMPLETIONS,
        completion(prompt="Grüße", echo=True, logprobs=2, max_tokens=3, temperature=0),
    ),
    "a stream with its usage": (
        COMPLETIONS,
        completion(max_tokens=15, seed=7, top_p=0.9, top_k=-1, logprobs=1) | STREAM,
    ),
    "a stream that a stop token ends": (
        COMPLETIONS,
        completion(max_tokens=40, seed=11, stop_token_ids=[*range(0, 250, 9)], stream=True),
    ),
    "a chat": (CHAT, chat(max_completion_tokens=12, seed=1, logprobs=True, top_logprobs=2)),
    "a chat as a stream with usage in each chunk": (
        CHAT,
        chat(max_tokens=9, seed=2, stream=True, tools=[], tool_choice="none", logit_bias={})
        | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "a value out of bounds": (COMPLETIONS, completion(n=17)),
    "a parameter that there is none of": (COMPLETIONS, completion(zebra=1)),
    "a prompt that is too long": (COMPLETIONS, completion(prompt="a" * 90, max_tokens=40)),
    "another model": (CHAT, chat(model="other")),
    "models": ("/v1/models", None),
}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running.serving() as engine, serving(engine) as found:
        yield found


def steady(value: Any) -> Any:
    """A reply without what another run would tell otherwise."""
    if isinstance(value, dict):
        return {k: 0 if k == "created" else steady(one) for k, one in value.items()}
    if isinstance(value, list):
        return [steady(one) for one in value]
    if isinstance(value, float):
        return round(value, ROUNDED)
    return NAMES.sub(r"\1-NAME", value) if isinstance(value, str) else value


def told(reply: Reply) -> dict[str, Any]:
    """The reply as it is stored: the order of keys is part of it."""
    headers = {name: reply.headers[name] for name in HEADERS if name in reply.headers}
    streams = headers["content-type"].startswith("text/event-stream")
    body = events(reply.body) if streams else reply.json
    return {"status": reply.status, "headers": headers, "body": steady(body)}


def metrics(address: str) -> list[str]:
    """Types, names and labels of what Prometheus reads, without the time since when."""
    text = ask(address, "/metrics").body.decode()
    lines = [line for line in text.splitlines() if not line.startswith("# HELP")]
    names = [line if line.startswith("#") else line.rpartition(" ")[0] for line in lines]
    buckets = (re.sub(r'le="[^"]*",?', "", name) for name in names if "_created" not in name)
    return sorted(set(buckets))


def transcript(address: str) -> dict[str, Any]:
    """All replies in turn, and the metrics that are there after them."""
    replies = {name: told(ask(address, *request)) for name, request in REQUESTS.items()}
    return replies | {"metrics": metrics(address)}


def written(found: dict[str, Any]) -> str:
    """JSON with a line for each reply."""
    lines = (f"{json.dumps(name)}: {json.dumps(reply)}" for name, reply in found.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def test_clients_are_told_what_they_always_were(address: str) -> None:
    expected = json.loads(EXPECTED.read_text(encoding="utf-8"))
    found = json.loads(written(transcript(address)))
    for name, reply in expected.items():
        assert json.dumps(found.pop(name)) == json.dumps(reply), name
    assert found == {}


if __name__ == "__main__":
    with running.serving() as engine, serving(engine) as found_at:
        EXPECTED.write_text(written(transcript(found_at)), encoding="utf-8")
