"""A recording proxy before an engine that speaks OpenAI's API: bytes pass, answers are kept.

What is not recorded passes as it is, in both directions and piece by piece. A request that is
recorded asks for ids beside (`capture`), and its reply leaves without them. Records are written by
the thread of `recorder`, and no reply waits for it. Every completion and chat counts once, by what
became of it. An engine that is slow or dead delays no request but its own.
"""

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftkit.artifacts import first_line
from draftkit.config import DEFAULT_ROUTE, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.serving.answers import Counters
from draftkit.serving.capture import SAMPLER, Exchange, is_recordable, waiting_in
from draftkit.serving.intake import RECORD_HEADER, ROUTE_HEADER, Texts
from draftkit.serving.metrics import CONTENT_TYPE
from draftkit.serving.protocol import ApiError
from draftkit.serving.recorder import TELL_SECONDS, Recorder
from draftkit.serving.server import CHAT, COMPLETIONS, MAX_BODY_BYTES, OPEN_PATHS, check_caller

# Of one connection (RFC 9110, 7.6.1), and what the server sends itself.
HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te"),
        *("trailer", "transfer-encoding", "upgrade", "proxy-connection", "date"),
    )
)
OURS = frozenset((RECORD_HEADER, ROUTE_HEADER))
CHANGED = frozenset(("content-length", "accept-encoding", "content-encoding"))  # by a recording
METRICS = "/metrics"
NO_METRICS = frozenset((401, 403, 404, 501))  # of an engine that has none, or none for us
EVENT = b"data:"
# What is no reply of OpenAI's API passes as it is.
UNREADABLE = (ValueError, ArithmeticError, RecursionError, TypeError, LookupError, AttributeError)
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0  # of a connection to the engine: shorter than engines keep theirs
LARGE_BYTES = 1 << 18  # of a reply that is not read on the event loop
RECORDED_BYTES = 1 << 20  # of a request: a thousand of them may wait to be written
OUTCOMES = (
    "recorded",  # handed to the thread that writes
    "dropped",  # as that thread had too much to do
    "opted_out",
    "left_out",  # by the fraction, a route that is not recorded, or its length
    "other_law",  # than the target's by temperature, top-k, top-p and repetition penalty
    "unfinished",  # refused by the engine, or left by the client
    "unknown",  # ids
    "unreachable",
)


