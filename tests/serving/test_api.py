"""The API as the official client sees it, over a real server and an engine without models."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from draftkit.config import SamplingConfig, ServeConfig
from tests.serving.fakes import (
    NAME,
    SAID,
    FakeEngine,
    ask,
    chat,
    completion,
    events,
    serving,
)

SERVED = SamplingConfig(temperature=0.7, top_k=5)


def client_for(address: str, key: str = "none") -> OpenAI:
    """The client, without the proxies that the environment may name."""
    http = httpx.Client(trust_env=False, verify=False)  # no certificates are read
    return OpenAI(
        base_url=f"http://{address}/v1", api_key=key, max_retries=0, timeout=30, http_client=http
    )


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine, sampling=SERVED) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with client_for(address) as found:
        yield found


def test_a_completion(client: OpenAI, engine: FakeEngine) -> None:
    made = client.completions.create(model=NAME, prompt="Say: ", max_tokens=16)
    assert made.choices[0].text == SAID[:14]  # two characters are of two bytes
    assert made.choices[0].finish_reason == "length"
    assert made.choices[0].logprobs is None
    assert made.model == NAME
    assert made.usage is not None
    counted = made.usage
    assert (counted.prompt_tokens, counted.completion_tokens, counted.total_tokens) == (5, 16, 21)
    job = engine.jobs[-1]
    assert (job.sampling, job.seed, job.stops, job.records) == (SERVED, None, (), True)
    assert (job.route, job.top_logprobs, job.max_new_tokens) == ("default", 0, 16)
    assert 299 < job.deadline - time.monotonic() <= 300


def test_every_parameter_reaches_the_engine(client: OpenAI, engine: FakeEngine) -> None:
    extra = {"top_k": 3, "repetition_penalty": 1.2}
    named = {"temperature": 0.5, "top_p": 0.8, "seed": 11, "stop": ["x", "yz"], "logprobs": 2}
    headers = {"X-Draftkit-Route": "code", "X-Draftkit-Record": "no"}
    body = completion(**named, max_tokens=3, extra_body=extra, extra_headers=headers)
    client.completions.create(**body)
    job = engine.jobs[-1]
    assert job.sampling == SamplingConfig(
        temperature=0.5, top_p=0.8, top_k=3, repetition_penalty=1.2
    )
    assert (job.seed, job.stops, job.top_logprobs, job.max_new_tokens) == (11, ("x", "yz"), 2, 3)
    assert (job.route, job.records) == ("code", False)


def test_prompts_and_choices_are_numbered_in_order(client: OpenAI, engine: FakeEngine) -> None:
    made = client.completions.create(model=NAME, prompt=["a", "bc"], n=2, seed=1, max_tokens=4)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    said = [SAID.encode()[row : row + 4].decode(errors="replace") for row in (0, 1)]
    assert [choice.text for choice in made.choices] == said * 2
    jobs = engine.jobs[-4:]
    assert [job.row for job in jobs] == [0, 1, 0, 1]  # a prompt's answers do not depend on others
    assert [len(job.prompt_ids) for job in jobs] == [1, 1, 2, 2]
    assert made.usage is not None
    assert made.usage.prompt_tokens == 3


def test_a_prompt_of_token_ids(client: OpenAI, engine: FakeEngine) -> None:
    made = client.completions.create(model=NAME, prompt=[1, 2, 257], max_tokens=2)
    assert engine.jobs[-1].prompt_ids == [1, 2, 257]
    assert made.choices[0].text == SAID[:2]


def test_the_default_bounds_of_an_answer(client: OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model=NAME, prompt="a")
    assert engine.jobs[-1].max_new_tokens == 16
    client.chat.completions.create(**chat())
    job = engine.jobs[-1]
    assert job.max_new_tokens == engine.max_length - len(job.prompt_ids)


def test_a_stream_is_the_same_answer_in_pieces(client: OpenAI) -> None:
    whole = client.completions.create(model=NAME, prompt="a", max_tokens=20)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = client.completions.create(**completion(max_tokens=20, **options))
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert {part.id for part in parts} == {last.id} != {whole.id}
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 20


def test_a_stream_mixes_no_choices(client: OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model=NAME, prompt="a", n=2, max_tokens=10, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {row: SAID.encode()[row : row + 10].decode() for row in (0, 1)}


def test_models(client: OpenAI, address: str) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    assert ask(address, "/v1/models").json["data"][0]["root"] == NAME  # vLLM's clients read it
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.completions.create(model="other", prompt="a")
    for name in (
        "tiny2",
        "..%2f..%2fetc%2fpasswd",
        "../health",
        "%00",
        "tiny%0d%0aX-Evil:1",
        "%ff%fe",
    ):
        assert ask(address, f"/v1/models/{name}").status == 404


def test_latencies_are_measured(client: OpenAI, address: str) -> None:
    def count(name: str) -> float:
        text = ask(address, "/metrics").body.decode()
        line = next(line for line in text.splitlines() if line.startswith(name))
        return float(line.split()[-1])

    names = ["vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"]
    names = [f"{name}_count" for name in (*names, "vllm:inter_token_latency_seconds")]
    names.append('vllm:request_success_total{finished_reason="length"')
    before = [count(name) for name in names]
    client.completions.create(model=NAME, prompt="a", max_tokens=8)
    after = [count(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 6, 1]


def test_a_full_queue() -> None:
    engine = FakeEngine(room=2)
    with serving(engine, ServeConfig(queue=3, slots=1)) as address, client_for(address) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=NAME, prompt="a", n=3)
        assert caught.value.response.headers["retry-after"] == "1"
        assert client.completions.create(model=NAME, prompt="a", n=2).choices


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("timeout", 408, "timeout"),
        ("cancelled", 503, "cancelled"),
        ("error", 500, "internal_error"),
    ],
)
def test_an_answer_that_ends_before_it_is_complete(reason: str, status: int, code: str) -> None:
    with serving(FakeEngine(ends=reason)) as address:
        whole = ask(address, "/v1/completions", completion())
        assert (whole.status, whole.error["code"]) == (status, code)
        assert whole.headers["x-should-retry"] == "false"
        streamed = events(ask(address, "/v1/completions", completion(stream=True)).body)
        assert [event["error"]["code"] for event in streamed[:-1]] == [code]
        assert streamed[-1] == "[DONE]"
        with client_for(address) as client, pytest.raises(openai.APIError):
            list(client.completions.create(model=NAME, prompt="a", stream=True))


def test_health_is_that_of_the_engine_and_a_draining_one_takes_no_more() -> None:
    engine = FakeEngine()
    with serving(engine) as address:
        assert ask(address, "/health").status == 200
        engine.is_healthy = False
        assert ask(address, "/health").status == 503
        engine.is_healthy, engine.draining = True, True
        assert ask(address, "/health").json == {"status": "draining"}
        refused = ask(address, "/v1/completions", completion())
        assert (refused.status, refused.error["code"]) == (503, "draining")


def test_an_answer_that_ended_is_not_cancelled(address: str, engine: FakeEngine) -> None:
    before = set(engine.cancelled)
    ask(address, "/v1/completions", completion())
    ask(address, "/v1/completions", completion(stream=True))
    ask(address, "/v1/chat/completions", chat())
    assert engine.cancelled == before


def test_a_bug_is_told_without_its_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(*_: Any) -> list[int]:
        raise RuntimeError("a detail of the inside")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "submit", submit)
    with serving(engine) as address:
        for streams in (True, False):
            reply = ask(address, "/v1/completions", completion(stream=streams, prompt="private"))
            assert (reply.status, reply.error["code"]) == (500, "internal_error")
            assert b"detail" not in reply.body
    assert "a detail of the inside" in caplog.text
    assert "private" not in caplog.text


def test_nothing_of_a_request_is_logged(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    for body in (completion(prompt="private"), completion(prompt="private", n=0)):
        ask(address, "/v1/completions", body)
    ask(address, "/v1/completions", b'{"prompt": "private"')
    assert "private" not in caplog.text
    assert "/v1/completions" not in caplog.text
