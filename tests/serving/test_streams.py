"""Pieces on their way from the engine's thread to the event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from draftkit.config import SamplingConfig
from draftkit.serving import streams
from draftkit.serving.jobs import Job, Listener, Piece, TokenScore
from draftkit.serving.streams import Answers, ClientLeft, TooSlow, unless_left
from tests.serving.fakes import FakeEngine

SCORE = TokenScore(5, -0.5, ((5, -0.5),))


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


def jobs(count: int) -> list[Job]:
    return [Job(prompt_ids=[1], max_new_tokens=3, sampling=SamplingConfig())] * count


def run(test: Callable[[Handed], Coroutine[Any, Any, None]]) -> Handed:
    engine = Handed()
    asyncio.run(test(engine))
    return engine


def test_pieces_arrive_in_order_and_what_waits_comes_together() -> None:
    async def test(engine: Handed) -> None:
        answers = Answers(engine, jobs(2))
        engine.say(0, Piece("a", (SCORE,)), Piece("b", (SCORE,)))
        engine.say(1, Piece("x", (SCORE,)))
        found = answers.arrivals()
        first = [(a.index, a.piece.text) for a in await anext(found)]
        assert first == [(0, "a"), (0, "b"), (1, "x")]
        engine.say(1, Piece("y", (), "stop"))
        assert [a.piece.text for a in await anext(found)] == ["y"]
        engine.say(0, Piece("c", (), "length"))
        assert [a.piece.text for a in await anext(found)] == ["c"]
        with pytest.raises(StopAsyncIteration):
            await anext(found)
        answers.cancel()

    assert run(test).cancelled == set()  # nothing was left to cancel


def test_what_has_not_ended_is_cancelled() -> None:
    async def test(engine: Handed) -> None:
        answers = Answers(engine, jobs(2))
        engine.say(0, Piece("a", (), "stop"))
        await anext(answers.arrivals())
        answers.cancel()

    assert run(test).cancelled == {10, 11}


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_reader_whose_client_falls_behind_loses_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "BACKLOG", 5)  # a piece with SCORE weighs 2

    async def test(engine: Handed) -> None:
        answers = Answers(engine, jobs(2))  # together 10
        found = answers.arrivals()
        client = asyncio.Event()
        sending = asyncio.ensure_future(answers.send(client.wait()))
        await turns(1)
        engine.say(0, *[Piece("a", (SCORE,))] * 5)
        await turns(9)
        assert engine.cancelled == set()
        engine.say(1, Piece("a", (SCORE,)))
        await turns(9)
        assert engine.cancelled == {10, 11}
        engine.say(0, *[Piece("a", (SCORE,))] * 1000)
        await turns(1)
        assert len(answers._waiting) == 0  # no memory is held for it
        client.set()
        await sending
        with pytest.raises(TooSlow):
            await anext(found)

    run(test)


def test_a_reader_that_had_no_turn_is_not_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much gathers while the loop is held, whether the reader waits or could go on."""
    monkeypatch.setattr(streams, "BACKLOG", 10)

    async def test(engine: Handed) -> None:
        found = (answers := Answers(engine, jobs(1))).arrivals()
        first = asyncio.ensure_future(anext(found))
        await turns(1)
        engine.say(0, *[Piece("a", (SCORE,))] * 1000)  # before the loop goes on
        assert len(await first) == 1000
        client = asyncio.Event()
        sending = asyncio.ensure_future(answers.send(client.wait()))
        await turns(1)
        engine.say(0, *[Piece("a", (SCORE,))] * 1000)
        asyncio.get_running_loop().call_soon(client.set)
        await sending
        await turns(9)
        assert len(await anext(found)) == 1000

    assert run(test).cancelled == set()


def test_a_loop_that_has_closed_does_not_hurt_the_engine() -> None:
    async def test(engine: Handed) -> None:
        Answers(engine, jobs(1))

    run(test).say(0, Piece("a", (SCORE,)))


def test_work_goes_on_unless_the_client_leaves() -> None:
    stopped: list[bool] = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            stopped.append(True)
            raise
        return "done"

    async def stays() -> dict[str, str]:
        await asyncio.sleep(60)
        raise AssertionError

    async def leaves() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def fails() -> str:
        raise ValueError("no")

    assert asyncio.run(unless_left(stays, work(0))) == "done"
    assert stopped == []
    with pytest.raises(ClientLeft):
        asyncio.run(unless_left(leaves, work(60)))
    assert stopped == [True]
    with pytest.raises(ValueError, match="no"):
        asyncio.run(unless_left(stays, fails()))
