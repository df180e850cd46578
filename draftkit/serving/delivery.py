"""From answers that grow to what is sent: whole, as server-sent events, or as an error.

Both are sent no faster than they are read, and made in parts between which others have their turn
on the event loop. Latencies are measured on the way. Knows the shape of no answer (see `replies`)
and no routes.
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftkit.serving.intake import Asked
from draftkit.serving.jobs import Piece, TokenScore
from draftkit.serving.metrics import Metrics
from draftkit.serving.replies import Failed, Json, bits, encode, in_utf8
from draftkit.serving.streams import Answers, Arrival, ClientLeft, TooSlow, unless_left

DONE = b"data: [DONE]\n\n"
EVENT = 1000  # token scores and alternatives of one event, from which on the next one begins
PART = 16_384  # characters of a whole answer that are made at once, in a few ms
# Why an answer may end without being one: status, message, code.
FAILURES = {
    "timeout": (408, "the answer took longer than serve.request_seconds", "timeout"),
    "cancelled": (503, "the server stops before the answer is complete", "cancelled"),
    "error": (500, "the answer failed; other answers go on", "internal_error"),
}


def failure_of(reason: str | None) -> Failed | None:
    """What to tell where an answer ended for `reason`; None for one that is complete."""
    if reason not in FAILURES:
        return None
    status, message, code = FAILURES[reason]
    # A client that at once asked for the same again would only add to what made it late.
    return Failed(status, message, code, headers={"x-should-retry": "false"})


class Reader:
    """Takes the answers to one request as they come, and measures how long they took."""

    def __init__(self, asked: Asked, answers: Answers, metrics: Metrics, began: float) -> None:
        """`began`: when the request came, in the clock time.monotonic()."""
        self.asked = asked
        self._answers = answers
        self._metrics = metrics
        self._began = began
        self._last: dict[int, float] = {}

    async def steps(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """What has come since the last step: one piece for each choice, more of one that is long.

        Raises Failed where an answer will not be completed.
        """
        async for arrivals in self._arrivals():
            by_choice: dict[int, list[Piece]] = {}
            for index, piece, _ in arrivals:
                by_choice.setdefault(index, []).append(piece)
            yield [(index, one) for index, all_ in by_choice.items() for one in _joined(all_)]

    async def all(self) -> None:
        """Wait for the whole of every answer. Raises Failed where there will be none."""
        async for _ in self._arrivals():
            pass

    async def send(self, sending: Awaitable[None]) -> None:
        """Wait for the client, which is too slow where too much arrives meanwhile."""
        await self._answers.send(sending)

    async def _arrivals(self) -> AsyncIterator[list[Arrival]]:
        try:
            async for arrivals in self._answers.arrivals():
                for index, piece, at in arrivals:
                    self._measure(index, piece, at)
                    self.asked.choices[index].push(piece)
                    if failed := failure_of(piece.finish_reason):
                        raise failed
                yield arrivals
        except TooSlow:
            raise Failed(408, "the stream was read too slowly", "slow_reader") from None

    def _measure(self, index: int, piece: Piece, at: float) -> None:
        if count := len(piece.scores):
            before = self._last.get(index)
            if before is None:
                self._metrics.first_token.observe(at - self._began)
            else:
                for _ in range(count):
                    self._metrics.between_tokens.observe((at - before) / count)
            self._last[index] = at
        if piece.finish_reason is not None:
            self._metrics.ended(piece.finish_reason)
            self._metrics.whole.observe(at - self._began)

    @property
    def used(self) -> Json:
        read, written = self.asked.prompt_tokens, sum(c.tokens for c in self.asked.choices)
        counts = {"prompt_tokens": read, "completion_tokens": written}
        return counts | {"total_tokens": read + written}

    async def close(self) -> None:
        """Free the rows of what has not ended, and one choice after the other: that takes time."""
        self._answers.cancel()
        for choice in self.asked.choices:
            if choice.scores:
                choice.scores.clear()
                await asyncio.sleep(0)


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of a choice in as few as make events of bounded size."""
    texts: list[str] = []
    scores: list[TokenScore] = []
    entries = 0
    for piece in pieces:
        texts.append(piece.text)
        scores += piece.scores
        entries += sum(1 + len(score.top) for score in piece.scores)
        if entries >= EVENT or piece.finish_reason is not None:
            yield Piece("".join(texts), tuple(scores), piece.finish_reason, piece.speculation)
            texts, scores, entries = [], [], 0
    if texts:
        yield Piece("".join(texts), tuple(scores))


