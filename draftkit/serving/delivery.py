"""From answers that grow to what is sent: whole, as server-sent events, or as an error.

A stream is sent no faster than it is read; latencies are measured on the way. Knows the shape of
no answer (see `replies`) and no routes.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from draftkit.serving.intake import Asked
from draftkit.serving.jobs import Piece
from draftkit.serving.metrics import Metrics
from draftkit.serving.replies import Json, encode, error_body, usage
from draftkit.serving.streams import Answers, ClientLeft, TooSlow, unless_left

DONE = b"data: [DONE]\n\n"
# Why an answer may end without being one: status, message, code.
FAILURES = {
    "timeout": (408, "the answer took longer than serve.request_seconds", "timeout"),
    "cancelled": (503, "the server stops before the answer is complete", "cancelled"),
    "error": (500, "the answer failed; other answers go on", "internal_error"),
}


class Failed(Exception):
    """A response in OpenAI's form that is no answer."""

    def __init__(self, status: int, message: str, code: str | None, **rest: Any) -> None:
        """`rest`: `param`, or `headers`."""
        super().__init__(message)
        self.status = status
        self.headers: dict[str, str] = rest.get("headers", {})
        kind = "invalid_request_error" if status < 500 else "server_error"
        kind = "rate_limit_error" if status == 429 else kind
        self.body = error_body(message, kind, param=rest.get("param"), code=code)


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
        """What has come since the last step: at most one piece for each choice.

        Raises Failed where an answer will not be completed.
        """
        try:
            async for arrivals in self._answers.arrivals():
                merged: dict[int, list[Piece]] = {}
                for index, piece, at in arrivals:
                    self._measure(index, piece, at)
                    self.asked.choices[index].push(piece)
                    if failed := failure_of(piece.finish_reason):
                        raise failed
                    merged.setdefault(index, []).append(piece)
                yield [(index, _joined(pieces)) for index, pieces in merged.items()]
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
        """The usage so far."""
        written = sum(choice.tokens for choice in self.asked.choices)
        return usage(prompt_tokens=self.asked.prompt_tokens, completion_tokens=written)

    async def all(self) -> None:
        """Wait for the whole of every answer. Raises Failed where there will be none."""
        async for _ in self.steps():
            pass

    def close(self) -> None:
        """Free the rows of what has not ended."""
        self._answers.cancel()


def _joined(pieces: Sequence[Piece]) -> Piece:
    last = pieces[-1]
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(score for piece in pieces for score in piece.scores),
        last.finish_reason,
        last.speculation,
    )


class EventStream(Response):
    """The answers as server-sent events, sent as they come and no faster than they are read."""

    media_type = "text/event-stream"

    def __init__(self, reader: Reader, *, seconds: float) -> None:
        """`seconds`: after which the stream is given up, its reader gone or asleep."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._reader = reader
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it; stop where the client leaves."""
        try:
            async with asyncio.timeout(self._seconds):
                await unless_left(receive, self._send(send))
        except (ClientLeft, TimeoutError):
            pass
        finally:
            self._reader.close()

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for event in self._events():
            await send({"type": "http.response.body", "body": event, "more_body": True})
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


def _event(content: Json) -> bytes:
    return b"data: " + encode(content) + b"\n\n"


def json_response(
    content: Json, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of plain JSON."""
    return Response(encode(content), status, headers, "application/json")
