"""Pieces on their way from the engine's thread to the loop, and answers on their way out."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from starlette.requests import Request

from draftkit.config import SamplingConfig
from draftkit.serving import replies
from draftkit.serving.answers import Job, Listener, Piece, TokenScore
from draftkit.serving.intake import Texts
from draftkit.serving.metrics import Metrics
from draftkit.serving.protocol import ApiError, CompletionRequest
from draftkit.serving.replies import Delivery, Reply
from tests.serving.fakes import TOKENIZER, FakeEngine, chat_tokenizer, completion
from tests.tiny import VOCAB_SIZE

TEXTS = Texts(chat_tokenizer(), VOCAB_SIZE)
SCORES = (TokenScore(TOKENIZER.convert_tokens_to_ids("a"), -0.5),)


class Handed(FakeEngine):
    """An engine whose pieces the test hands out."""

    def submit(self, jobs: Sequence[Job], listeners: Sequence[Listener]) -> list[int]:
        self.listeners = list(listeners)
        return list(range(10, 10 + len(jobs)))

    def say(self, index: int, *pieces: Piece) -> None:
        """As the engine would: from another thread."""
        calls = [(self.listeners[index], piece) for piece in pieces]
        thread = threading.Thread(target=lambda: [listen(piece) for listen, piece in calls])
        thread.start()
        thread.join()


def submitted(engine: Handed, count: int = 1, *, streams: bool = True) -> Delivery:
    job = Job(prompt_ids=[1], max_new_tokens=5, sampling=SamplingConfig())
    asked = CompletionRequest(**completion(n=count, stream=streams, logprobs=0))
    reply = Reply(asked, [job] * count, TEXTS)
    return Delivery(engine, reply, Metrics(engine, "m"), began=0.0)


async def never(_: Any = None) -> Any:
    await asyncio.sleep(60)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(test: Callable[[Handed], Coroutine[Any, Any, None]]) -> Handed:
    engine = Handed()
    asyncio.run(test(engine))
    return engine


def test_a_reader_that_falls_behind_loses_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "BACKLOG", 3)

    async def test(engine: Handed) -> None:
        made = submitted(engine, 2)  # together 6
        engine.say(0, *[Piece("a", SCORES)] * 6)
        await turns(1)
        assert engine.cancelled == set()
        engine.say(1, Piece("a", SCORES))
        await turns(1)
        assert engine.cancelled == {10, 11}
        engine.say(0, *[Piece("a", SCORES)] * 1000)
        await turns(1)
        assert made._arrived.qsize() == 7  # little memory is held for it
        got = []

        async def read() -> None:
            async for _, piece in made.pieces():
                got.append(piece.text)
                engine.say(1, Piece("b", SCORES))  # there is room again, behind a hole
                await turns(1)

        with pytest.raises(ApiError) as caught:
            await read()
        assert (caught.value.status_code, caught.value.code) == (408, "slow_reader")
        assert got == ["a"] * 6

    run(test)


def test_a_whole_answer_has_no_bound_and_is_made_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def encode(value: object) -> bytes:
        threads.append(threading.get_ident())
        return json.dumps(value).encode()

    monkeypatch.setattr(replies, "encode", encode)
    monkeypatch.setattr(replies, "BACKLOG", 3)

    async def test(engine: Handed) -> None:
        made = submitted(engine, streams=False)
        engine.say(0, *[Piece("a", SCORES)] * 100, Piece("b", (), "stop"))
        answer = await made.whole(Request({"type": "http"}, never))
        (choice,) = json.loads(answer.body)["choices"]
        assert choice["text"] == "a" * 100 + "b"
        assert choice["logprobs"]["tokens"] == ["a"] * 100
        assert threading.get_ident() not in threads

    assert run(test).cancelled == set()


def test_a_loop_that_has_closed_does_not_hurt_the_engine() -> None:
    async def test(engine: Handed) -> None:
        submitted(engine)

    run(test).say(0, Piece("a", SCORES))


def test_an_answer_that_fails_ends_all_of_them() -> None:
    async def test(engine: Handed) -> None:
        made = submitted(engine, 2, streams=False)
        engine.say(1, Piece("", (), "error"))
        with pytest.raises(ApiError) as caught:
            await made.whole(Request({"type": "http"}, never))
        assert caught.value.status_code == 500

    assert run(test).cancelled == {10, 11}
