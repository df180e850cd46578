"""From the engine's thread to a client: answers as they arrive, whole or as server-sent events.

The engine calls a listener and must never wait, so pieces go through the event loop into a queue.
Nothing is sent faster than it is read; a stream that leaves too much unread is dropped. Knows the
shape of no answer (see `replies`) and no routes.
"""

import asyncio
import functools
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftkit.serving.answers import Piece
from draftkit.serving.engine import Engine
from draftkit.serving.metrics import Metrics
from draftkit.serving.protocol import ApiError, encode
from draftkit.serving.replies import Reply

BACKLOG = 512  # pieces of each choice of a stream, one a round, that may wait for its reader
# Why an answer may end without being one: status, message, code.
FAILURES = {
    "timeout": (408, "the answer took longer than serve.request_seconds", "timeout"),
    "cancelled": (503, "the server stops before the answer is complete", "cancelled"),
    "error": (500, "the answer failed; other answers go on", "internal_error"),
    "slow_reader": (408, "the stream was read too slowly", "slow_reader"),
}


class Delivery:
    """The answers to one request on their way to a client. Belongs to the running loop."""

    def __init__(self, engine: Engine, reply: Reply, metrics: Metrics, *, began: float) -> None:
        """Submit the jobs; raises what `engine.submit` raises.

        `began`: when the request came, by time.monotonic().
        """
        self._reply, self._engine, self._metrics, self._began = reply, engine, metrics, began
        self._last: dict[int, float] = {}  # time of each choice's last tokens
        self._loop = asyncio.get_running_loop()
        self._open = count = len(reply.jobs)  # choices that are not delivered yet
        self._most = BACKLOG * count if reply.streams else math.inf
        self._arrived: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()  # by number of the choice
        listeners = [functools.partial(self._listen, index) for index in range(count)]
        self._submitted = engine.submit(reply.jobs, listeners)

    def _listen(self, index: int, piece: Piece) -> None:
        """On the engine's thread. A loop that has closed delivers nothing any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, index, piece, time.monotonic())

    def _take(self, index: int, piece: Piece, at: float) -> None:
        if count := len(piece.scores):
            before, self._last[index] = self._last.get(index), at
            if before is None:
                self._metrics.first_token.observe(at - self._began)
            else:
                for _ in range(count):
                    self._metrics.between_tokens.observe((at - before) / count)
        if piece.finish_reason is not None:
            self._metrics.ended(piece.finish_reason)
            self._metrics.whole.observe(at - self._began)
        if (waiting := self._arrived.qsize()) == self._most:
            self.cancel()
            piece = Piece("", (), "slow_reader")  # whoever reads on meets this before later pieces
        if waiting <= self._most:
            self._arrived.put_nowait((index, piece))

    def cancel(self) -> None:
        """Free the rows of the jobs that have not ended."""
        if self._open:
            self._engine.cancel(self._submitted)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """What comes, with the number of its choice, until every job has ended.

        Raises ApiError where the reader fell behind, or an answer will not be completed.
        """
        while self._open:
            index, piece = await self._arrived.get()
            if piece.finish_reason in FAILURES:
                status, message, code = FAILURES[piece.finish_reason]
                # A client that at once asked for the same again would make the next one late.
                headers = {"x-should-retry": "false"}
                raise ApiError(message, status=status, code=code, headers=headers)
            self._open -= piece.finish_reason is not None
            yield index, piece

    async def whole(self, request: Request) -> Response:
        """All answers in one JSON value. Raises ApiError where one will not be completed.

        A client that disconnects meanwhile frees its rows.
        """

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self.cancel()

        watching = asyncio.create_task(watch())
        pieces: list[list[Piece]] = [[] for _ in self._reply.jobs]
        try:
            async for index, piece in self.pieces():
                pieces[index].append(piece)
        finally:
            watching.cancel()
            self.cancel()
        # A long answer takes a while: not on the event loop.
        content = await asyncio.to_thread(lambda: encode(self._reply.whole(pieces)))
        return Response(content, media_type="application/json")

    def stream(self) -> Response:
        """The answers as events, sent as they come."""
        return _Events(self._events(), self.cancel)

    async def _events(self) -> AsyncIterator[bytes]:
        for opening in self._reply.opening():
            yield _event(opening)
        try:
            async for index, piece in self.pieces():
                yield _event(self._reply.chunk(index, piece))
            for closing in self._reply.closing():
                yield _event(closing)
        except ApiError as error:
            yield _event(error.body)
        yield b"data: [DONE]\n\n"


class _Events(StreamingResponse):
    """A stream that calls `cancel` when it ends or its client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], cancel: Callable[[], None]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._cancel()


def _event(content: Any) -> bytes:
    return b"data: " + encode(content) + b"\n\n"
