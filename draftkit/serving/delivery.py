"""From the engine's thread to a client: answers as they arrive, whole or as server-sent events.

The engine calls a listener and must never wait, so pieces land in a list and the event loop is
woken. Nothing is sent faster than it is read, and what is sent is made in parts between which
others have their turn on the loop. What gathers while a reader waits for its client is bounded:
past the bound the jobs are cancelled. Knows the shape of no answer (see `replies`) and no routes.
"""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftkit.serving.engine import Engine
from draftkit.serving.jobs import Piece, TokenScore
from draftkit.serving.metrics import Metrics
from draftkit.serving.replies import CompletionReply
from draftkit.serving.wire import ApiError, Json, bits, encode, in_utf8

BACKLOG = 25_000  # token scores and alternatives of a job, some 100 bytes each, that may wait
EVENT = 1000  # token scores and alternatives of one event, from which on the next one begins
PART = 16_384  # characters of a whole answer that are made at once, in a few ms
# Why an answer may end without being one: status, message, code.
FAILURES = {
    "timeout": (408, "the answer took longer than serve.request_seconds", "timeout"),
    "cancelled": (503, "the server stops before the answer is complete", "cancelled"),
    "error": (500, "the answer failed; other answers go on", "internal_error"),
}


def failure(reason: str) -> ApiError:
    """What to tell where an answer ended for `reason`, a key of FAILURES."""
    status, message, code = FAILURES[reason]
    # A client that at once asked for the same again would only add to what made it late.
    return ApiError(message, status=status, code=code, headers={"x-should-retry": "false"})


class Answers:
    """The answers to one request as they arrive. Belongs to the running loop."""

    def __init__(
        self, engine: Engine, reply: CompletionReply, metrics: Metrics, *, began: float
    ) -> None:
        """Submit the jobs; raises what `engine.submit` raises.

        `began`: when the request came, by time.monotonic().
        """
        self.reply = reply
        self._engine = engine
        self._metrics = metrics
        self._began = began
        self._last: dict[int, float] = {}  # time of each choice's last tokens
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[int, Piece, float]] = []  # choice, piece, when it came
        self._backlog = 0
        self._too_slow = False
        self._arrived = asyncio.Event()
        jobs = [choice.job for choice in reply.choices]
        self._open = len(jobs)
        listeners = [functools.partial(self._listen, index) for index in range(len(jobs))]
        self._submitted = engine.submit(jobs, listeners)

    def _listen(self, index: int, piece: Piece) -> None:
        """On the engine's thread. A loop that has closed delivers nothing any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, index, piece, time.monotonic())

    def _take(self, index: int, piece: Piece, at: float) -> None:
        if self._too_slow:
            return
        self._waiting.append((index, piece, at))
        self._backlog += _entries(piece)
        if self._backlog > BACKLOG * len(self.reply.choices):
            self._too_slow = True
            self._waiting.clear()
            self.cancel()
        self._arrived.set()

    def cancel(self) -> None:
        """Free the rows of the jobs that have not ended."""
        if self._open:
            self._engine.cancel(self._submitted)

    async def arrivals(self) -> AsyncIterator[dict[int, list[Piece]]]:
        """All that has come since the last time, by choice, until every job has ended.

        Raises ApiError where the reader fell behind, or an answer will not be completed.
        """
        while self._open:
            await self._arrived.wait()
            self._arrived.clear()
            if self._too_slow:
                raise ApiError("the stream was read too slowly", status=408, code="slow_reader")
            arrived, self._waiting, self._backlog = self._waiting, [], 0
            by_choice: dict[int, list[Piece]] = {}
            for index, piece, at in arrived:
                self._measure(index, piece, at)
                self.reply.push(index, piece)
                self._open -= piece.finish_reason is not None
                if piece.finish_reason in FAILURES:
                    raise failure(piece.finish_reason)
                by_choice.setdefault(index, []).append(piece)
            yield by_choice

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

    async def whole(self) -> None:
        """Wait for the whole of every answer. Raises ApiError where there will be none."""
        async for _ in self.arrivals():
            pass

    async def close(self) -> None:
        """Free the rows of what has not ended, and one choice after the other: that takes time."""
        self.cancel()
        for choice in self.reply.choices:
            if choice.scores:
                choice.scores.clear()
                await asyncio.sleep(0)


def _entries(piece: Piece) -> int:
    return sum(1 + len(score.top) for score in piece.scores)


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of a choice in as few as make events of bounded size."""
    texts: list[str] = []
    scores: list[TokenScore] = []
    entries = 0
    for piece in pieces:
        texts.append(piece.text)
        scores += piece.scores
        entries += _entries(piece)
        if entries >= EVENT or piece.finish_reason is not None:
            yield Piece("".join(texts), tuple(scores), piece.finish_reason, piece.speculation)
            texts, scores, entries = [], [], 0
    if texts:
        yield Piece("".join(texts), tuple(scores))


