"""Pieces on their way from the engine's thread to the loop, and answers on their way out."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from draftkit.config import SamplingConfig
from draftkit.serving import delivery
from draftkit.serving.delivery import FAILURES, Answers, Delivery, failure, joined, unless_left
from draftkit.serving.jobs import Job, Listener, Piece, TokenScore
from draftkit.serving.metrics import Metrics
from draftkit.serving.replies import Choice, CompletionReply
from draftkit.serving.texts import Offsets, Texts
from draftkit.serving.wire import ApiError
from tests.serving.fakes import TOKENIZER, FakeEngine, chat_tokenizer
from tests.tiny import VOCAB_SIZE

TEXTS = Texts(chat_tokenizer(), VOCAB_SIZE)
SCORE = TokenScore(TOKENIZER.convert_tokens_to_ids("a"), -0.5)
WEIGHTY = TokenScore(5, -0.5, ((5, -0.5),))  # weighs 2


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


def submitted(engine: Handed, count: int = 1, *, streams: bool = True) -> Answers:
    job = Job(prompt_ids=[1], max_new_tokens=5, sampling=SamplingConfig())
    reply = CompletionReply(
        texts=TEXTS,
        model="m",
        name="n",
        choices=[Choice(job, Offsets(TEXTS)) for _ in range(count)],
        prompt_tokens=1,
        has_logprobs=True,
        streams=streams,
        includes_usage=False,
    )
    return Answers(engine, reply, Metrics(engine, "m"), began=0.0)


def delivery_of(answers: Answers, seconds: float = 30) -> Delivery:
    return Delivery(answers, turn=asyncio.Lock(), seconds=seconds)


def texts(arrived: dict[int, list[Piece]]) -> dict[int, list[str]]:
    return {index: [piece.text for piece in pieces] for index, pieces in arrived.items()}


def run(test: Callable[[Handed], Coroutine[Any, Any, None]]) -> Handed:
    engine = Handed()
    asyncio.run(test(engine))
    return engine


def test_pieces_arrive_in_order_and_what_waits_comes_together() -> None:
    async def test(engine: Handed) -> None:
        answers = submitted(engine, 2)
        engine.say(0, Piece("a", (WEIGHTY,)), Piece("b", (WEIGHTY,)))
        engine.say(1, Piece("x", (WEIGHTY,)))
        found = answers.arrivals()
        assert texts(await anext(found)) == {0: ["a", "b"], 1: ["x"]}
        engine.say(1, Piece("y", (), "stop"))
        assert texts(await anext(found)) == {1: ["y"]}
        engine.say(0, Piece("c", (), "length"))
        assert texts(await anext(found)) == {0: ["c"]}
        with pytest.raises(StopAsyncIteration):
            await anext(found)
        answers.cancel()

    assert run(test).cancelled == set()  # nothing was left to cancel


def test_what_has_not_ended_is_cancelled() -> None:
    async def test(engine: Handed) -> None:
        answers = submitted(engine, 2)
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
    monkeypatch.setattr(delivery, "BACKLOG", 5)  # a piece weighs 2

    async def test(engine: Handed) -> None:
        answers = submitted(engine, 2)  # together 10
        found = answers.arrivals()
        engine.say(0, *[Piece("a", (WEIGHTY,))] * 5)
        await turns(1)
        assert engine.cancelled == set()
        engine.say(1, Piece("a", (WEIGHTY,)))
        await turns(1)
        assert engine.cancelled == {10, 11}
        engine.say(0, *[Piece("a", (WEIGHTY,))] * 1000)
        await turns(1)
        assert len(answers._waiting) == 0  # no memory is held for it
        with pytest.raises(ApiError) as caught:
            await anext(found)
        assert (caught.value.status, caught.value.code) == (408, "slow_reader")

    run(test)


def test_a_loop_that_has_closed_does_not_hurt_the_engine() -> None:
    async def test(engine: Handed) -> None:
        submitted(engine)

    run(test).say(0, Piece("a", (WEIGHTY,)))


def test_work_goes_on_unless_the_client_leaves_or_time_is_over() -> None:
    stopped: list[bool] = []

    async def work(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    async def stays() -> dict[str, str]:
        await asyncio.sleep(60)
        raise AssertionError

    async def leaves() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def fails() -> None:
        raise ValueError("no")

    assert asyncio.run(unless_left(work(0), stays, seconds=30))
    assert stopped == []
    assert not asyncio.run(unless_left(work(60), leaves, seconds=30))
    assert stopped == [True]
    with pytest.raises(TimeoutError):
        asyncio.run(unless_left(work(60), stays, seconds=0.01))
    assert stopped == [True] * 2
    with pytest.raises(ValueError, match="no"):
        asyncio.run(unless_left(fails(), stays, seconds=30))


def test_what_waited_for_a_slow_reader_comes_in_one_piece() -> None:
    pieces = [Piece("a", (SCORE,)), Piece("b", (SCORE, SCORE)), Piece("c", (), "length")]
    assert list(joined(pieces)) == [Piece("abc", (SCORE,) * 3, "length")]


def test_what_waited_long_comes_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "EVENT", 5)
    scored = TokenScore(SCORE.token_id, -0.5, ((1, -0.5), (2, -1.0)))  # weighs 3
    pieces = [*[Piece(letter, (scored,)) for letter in "abcde"], Piece("f", (), "length")]
    assert list(joined(pieces)) == [
        Piece("ab", (scored,) * 2),
        Piece("cd", (scored,) * 2),
        Piece("ef", (scored,), "length"),
    ]


def whole(engine: Handed, scores: tuple[TokenScore, ...], leaves_at: int = 99) -> list[Any]:
    """What is sent of an answer with `scores`, whose client leaves after so many messages."""

    async def test() -> list[Any]:
        made = submitted(engine, streams=False)
        engine.say(0, Piece("a" * len(scores), scores, "length"))
        sent: list[Any] = []
        left = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == leaves_at:
                left.set()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        await delivery_of(made)({"type": "http"}, receive, send)
        assert made.reply.choices[0].scores == []
        return sent

    return asyncio.run(test())


def test_a_short_answer_has_its_length() -> None:
    start, body = whole(Handed(), (SCORE,) * 3)
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert json.loads(body["body"])["choices"][0]["text"] == "aaa"


def test_a_long_answer_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "PART", 500)
    start, *bodies = whole(Handed(), (SCORE,) * 1000)
    assert b"content-length" not in dict(start["headers"])
    assert [message["more_body"] for message in bodies] == [True] * (len(bodies) - 1) + [False]
    assert all(500 <= len(message["body"]) < 2000 for message in bodies[:-1])
    made = json.loads(b"".join(message["body"] for message in bodies))
    assert made["choices"][0]["logprobs"]["text_offset"] == list(range(1000))
    # Nothing is made for nobody.
    assert len(whole(Handed(), (SCORE,) * 1000, leaves_at=5)) < 10 < len(bodies)


def test_an_answer_that_fails_ends_all_of_them() -> None:
    async def test() -> None:
        engine = Handed()
        made = submitted(engine, 2, streams=False)
        engine.say(1, Piece("", (), "error"))

        async def receive() -> Any:
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            raise AssertionError("an error is told instead")

        with pytest.raises(ApiError) as caught:
            await delivery_of(made)({"type": "http"}, receive, send)
        assert caught.value.status == 500
        assert engine.cancelled == {10, 11}

    asyncio.run(test())


def test_complete_answers_are_no_failures() -> None:
    assert not {"stop", "length", None} & FAILURES.keys()
    assert failure("timeout").status == 408


def test_a_stream_waits_for_its_reader() -> None:
    """A send that blocks holds back the next one, whatever the engine says meanwhile."""

    async def test() -> None:
        engine, sent, gate = Handed(), [], asyncio.Event()

        async def send(message: Any) -> None:
            await gate.wait()
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        stream = delivery_of(submitted(engine))
        task = asyncio.ensure_future(stream({"type": "http"}, receive, send))
        for _ in range(5):
            engine.say(0, Piece("a", (SCORE,)))
            await asyncio.sleep(0)
        engine.say(0, Piece("b", (), "stop"))
        await asyncio.sleep(0)
        assert sent == []
        gate.set()
        await task
        bodies = [m["body"] for m in sent if m["type"] == "http.response.body"]
        assert len(bodies) == 2  # all that waited, and the end
        chunk = json.loads(bodies[0].removeprefix(b"data: "))
        assert chunk["choices"][0]["text"] == "aaaaab"
        assert len(chunk["choices"][0]["logprobs"]["tokens"]) == 5
        assert engine.cancelled == set()

    asyncio.run(test())


def test_a_stream_that_nobody_reads_is_given_up() -> None:
    async def test() -> None:
        engine = Handed()

        async def blocked(_: Any = None) -> Any:
            await asyncio.sleep(60)

        await delivery_of(submitted(engine), 0.05)({"type": "http"}, blocked, blocked)
        assert engine.cancelled == {10}

    asyncio.run(test())