class Proxy:
    """Passes requests on to the engine at `url`, and what `recorder` is to keep to it.

    has_ids: whether the engine tells ids. models: what clients call the target there. default: the
    sampling of requests that name none. version: that drafts on a route, where it is known.
    fraction: of the requests, those that are recorded. key, host: as `server.check_caller` asks.
    """

    def __init__(
        self,
        url: str,
        recorder: Recorder,
        texts: Texts,
        *,
        has_ids: bool,
        models: Collection[str],
        default: SamplingConfig,
        routes: Iterable[str],
        version: Callable[[str], str | None] = lambda route: None,
        fraction: float,
        key: str | None,
        host: str,
    ) -> None:
        self._url, self._recorder, self._texts = httpx.URL(url), recorder, texts
        self._has_ids, self._models, self._default = has_ids, models, default
        self._fraction, self._key, self._host = fraction, key, host
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(keepalive_expiry=IDLE_SECONDS),
            trust_env=False,
        )
        self._counters = Counters()
        self._looking: asyncio.Task[None] | None = None
        self._routes, self._version = frozenset(routes), version
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "draftkit:captured_requests",
            "Completions and chats by what became of them.",
            ["outcome"],
            registry=self._registry,
        )
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        dropped = Gauge("draftkit:records_dropped", "Records lost.", registry=self._registry)
        dropped.set_function(lambda: recorder.dropped)

    def counters(self) -> Counters:
        """The acceptance that the engine reported, by route, and how many requests wait there."""
        return copy.deepcopy(self._counters)

    async def _look(self) -> None:
        """Keep reading how many requests wait at the engine, where it tells."""
        address = self._url.copy_with(path=self._url.path.rstrip("/") + METRICS)
        status = 0
        while status not in NO_METRICS:
            queued = 0
            with suppress(httpx.HTTPError):
                reply = await self._client.get(address, timeout=TELL_SECONDS)
                status, queued = reply.status_code, waiting_in(reply.content)
            self._counters.queued = queued
            await asyncio.sleep(TELL_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app: every request that may come in is answered by the engine."""
        if scope["type"] != "http":
            return
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        request = Request(scope, receive)
        try:
            if request.url.path not in OPEN_PATHS:
                check_caller(request.headers, key=self._key, host=self._host)
            response = await self._answered(request)
        except ApiError as error:
            response = error.response
        except ClientDisconnect:  # before it had sent all
            return
        await response(scope, receive, send)

    async def _answered(self, request: Request) -> Response:
        """The engine's reply to any request."""
        path, exchange = request.url.path, None
        body: bytes | AsyncIterator[bytes] | None = None
        if not {"content-length", "transfer-encoding"}.isdisjoint(request.headers):
            body = await _whole(request)
        if request.method == "POST" and path in (COMPLETIONS, CHAT):
            exchange = self._exchange(request, body)
        left_out = HOP | OURS | {"host"}
        if exchange is not None and exchange.asks:
            body, left_out = json.dumps(exchange.body).encode(), left_out | CHANGED
        if path == METRICS:  # ours are of the plain format, whatever else is taken
            left_out = left_out | {"accept", "accept-encoding"}
        headers = [
            (name, value)
            for name, value in request.headers.raw
            if name.decode("latin-1").lower() not in left_out
        ]
        try:
            reply = await self._sent(request, headers, body)
        except ApiError:
            if exchange is not None:
                self._count("unreachable")
            raise
        if path == METRICS:
            return await self._metrics(reply)
        if exchange is not None and (reply is None or reply.status_code != 200):
            exchange = self._count("unfinished")
        if reply is None:
            return Response(status_code=499)  # to nobody
        if exchange is None:
            return _passed(reply, reply.aiter_raw())
        route = request.headers.get(ROUTE_HEADER, DEFAULT_ROUTE)
        kind = reply.headers.get("content-type", "")
        read = self._events if kind.startswith("text/event-stream") else self._body
        return _passed(reply, read(reply, exchange, route), is_changed=True)

    async def _sent(
        self,
        request: Request,
        headers: list[tuple[bytes, bytes]],
        body: bytes | AsyncIterator[bytes] | None,
    ) -> httpx.Response | None:
        """The engine's reply, of which the body is to come; None where the client has gone.

        Raises ApiError where the engine does not answer, but for its metrics.
        """
        query = request.scope["query_string"]
        path = request.scope.get("raw_path") or request.url.path.encode()
        path = self._url.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        sent = httpx.Request(
            request.method, self._url, headers=headers, content=body, extensions={"target": path}
        )
        sending = self._client.send(sent, stream=True)
        try:
            if body is None or isinstance(body, bytes):
                return await while_here(request, sending)
            return await sending
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            if request.url.path == METRICS:
                return None
            address = self._url.netloc.decode()
            message = f"the engine at {address} does not answer ({first_line(error)})"
            raise ApiError(message, status=502, code="engine_unreachable") from error

    def _exchange(self, request: Request, content: Any) -> Exchange | None:
        """The request as it is recorded; None for one that is not."""
        headers = request.headers
        words = [word.strip().lower() for word in headers.getlist(RECORD_HEADER)]
        if any(word != "yes" for word in words):  # of an unclear word too: the owner's wish is one
            return self._count("opted_out")
        is_known = headers.get(ROUTE_HEADER, DEFAULT_ROUTE) in self._routes
        is_short = isinstance(content, bytes) and len(content) <= RECORDED_BYTES
        # What a page of another site may send without asking is a body that is not JSON.
        is_json = headers.get("content-type", "").partition(";")[0].strip() == "application/json"
        if not (is_known and is_short and is_json) or random.random() >= self._fraction:
            return self._count("left_out")
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            return self._count("unfinished")  # the engine will say what is wrong
        if isinstance(body, dict) and body.get("store") is False:  # OpenAI's own word for it
            return self._count("opted_out")
        if not is_recordable(body) or body.get("model") not in self._models:
            return self._count("other_law")
        return Exchange(body, length=len(content), has_ids=self._has_ids)

    async def _body(
        self, reply: httpx.Response, exchange: Exchange, route: str
    ) -> AsyncIterator[bytes]:
        """A whole reply, without what was asked for here."""
        try:
            content = await reply.aread()
            if len(content) > LARGE_BYTES:
                content = await asyncio.to_thread(_blanked, content, exchange)
            else:
                content = _blanked(content, exchange)
        finally:
            self._keep(exchange, route)
        assert content is not None  # it is no event
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
                    changed = _line(line, exchange)
                    is_left_out = changed is None
                    out += b"" if changed is None else changed + b"\n"
                if out:
                    yield out
            if held:
                yield _line(held, exchange) or b""
        finally:
            self._keep(exchange, route)

    def _keep(self, exchange: Exchange, route: str) -> None:
        """Give the answers that have ended to the recorder."""
        version = self._version(route)
        served = self._counters.of((route, version or SAMPLER))
        if (seen := exchange.speculation) is not None:
            for name in ("rounds", "drafted", "accepted", "tested", "acceptance"):
                setattr(served, name, getattr(served, name) + getattr(seen, name))
        ended = exchange.answers()
        if not ended:
            return self._count("unfinished")
        served.requests += len(ended)
        served.tokens += exchange.tokens

        def make() -> list[Record]:
            try:
                made = exchange.records(self._texts, self._default, version or "")
            except UNREADABLE:  # what no template renders, and no tokenizer reads
                made = []
            self._count("recorded" if made else "unknown")
            return made

        if not self._recorder.take(route, make, exchange.size):
            self._count("dropped")

    def _count(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    async def _metrics(self, reply: httpx.Response | None) -> Response:
        """The engine's metrics, where it has any, and the proxy's behind them."""
        content = b""
        if reply is not None and reply.status_code == 200:
            content = await reply.aread()
        if reply is not None:
            await reply.aclose()
        return Response(content + generate_latest(self._registry), media_type=CONTENT_TYPE)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
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
    """The body of a request, or a stream of one that is too long to be held."""
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


def _line(line: bytes, exchange: Exchange) -> bytes | None:
    """A line of a stream without what was asked for here; None for one sent for that alone."""
    if not line.startswith(EVENT):
        return line
    content = line[len(EVENT) :].strip()
    blanked = _blanked(content, exchange)
    if blanked is None or blanked is content:
        return None if blanked is None else line
    return EVENT + b" " + blanked + b"\r" * line.endswith(b"\r")


def _blanked(content: bytes, exchange: Exchange) -> bytes | None:
    """A reply, or an event of one, without what was asked for here; itself if nothing was.

    None for an event that was sent for that alone.
    """
    try:
        parsed = json.loads(content)
        is_visible = exchange.take(parsed)
    except UNREADABLE:  # as [DONE]
        return content
    if not exchange.asks:
        return content
    try:
        text = json.dumps(parsed, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a character
        text = json.dumps(parsed, separators=(",", ":")).encode()
    return text if is_visible else None


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

    left_out = HOP | CHANGED if is_changed else HOP
    made = StreamingResponse(until_left(), status_code=reply.status_code)
    made.raw_headers = [
        (name.lower(), value)
        for name, value in reply.headers.raw
        if name.decode("latin-1").lower() not in left_out
    ]
    return made