async def unless_left(work: Coroutine[Any, Any, None], receive: Receive, *, seconds: float) -> bool:
    """Whether `work` came to its end; it is stopped as soon as the client disconnects.

    The body must have been received before. Raises what `work` raises, and TimeoutError.
    """

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnect())]
    try:
        first = asyncio.FIRST_COMPLETED
        done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=first)
        if not done:
            raise TimeoutError
        if tasks[0] in done:
            tasks[0].result()
        return tasks[0] in done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Delivery(Response):
    """Answers on their way to a client, as events or in one JSON value that is never held whole."""

    def __init__(self, answers: Answers, *, turn: asyncio.Lock, seconds: float) -> None:
        """`turn`: to make a part, of all whole answers.

        `seconds`: after which an answer is given up that does not come, and one whose reader does
        not take it.
        """
        self._streams = answers.reply.streams
        self.media_type = "text/event-stream" if self._streams else "application/json"
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers if self._streams else None)
        del self.headers["content-length"]
        self._answers, self._turn, self._seconds = answers, turn, seconds
        self._has_begun = False  # to send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it; stop where the client leaves or sleeps.

        Raises ApiError, before anything is sent, where there will be no whole answer.
        """
        until = functools.partial(unless_left, receive=receive, seconds=self._seconds)
        try:
            if self._streams:
                await until(self._send_events(send))
            elif await until(self._answers.whole()):
                await until(self._send_parts(send))
        except TimeoutError:
            if not self._has_begun:
                raise failure("timeout") from None
        finally:
            await self._answers.close()

    async def _start(self, send: Send) -> None:
        self._has_begun = True
        start = {"type": "http.response.start", "status": self.status_code}
        await send(start | {"headers": self.raw_headers})

    async def _send_events(self, send: Send) -> None:
        await self._start(send)
        async for event in self._events():
            message = {"type": "http.response.body", "body": event, "more_body": True}
            await send(message)
            await asyncio.sleep(0)  # others have their turn
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _events(self) -> AsyncIterator[bytes]:
        reply = self._answers.reply
        for index, choice in enumerate(reply.choices):
            if (opening := reply.opening(index)) is not None:
                yield _event(opening)
            if choice.echo:
                yield _event(reply.piece(index, Piece(choice.echo, ())))
        try:
            async for arrived in self._answers.arrivals():
                for index, pieces in arrived.items():
                    for piece in joined(pieces):
                        yield _event(reply.piece(index, piece))
        except ApiError as error:
            yield _event(error.body)
            return
        if reply.includes_usage:
            yield _event(reply.closing())

    async def _send_parts(self, send: Send) -> None:
        made, is_first, more = bits(self._answers.reply.response()), True, True
        while more:
            async with self._turn:
                began = time.thread_time()
                part = _part(made)
                more = len(part) >= PART
                body = in_utf8(part)
                if more:  # as long again for others: rounds need the interpreter too
                    await asyncio.sleep(time.thread_time() - began)
            if is_first:
                if not more:
                    self.headers["content-length"] = str(len(body))
                await self._start(send)
                is_first = False
            await send({"type": "http.response.body", "body": body, "more_body": more})


def _part(made: Iterator[str]) -> str:
    """The next of `made`: little more than PART characters, fewer at the end."""
    gathered: list[str] = []
    size = 0
    while size < PART and (bit := next(made, None)) is not None:
        gathered.append(bit)
        size += len(bit)
    return "".join(gathered)


def _event(content: Json) -> bytes:
    return b"data: " + encode(content) + b"\n\n"
