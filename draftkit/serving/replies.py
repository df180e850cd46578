"""Replies in OpenAI's form, and their way to the client: whole, or as server-sent events.

`Reply` makes JSON values of the engine's pieces and waits for nothing. `Delivery` brings the pieces
here: the engine calls a listener and must never wait, so they go through the event loop into a
queue. Nothing is sent faster than it is read; a stream that leaves too much unread is dropped.
"""

import asyncio
import functools
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftkit.online.buffer import Served, total
from draftkit.serving.answers import Job, Piece, TokenScore
from draftkit.serving.engine import Engine
from draftkit.serving.intake import Texts
from draftkit.serving.metrics import Metrics
from draftkit.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Json,
    StreamOptions,
    encode,
)

LEAST_LOG_PROB = -9999.0  # JSON knows no infinity; OpenAI's word for it
BACKLOG = 512  # pieces of each choice of a stream, one a round, that may wait for its reader
# Why an answer may end without being one: status, message, code.
FAILURES = {
    "timeout": (408, "the answer took longer than serve.request_seconds", "timeout"),
    "cancelled": (503, "the server stops before the answer is complete", "cancelled"),
    "error": (500, "the answer failed; other answers go on", "internal_error"),
    "slow_reader": (408, "the stream was read too slowly", "slow_reader"),
}


def bounded(log_prob: float | None) -> float | None:
    """A log-probability as JSON knows it; None for a prompt's first token, which has none."""
    return None if log_prob is None else max(LEAST_LOG_PROB, log_prob)


def speculation(choices: Sequence[Served]) -> Json:
    """What speculation did for a response: the sum over its choices.

    acceptance_length: tokens for a pass of the target; alpha: mean of sum_x min(p, q) over the
    tested positions. Both are null where nothing was drafted.
    """
    whole = total(choices)
    return {
        "rounds": whole.rounds,
        "drafted": whole.drafted,
        "accepted": whole.accepted,
        "acceptance_length": whole.acceptance_length,
        "alpha": whole.alpha,
        "drafter_version": ", ".join(sorted({one.version for one in choices})),
    }


class Reply:
    """What is told of the answers to one request, each a choice of it, whole or as they grow."""

    def __init__(
        self, request: CompletionRequest | ChatRequest, jobs: Sequence[Job], texts: Texts
    ) -> None:
        """`jobs`: one for each choice."""
        self.request, self.jobs, self._texts = request, jobs, texts
        self.streams = request.stream
        self._options = request.stream_options or StreamOptions()
        self._is_chat = isinstance(request, ChatRequest)
        self._kind = "chat.completion" if self._is_chat else "text_completion"
        if self._is_chat and self.streams:
            self._kind += ".chunk"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._name, self._created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self._read = sum(len(job.prompt_ids) for job in jobs) // request.n
        self._written = 0  # tokens that have been sent

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The reply, of all pieces of each choice."""
        self._written = sum(len(piece.scores) for some in pieces for piece in some)
        choices = [self._choice(index, some) for index, some in enumerate(pieces)]
        ends = [some[-1].speculation for some in pieces]
        speculative = speculation([end for end in ends if end is not None])
        return self._body(choices, usage=self._usage(), speculative=speculative)

    async def chunks(self, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[Json]:
        """The chunks of a stream; the last one of a choice tells of its speculation.

        pieces: as they come, with the number of their choice.
        """
        if self._is_chat:
            delta = {"delta": {"role": "assistant", "content": ""}}
            ends = {"logprobs": None, "finish_reason": None}
            for index in range(len(self.jobs)):
                yield self._body([{"index": index, **delta, **ends}])
        async for index, piece in pieces:
            self._written += len(piece.scores)
            more: Json = {}
            if self._options.include_usage and self._options.continuous_usage_stats:
                more["usage"] = self._usage()  # of all choices so far
            if piece.speculation is not None:
                more["speculative"] = speculation([piece.speculation])
            yield self._body([self._choice(index, [piece])], **more)
        if self._options.include_usage:
            yield self._body([], usage=self._usage())

    def _body(self, choices: list[Json], **more: Any) -> Json:
        own: Json = {"id": self._name, "created": self._created, "model": self.request.model}
        return {**own, "object": self._kind, "choices": choices, **more}

    def _usage(self) -> Json:
        read, written = self._read, self._written
        counts = {"prompt_tokens": read, "completion_tokens": written}
        return {**counts, "total_tokens": read + written}

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        text = "".join(piece.text for piece in pieces)
        content: Json = {"text": text}
        if self._is_chat and self.streams:
            content = {"delta": {"content": text} if text else {}}
        elif self._is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        scores = [score for piece in pieces for score in (*piece.prompt, *piece.scores)]
        scored = self._in_a_chat if self._is_chat else self._in_a_text
        logprobs = None if self.request.alternatives is None else scored(scores)
        ends = {"logprobs": logprobs, "finish_reason": pieces[-1].finish_reason}
        return {"index": index, **content, **ends}

    def _in_a_text(self, scores: Sequence[TokenScore]) -> Json:
        """Log-probabilities of tokens that follow each other: three lists, an entry a token.

        Alternatives of the same text count once, the likeliest.
        """
        tops: list[Json | None] = []
        for score in scores:
            pairs = [*score.top, (score.token_id, score.log_prob)] if score.top else []
            by_text: Json = {}
            for token_id, log_prob in pairs:
                by_text.setdefault(self._readable(token_id), bounded(log_prob))
            tops.append(None if score.log_prob is None else by_text)
        return {
            "tokens": [self._readable(score.token_id) for score in scores],
            "token_logprobs": [bounded(score.log_prob) for score in scores],
            "top_logprobs": tops,
        }

    def _readable(self, token_id: int) -> str:
        """A token as text; part of a character as OpenAI writes it, `bytes:\\xe2`."""
        content = self._texts.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _in_a_chat(self, scores: Sequence[TokenScore]) -> Json:
        """One list with an entry a token."""

        def entry(token_id: int, log_prob: float | None) -> Json:
            content = self._texts.token_bytes(token_id)
            text = content.decode("utf-8", "replace")
            return {"token": text, "logprob": bounded(log_prob), "bytes": [*content]}

        content = [
            entry(score.token_id, score.log_prob)
            | {"top_logprobs": [entry(*pair) for pair in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}


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

        async def events() -> AsyncIterator[bytes]:
            try:
                async for chunk in self._reply.chunks(self.pieces()):
                    yield _event(chunk)
            except ApiError as error:
                yield _event(error.body)
            yield b"data: [DONE]\n\n"

        return _Events(events(), self.cancel)


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
