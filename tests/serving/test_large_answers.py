"""Answers of many tokens and alternatives: made and sent without holding up anybody else."""

import http.client
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from draftkit.config import ServeConfig
from draftkit.serving import delivery
from draftkit.serving.jobs import Job, Listener, Piece, TokenScore
from tests.serving.blocks import watched_loops
from tests.serving.fakes import SPECULATION, FakeEngine, ask, chat, completion, serving, wait_for

TOKENS, ALTERNATIVES, ROUND = 1000, 20, 5


def scores_from(start: int, count: int) -> tuple[TokenScore, ...]:
    """Of the tokens from `start` on, no two of them the same objects."""
    return tuple(
        TokenScore(
            97 + n % 26,
            -n / 7,
            tuple((33 + (n + a) % 90, -a / 3 - n / 7) for a in range(ALTERNATIVES)),
        )
        for n in range(start, start + count)
    )


class Rounds(FakeEngine):
    """All answers go on by ROUND tokens a round; those of one token a round never end."""

    def submit(self, jobs: Sequence[Job], listeners: Sequence[Listener]) -> list[int]:
        self.loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        ids = list(range(len(self.jobs), len(self.jobs) + len(jobs)))
        self.jobs += jobs
        run = self._endless if jobs[0].max_new_tokens < TOKENS else self._all
        threading.Thread(target=run, args=(ids, listeners), daemon=True).start()
        return ids

    def _all(self, ids: list[int], listeners: Sequence[Listener]) -> None:
        for start in range(0, TOKENS, ROUND):
            end = ("length", SPECULATION) if start + ROUND == TOKENS else ()
            for listen in listeners:
                listen(Piece("x" * ROUND, scores_from(start, ROUND), *end))
            time.sleep(0.001)

    def _endless(self, ids: list[int], listeners: Sequence[Listener]) -> None:
        """Notes what time of its thread the loop has spent whenever there is something for it."""
        self.told: list[float] = []
        while ids[0] not in self.cancelled:
            self.told.append(time.clock_gettime(self.loop_clock))
            listeners[0](Piece(f"{len(self.told)} ", scores_from(0, 1)))
            time.sleep(0.005)
        listeners[0](Piece("", (), "cancelled"))


def read_along(address: str, stops: threading.Event) -> None:
    """A stream whose client reads all of it at once, until it `stops`."""
    connection = http.client.HTTPConnection(address, timeout=30)
    body = json.dumps(completion(stream=True))
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    while not stops.is_set():
        answer.readline()
    connection.close()


def waits_of_a_stream(
    choices: int, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, list[float], list[float]]:
    """A large answer, what each callback of the loop cost, and how long the stream beside waited.

    In seconds of the loop's thread: between a piece being there and its event.
    """
    made: dict[int, float] = {}
    event = delivery._event

    def noting(content: Any) -> bytes:
        if content.get("choices") and content["choices"][0].get("text"):
            for word in content["choices"][0]["text"].split():
                made[int(word)] = time.thread_time()
        return event(content)

    monkeypatch.setattr(delivery, "_event", noting)
    engine = Rounds(max_length=2 * TOKENS)
    settings = ServeConfig(max_choices=choices, slots=choices, top_logprobs=ALTERNATIVES)
    stops = threading.Event()
    with serving(engine, settings) as address, watched_loops() as spent:
        reader = threading.Thread(target=read_along, args=(address, stops))
        reader.start()
        assert wait_for(lambda: len(made) > 3)
        reply = ask(address, path, body)
        assert reply.status == 200
        before = len(made)
        assert wait_for(lambda: len(made) > before)  # the stream goes on
        stops.set()
        reader.join()
        assert wait_for(lambda: engine.cancelled)
    waits = [made[n] - engine.told[n - 1] for n in sorted(made)]
    return reply.json, spent, waits


@pytest.mark.parametrize("choices", [4, pytest.param(80, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_large_answer_holds_neither_the_loop_nor_another_stream(
    kind: str, choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"n": choices, "max_tokens": TOKENS}
    if kind == "chat":
        body = chat(**options, logprobs=True, top_logprobs=ALTERNATIVES)
        path = "/v1/chat/completions"
    else:
        body = completion(**options, logprobs=ALTERNATIVES)
        path = "/v1/completions"
    made, spent, waits = waits_of_a_stream(choices, path, body, monkeypatch)
    assert max(spent) < 0.05
    assert max(waits) < 0.1
    assert [choice["index"] for choice in made["choices"]] == list(range(choices))
    for choice in made["choices"]:
        scores = choice["logprobs"]
        lists = [scores["content"]] if kind == "chat" else list(scores.values())
        assert {len(one) for one in lists} == {TOKENS}
    assert made["usage"]["completion_tokens"] == choices * TOKENS
