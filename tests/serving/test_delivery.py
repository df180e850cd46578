"""Answers on their way out."""

import asyncio
import json
from typing import Any

import pytest

from draftkit.config import SamplingConfig
from draftkit.serving import delivery
from draftkit.serving.delivery import EventStream, Reader, WholeAnswer, failure_of
from draftkit.serving.intake import Asked
from draftkit.serving.jobs import Job, Piece, TokenScore
from draftkit.serving.metrics import Metrics
from draftkit.serving.replies import Choice, CompletionForm, Failed
from draftkit.serving.streams import Answers
from draftkit.serving.texts import Offsets, Texts
from tests.serving.fakes import TOKENIZER, chat_tokenizer
from tests.serving.test_streams import Handed
from tests.tiny import VOCAB_SIZE

TEXTS = Texts(chat_tokenizer(), VOCAB_SIZE)
SCORE = TokenScore(TOKENIZER.convert_tokens_to_ids("a"), -0.5)


def reader(engine: Handed, count: int = 1, *, streams: bool = True) -> Reader:
    job = Job(prompt_ids=[1], max_new_tokens=5, sampling=SamplingConfig())
    asked = Asked(
        jobs=[job] * count,
        choices=[Choice(index, Offsets(TEXTS), keeps=not streams) for index in range(count)],
        echoes=[""] * count,
        prompt_tokens=1,
        form=CompletionForm(TEXTS, model="m", name="n", logprobs=True),
        streams=streams,
        includes_usage=False,
    )
    return Reader(asked, Answers(engine, asked.jobs), Metrics(engine, "m"), began=0.0)


def test_what_waited_for_a_slow_reader_comes_in_one_piece() -> None:
    async def test() -> None:
        engine = Handed()
        steps = reader(engine, 2).steps()
        engine.say(0, Piece("a", (SCORE,)), Piece("b", (SCORE, SCORE)))
        engine.say(1, Piece("x", (SCORE,), "stop"))
        engine.say(0, Piece("c", (), "length"))
        assert await anext(steps) == [
            (0, Piece("abc", (SCORE,) * 3, "length")),
            (1, Piece("x", (SCORE,), "stop")),
        ]

    asyncio.run(test())


def test_what_waited_long_comes_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "EVENT", 5)
    scored = TokenScore(SCORE.token_id, -0.5, ((1, -0.5), (2, -1.0)))  # weighs 3

    async def test() -> None:
        engine = Handed()
        steps = reader(engine, 2).steps()
        engine.say(0, *[Piece(letter, (scored,)) for letter in "abcde"])
        engine.say(1, Piece("x", (scored,)), Piece("y", (scored,), "stop"))
        engine.say(0, Piece("f", (), "length"))
        assert await anext(steps) == [
            (0, Piece("ab", (scored,) * 2)),
            (0, Piece("cd", (scored,) * 2)),
            (0, Piece("ef", (scored,), "length")),
            (1, Piece("xy", (scored,) * 2, "stop")),
        ]

    asyncio.run(test())


def whole(engine: Handed, scores: tuple[TokenScore, ...], leaves_at: int = 99) -> list[Any]:
    """What is sent of an answer with `scores`, whose client leaves after so many messages."""

    async def test() -> list[Any]:
        made = reader(engine, streams=False)
        engine.say(0, Piece("a" * len(scores), scores, "length"))
        await made.all()
        sent: list[Any] = []
        left = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == leaves_at:
                left.set()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        answer = WholeAnswer(made, turn=asyncio.Lock(), seconds=30)
        await answer({"type": "http"}, receive, send)
        assert made.asked.choices[0].scores == []
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
        made = reader(engine, 2)
        engine.say(1, Piece("", (), "error"))
        with pytest.raises(Failed) as caught:
            await made.all()
        assert caught.value.status == 500
        await made.close()
        assert engine.cancelled == {10, 11}

    asyncio.run(test())


def test_complete_answers_are_no_failures() -> None:
    assert failure_of("stop") is failure_of("length") is failure_of(None) is None
    assert failure_of("timeout") is not None


def test_a_stream_waits_for_its_reader() -> None:
    """A send that blocks holds back the next one, whatever the engine says meanwhile."""

    async def test() -> None:
        engine, sent, gate = Handed(), [], asyncio.Event()

        async def send(message: Any) -> None:
            await gate.wait()
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        stream = EventStream(reader(engine), seconds=30)
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

        await EventStream(reader(engine), seconds=0.05)({"type": "http"}, blocked, blocked)
        assert engine.cancelled == {10}

    asyncio.run(test())
