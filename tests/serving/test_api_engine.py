"""The API over the real engine: what clients get is the target's, each gets its own."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from draftkit.serving.engine import Engine
from tests.serving import running
from tests.serving.fakes import NAME, TOKENIZER, ask, completion, events, serving, wait_for
from tests.serving.test_api import client_for

CLIENTS, REQUESTS = 8, 4


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running.serving() as found:
        yield found


@pytest.fixture(scope="module")
def address(engine: Engine) -> Iterator[str]:
    with serving(engine) as found:
        yield found


def own(prompt: str, new: int) -> str:
    """Greedy decoding by whole passes of the target."""
    ids = TOKENIZER(prompt)["input_ids"]
    count = len(ids)
    with torch.no_grad():
        for _ in range(new):
            ids.append(int(running.TARGET.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return running.bytes_text(ids[count:])


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
    assert all("speculative" not in chunk for chunk in streamed[:-2])


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_row(streams: bool) -> None:
    with (
        running.serving(slots=1, max_length=120) as engine,
        serving(engine) as address,
    ):
        decode = engine.decoder.round
        engine.decoder.round = lambda: time.sleep(0.05) or decode()  # type: ignore[method-assign]
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
        assert ask(address, "/v1/completions", completion(max_tokens=2)).status == 200
        assert engine.counters().generated_tokens == tokens + 2
