"""The API over the real engine: what clients get is the target's, each gets its own."""

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch
from openai import OpenAI

from draftkit.config import ServeConfig
from draftkit.models.adapter import Adapter
from draftkit.serving.engine import Engine
from draftkit.serving.texts import Texts
from tests import tiny
from tests.serving import running
from tests.serving.fakes import NAME, TOKENIZER, ask, completion, events, serving, wait_for
from tests.serving.test_api import client_for

TARGET, DRAFT = tiny.pair()
CLIENTS, REQUESTS = 8, 4
PROMPT = "Say something: "
TEXTS = Texts(TOKENIZER, tiny.VOCAB_SIZE)
ID_OF_BYTES = {TEXTS.token_bytes(token_id): token_id for token_id in range(tiny.VOCAB_SIZE)}


def draft() -> Adapter:
    return copy.deepcopy(DRAFT)


@pytest.fixture(scope="module")
def disk() -> running.Disk:
    return running.Disk()


@pytest.fixture(scope="module")
def engine(disk: running.Disk) -> Iterator[Engine]:
    with running.serving(TARGET, draft, disk=disk) as found:
        yield found


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with serving(engine, ServeConfig(top_logprobs=5)) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[OpenAI]:
    with client_for(address) as found:
        yield found


def own_ids(prompt: str, new: int) -> list[int]:
    """Greedy decoding by whole passes of the target."""
    ids = TOKENIZER(prompt)["input_ids"]
    count = len(ids)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(TARGET.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[count:]


def own(prompt: str, new: int) -> str:
    return running.bytes_text(own_ids(prompt, new))


def slowed(engine: Engine, seconds: float) -> threading.Event:
    """Let every round of `engine` wait for the event that is returned, `seconds` at most."""
    go, decode = threading.Event(), engine.decoder.round

    def slow() -> Any:
        go.wait(seconds)
        return decode()

    engine.decoder.round = slow  # type: ignore[method-assign]
    return go


def test_greedy_answers_are_the_targets_own(client: OpenAI) -> None:
    expected = own(PROMPT, 24)
    options: Any = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**options, n=2)
    assert [choice.text for choice in whole.choices] == [expected] * 2
    parts = client.completions.create(**options, stream=True)
    assert "".join(part.choices[0].text for part in parts) == expected


def test_a_seed_says_the_same_twice_and_in_company(client: OpenAI) -> None:
    def said(seed: int | None, count: int = 2) -> list[str]:
        made = client.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=20, seed=seed, n=count, top_p=0.95
        )
        return [choice.text for choice in made.choices]

    alone = said(7)
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(said, [7, None, 7, None, 8, 7, -2, 2**63 - 1]))
    assert together[0] == together[2] == together[5] == alone
    others = [together[place][0] for place in (1, 3, 4, 6, 7)]
    assert len({*others, alone[0]}) == 6
    assert said(7, count=1) == alone[:1]


def test_log_probs_are_the_targets_at_temperature_one(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=24,
        logprobs=True,
        top_logprobs=3,
        temperature=0.6,
        extra_body={"repetition_penalty": 1.3, "top_k": 40},
    )
    found = made.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    prompt = TOKENIZER("user: Hi\nassistant: ")["input_ids"]
    ids = [ID_OF_BYTES[bytes(entry.bytes or [])] for entry in found.content]
    with torch.no_grad():
        logits = TARGET.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    scores = logits.log_softmax(-1)
    expected = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor([entry.logprob for entry in found.content]), expected, atol=1e-4, rtol=0
    )
    best = scores.topk(3)
    tops = [[ID_OF_BYTES[bytes(top.bytes or [])] for top in e.top_logprobs] for e in found.content]
    assert tops == best.indices.tolist()


