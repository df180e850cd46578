"""A recording proxy before an engine that speaks OpenAI's API: bytes pass, answers are kept.

What is not recorded passes as it is, in both directions and piece by piece. A request that is
recorded asks for ids beside (`capture`), and its reply leaves without them. Records are written by
the thread of `recorder`, and no reply waits for it. A request counts once, by what became of it.
Every hop waits for the engine alone: one that is slow or dead delays no other request.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftkit.artifacts import first_line
from draftkit.config import DEFAULT_ROUTE, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.serving.answers import Counters
from draftkit.serving.capture import SAMPLER, Exchange, is_recordable
from draftkit.serving.intake import RECORD_HEADER, ROUTE_HEADER, Texts
from draftkit.serving.protocol import ApiError
from draftkit.serving.recorder import Recorder
from draftkit.serving.server import CHAT, COMPLETIONS, MAX_BODY_BYTES, check_caller

# Of one connection (RFC 9110, 7.6.1), and what the server sends itself.
HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "proxy-connection", "date"),
    )
)
OURS = frozenset((RECORD_HEADER, ROUTE_HEADER))
EVENT = b"data: "
# What is no reply of OpenAI's API passes as it is.
UNREADABLE = (ValueError, ArithmeticError, RecursionError, TypeError, LookupError, AttributeError)
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0  # of a connection to the engine: shorter than engines keep theirs
OUTCOMES = (
    "recorded",
    "opted_out",
    "left_out",  # by the fraction, or of a route that is not recorded
    "other_law",  # than that of temperature, top-k, top-p and repetition penalty
    "unfinished",  # refused by the engine, or left by the client
    "unknown",  # ids
    "unreachable",
)


class Proxy:
    """Passes requests on to the engine at `url`, and what `recorder` is to keep to it.

    has_ids: whether the engine tells ids. default: the sampling of requests that name none.
    fraction: of the requests, those that are recorded. key, host: as `server.check_caller` asks.
    """

    def __init__(
        self,
        url: str,
        recorder: Recorder,
        texts: Texts,
        *,
        has_ids: bool,
        default: SamplingConfig,
        routes: Iterable[str],
        fraction: float,
        key: str | None,
        host: str,
    ) -> None:
        self._url, self._recorder, self._texts = httpx.URL(url), recorder, texts
        self._has_ids, self._default, self._routes = has_ids, default, {*routes}
        self._fraction, self._key, self._host = fraction, key, host
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(keepalive_expiry=IDLE_SECONDS),
            trust_env=False,
        )
        self._counters = Counters()
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "draftkit:captured_requests",
            "Completions and chats by what became of them.",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._dropped = Counter(
            "draftkit:records_dropped", "Records lost.", registry=self._registry
        )

    def counters(self) -> Counters:
        """The acceptance that the engine reported, by route."""
        return self._counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app: every request that may come in is answered by the engine."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        try:
            check_caller(request.headers, key=self._key, host=self._host)
            response = await self._answered(request)
        except ApiError as error:
            response = error.response
        await response(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        """The engine's reply to any request."""
        body = request.stream() if request.method not in ("GET", "HEAD") else None
        exchange = None
        if request.method == "POST" and request.url.path in (COMPLETIONS, CHAT):
            content = await _whole(request)
            if isinstance(content, bytes):
                exchange = self._exchange(request, content)
                body = content if exchange is None else json.dumps(exchange.body).encode()
            else:
                body = content
        headers = [
            (name, value)
            for name, value in request.headers.raw
            if (low := name.decode("latin-1").lower()) not in HOP | OURS | {"host"}
            and not (exchange is not None and low in ("content-length", "accept-encoding"))
        ]
        path = request.scope.get("raw_path") or request.url.path.encode()
        query = request.scope["query_string"]
        url = self._url.copy_with(raw_path=path + (b"?" + query if query else b""))
        sent = httpx.Request(request.method, url, headers=headers, content=body)
        try:
            sending = self._client.send(sent, stream=True)
            is_read = not isinstance(body, AsyncIterator)
            reply = await (while_here(request, sending) if is_read else sending)
        except httpx.HTTPError as error:
            if exchange is not None:
                self._count("unreachable")
            raise unreachable(self._url, error) from error
        if reply is None:
            if exchange is not None:
                self._count("unfinished")
            return Response(status_code=499)  # to nobody
        if exchange is None or reply.status_code != 200:
            if exchange is not None:
                self._count("unfinished")
            if request.url.path == "/metrics" and reply.status_code == 200:
                return await self._metrics(reply)
            return _passed(reply, reply.aiter_raw())
        route = request.headers.get(ROUTE_HEADER, DEFAULT_ROUTE)
        kind = reply.headers.get("content-type", "")
        read = self._events if kind.startswith("text/event-stream") else self._body
        return _passed(reply, read(reply, exchange, route), is_changed=True)

    def _exchange(self, request: Request, content: bytes) -> Exchange | None:
        """The request as it is recorded; None for one that is not."""
        words = [word.strip().lower() for word in request.headers.getlist(RECORD_HEADER)]
        route = request.headers.get(ROUTE_HEADER, DEFAULT_ROUTE)
        if any(word != "yes" for word in words):  # of an unclear word too: the owner's wish is one
            return self._count("opted_out")
        if route not in self._routes or random.random() >= self._fraction:
            return self._count("left_out")
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            return self._count("unfinished")  # the engine will say what is wrong
        if not is_recordable(body):
            return self._count("other_law")
        return Exchange(body, has_ids=self._has_ids)

    async def _body(
        self, reply: httpx.Response, exchange: Exchange, route: str
    ) -> AsyncIterator[bytes]:
        """A whole reply, without what was asked for here."""
        content = await reply.aread()
        with contextlib.suppress(*UNREADABLE):
            parsed = json.loads(content)
            exchange.take(parsed)
            content = json.dumps(parsed, ensure_ascii=False, separators=(",", ":")).encode()
        self._keep(exchange, route)
        yield content

    async def _events(
        self, reply: httpx.Response, exchange: Exchange, route: str
    ) -> AsyncIterator[bytes]:
        """The lines of a stream as they come, without what was asked for here."""
        held, is_left_out = b"", False
        try:
            async for piece in reply.aiter_bytes():
                *lines, held = (held + piece).split(b"\n")
                out = b""
                for line in lines:
                    if is_left_out and not line.strip():  # the end of an event that is left out
                        is_left_out = False
                        continue
                    changed = _event(line, exchange)
                    is_left_out = changed is None
                    out += b"" if changed is None else changed + b"\n"
                if out:
                    yield out
            if held:
                yield held
        finally:
            self._keep(exchange, route)

    def _keep(self, exchange: Exchange, route: str) -> None:
        """Give the answers that have ended to the recorder."""
        mine = self._counters.of((route, SAMPLER))
        if (seen := exchange.speculation) is not None:
            for name in ("rounds", "drafted", "accepted", "tested", "acceptance"):
                setattr(mine, name, getattr(mine, name) + getattr(seen, name))
        if not exchange.answers():
            return self._count("unfinished")
        mine.requests += 1
        mine.tokens += sum(len(one.output_ids) for _, one in exchange.answers())

        def make() -> list[Record]:
            try:
                made = exchange.records(self._texts, self._default)
            except UNREADABLE:  # what no template renders, and no tokenizer reads
                made = []
            self._count("recorded" if made else "unknown")
            return made

        self._recorder.take(route, make)

    def _count(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    async def _metrics(self, reply: httpx.Response) -> Response:
        """The engine's metrics, and the proxy's behind them."""
        content = await reply.aread()
        self._dropped.reset()
        self._dropped.inc(self._recorder.dropped)
        mine = generate_latest(self._registry)
        return Response(content + mine, headers={"content-type": reply.headers["content-type"]})

    async def close(self) -> None:
        await self._client.aclose()


async def while_here(
    request: Request, sending: Coroutine[Any, Any, httpx.Response]
) -> httpx.Response | None:
    """The engine's reply; None, and the engine is told, where the client has gone.

    The body of `request` has been read.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    reply, left = asyncio.ensure_future(sending), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({reply, left}, return_when=asyncio.FIRST_COMPLETED)
        return reply.result() if reply.done() else None
    finally:
        for one in (reply, left):
            one.cancel()


async def _whole(request: Request) -> bytes | AsyncIterator[bytes]:
    """The body of a request, or a stream of one that is too long to be looked at."""
    pieces, size, stream = list[bytes](), 0, request.stream()
    async for piece in stream:
        pieces.append(piece)
        size += len(piece)
        if size > MAX_BODY_BYTES:
            return _after(pieces, stream)
    return b"".join(pieces)


async def _after(pieces: Iterable[bytes], rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    async for piece in rest:
        yield piece


def _event(line: bytes, exchange: Exchange) -> bytes | None:
    """A line of a stream without what was asked for here; None for one sent for that alone."""
    ended = line.endswith(b"\r")
    if not line.startswith(EVENT):
        return line
    try:
        parsed = json.loads(line[len(EVENT) :])
        if not exchange.take(parsed):
            return None
        content = json.dumps(parsed, ensure_ascii=False, separators=(",", ":")).encode()
    except UNREADABLE:  # as [DONE]
        return line
    return EVENT + content + b"\r" * ended


def _passed(
    reply: httpx.Response, pieces: AsyncIterator[bytes], *, is_changed: bool = False
) -> Response:
    """The reply to the client: the engine's status and headers."""

    async def until_left() -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece
        finally:
            await reply.aclose()

    left_out = HOP | ({"content-length", "content-encoding"} if is_changed else frozenset())
    made = StreamingResponse(until_left(), status_code=reply.status_code)
    made.raw_headers = [
        (name.lower(), value)
        for name, value in reply.headers.raw
        if name.decode("latin-1").lower() not in left_out
    ]
    return made


def unreachable(url: httpx.URL, error: Exception) -> ApiError:
    """What to tell a client whose engine does not answer."""
    message = f"the engine at {url.netloc.decode()} does not answer ({first_line(error)})"
    return ApiError(message, status=502, code="engine_unreachable")