class Delivery(Response):
    """Answers on their way to a client, no faster than it reads them."""

    def __init__(self, reader: Reader, *, seconds: float, **headers: str) -> None:
        """`seconds`: after which it is given up, its reader gone or asleep."""
        super().__init__(headers={name.replace("_", "-"): value for name, value in headers.items()})
        del self.headers["content-length"]
        self._reader, self._seconds = reader, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it; stop where the client leaves."""
        try:
            async with asyncio.timeout(self._seconds):
                await unless_left(receive, self._send(send))
        except (ClientLeft, TimeoutError):
            pass
        finally:
            await self._reader.close()

    async def _start(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})

    @abstractmethod
    async def _send(self, send: Send) -> None: ...


class EventStream(Delivery):
    """The answers as server-sent events, sent as they come."""

    media_type = "text/event-stream"

    def __init__(self, reader: Reader, *, seconds: float) -> None:
        super().__init__(reader, seconds=seconds, cache_control="no-cache", x_accel_buffering="no")

    async def _send(self, send: Send) -> None:
        await self._start(send)
        async for event in self._events():
            message = {"type": "http.response.body", "body": event, "more_body": True}
            await self._reader.send(send(message))
            await asyncio.sleep(0)  # others have their turn
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        asked, form = self._reader.asked, self._reader.asked.form
        for choice, echo in zip(asked.choices, asked.echoes, strict=True):
            if (opening := form.opening(choice)) is not None:
                yield _event(opening)
            if echo:
                yield _event(form.piece(choice, Piece(echo, ())))
        try:
            async for step in self._reader.steps():
                for index, piece in step:
                    yield _event(form.piece(asked.choices[index], piece))
        except Failed as failed:
            yield _event(failed.body)
            return
        if asked.includes_usage:
            yield _event(form.closing(self._reader.used))


class WholeAnswer(Delivery):
    """The answers in one JSON value, which is made while it is sent and never held as a whole."""

    media_type = "application/json"

    def __init__(self, reader: Reader, *, turn: asyncio.Lock, seconds: float) -> None:
        """`turn`: to make a part, of all answers."""
        super().__init__(reader, seconds=seconds)
        self._turn = turn

    async def _send(self, send: Send) -> None:
        asked, is_first, more = self._reader.asked, True, True
        parts = _parts(asked.form.response(asked.choices, asked.echoes, self._reader.used))
        while more:
            async with self._turn:
                began = time.thread_time()
                part, more = next(parts)
                if more:  # as long again for others: rounds need the interpreter too
                    await asyncio.sleep(time.thread_time() - began)
            if is_first:
                if not more:
                    self.headers["content-length"] = str(len(part))
                await self._start(send)
                is_first = False
            await send({"type": "http.response.body", "body": part, "more_body": more})


def _parts(value: Json) -> Iterator[tuple[bytes, bool]]:
    """`value` as JSON in parts of little more than PART characters, and whether one follows."""
    gathered: list[str] = []
    size = 0
    for bit in bits(value):
        if size >= PART:
            yield in_utf8("".join(gathered)), True
            gathered, size = [], 0
        gathered.append(bit)
        size += len(bit)
    yield in_utf8("".join(gathered)), False


def _event(content: Json) -> bytes:
    return b"data: " + encode(content) + b"\n\n"