def test_many_clients_each_get_their_own_answer(address: str, engine: Engine) -> None:
    """None lost, none mixed, streamed or whole."""
    prompts = {number: f"Client {number}: " for number in range(CLIENTS)}
    expected = {number: own(prompt, 10 + number) for number, prompt in prompts.items()}
    before = engine.counters().generated_tokens

    def talk(number: int) -> list[str]:
        said = []
        with client_for(address) as client:
            for turn in range(REQUESTS):
                options: Any = {"model": NAME, "prompt": prompts[number], "temperature": 0}
                options |= {"max_tokens": 10 + number}
                if turn % 2:
                    said.append(client.completions.create(**options).choices[0].text)
                else:
                    parts = client.completions.create(**options, stream=True)
                    said.append("".join(part.choices[0].text for part in parts))
        return said

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = dict(zip(prompts, pool.map(talk, prompts), strict=True))
    assert found == {number: [expected[number]] * REQUESTS for number in prompts}
    tokens = REQUESTS * sum(10 + number for number in prompts)
    assert engine.counters().generated_tokens - before == tokens


def test_a_stop_string_ends_the_text_and_its_scores(client: OpenAI) -> None:
    text = own(PROMPT, 30)
    stop = text[12:14]
    made = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=30, temperature=0, stop=stop, logprobs=0
    )
    assert made.choices[0].text == text[: text.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.choices[0].logprobs is not None
    assert len(made.choices[0].logprobs.tokens or []) == made.usage.completion_tokens


def test_the_statistics_of_a_response_are_its_own(address: str) -> None:
    made = ask(address, "/v1/completions", completion(max_tokens=30, seed=3)).json
    found = made["speculative"]
    assert 0 < found["accepted"] <= found["drafted"]
    assert found["acceptance_length"] == 1 + found["accepted"] / found["rounds"]
    assert found["rounds"] + found["accepted"] >= 30 > found["accepted"]
    assert 0 < found["alpha"] <= 1
    streamed = events(
        ask(address, "/v1/completions", completion(max_tokens=30, seed=3, stream=True)).body
    )
    assert streamed[-2]["speculative"] == found


def test_nothing_of_an_opted_out_request_is_recorded(address: str, disk: running.Disk) -> None:
    def ids(text: str) -> list[int]:
        return TOKENIZER(text)["input_ids"]

    secret, public = "a secret of mine", "what all may see"
    ask(address, "/v1/completions", completion(prompt=secret), {"X-Draftkit-Record": "no"})
    ask(address, "/v1/completions", completion(prompt=public))
    assert wait_for(lambda: any(e.record.prompt_ids == ids(public) for e in list(disk.entries)))
    assert not any(entry.record.prompt_ids == ids(secret) for entry in disk.entries)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_row(streams: bool) -> None:
    with (
        running.serving(TARGET, draft, slots=1, max_length=120) as engine,
        serving(engine) as address,
    ):
        go = slowed(engine, 0.05)
        body = completion(max_tokens=100, stream=streams)
        url = f"http://{address}/v1/completions"
        with httpx.Client(trust_env=False) as client:
            if streams:
                with client.stream("POST", url, json=body) as answer:
                    next(answer.iter_raw())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(url, json=body, timeout=0.3)
        assert wait_for(lambda: engine.counters().running == 0)
        tokens = engine.counters().generated_tokens
        assert 0 < tokens < 100
        go.set()
        assert ask(address, "/v1/completions", completion(max_tokens=2)).status == 200
        assert engine.counters().generated_tokens == tokens + 2


def test_a_request_that_waits_too_long_is_told_so() -> None:
    with (
        running.serving(TARGET, draft, slots=1) as engine,
        serving(engine, ServeConfig(request_seconds=0.2)) as address,
        client_for(address) as client,
    ):
        slowed(engine, 0.1)
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model=NAME, prompt=PROMPT, max_tokens=60)
        assert caught.value.status_code == 408
        assert wait_for(lambda: engine.counters().running == 0)


def test_a_full_queue_refuses_and_recovers() -> None:
    with (
        running.serving(TARGET, draft, slots=1, queue=1) as engine,
        serving(engine) as address,
    ):
        go = slowed(engine, 30)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(ask, address, "/v1/completions", completion())
            assert wait_for(lambda: engine.counters().running == 1)
            second = pool.submit(ask, address, "/v1/completions", completion())
            assert wait_for(lambda: engine.counters().queued == 1)
            refused = ask(address, "/v1/completions", completion())
            go.set()
            assert {first.result().status, second.result().status} == {200}
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert ask(address, "/v1/completions", completion()).status == 200
