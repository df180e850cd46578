"""The OpenAI API over an engine: `/v1/completions`, `/v1/chat/completions`, models, metrics.

The routes, the door before them (the key or the host, the kind and size of a body), and uvicorn
with limits and an end that lets begun answers end. Every error is told in OpenAI's form with one
line of reason, and nothing is logged of requests. Clients that send headers or bodies in drops, or
hold connections open, are the proxy's in front (docs/online.md). This module decodes nothing:
requests become jobs in `intake`, and pieces become answers in `replies`.
"""

import asyncio
import hmac
import ipaddress
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftkit.serving.answers import Draining, QueueFull
from draftkit.serving.engine import Engine
from draftkit.serving.intake import Intake, no_model
from draftkit.serving.metrics import CONTENT_TYPE, Metrics
from draftkit.serving.protocol import (
    SHOWN,
    ApiError,
    ChatRequest,
    CompletionRequest,
    explain,
    json_response,
)
from draftkit.serving.replies import Delivery, Reply

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_BODY_BYTES = 4_000_000
OPEN_PATHS = ("/health",)  # answered without the key
KEEP_ALIVE_SECONDS = 30  # of a connection between two requests
CONNECTIONS = 512  # at once; more are answered with 503
DRAIN_SECONDS = 30  # in which answers under way end
CLOSING_SECONDS = 5  # for the last answers to be sent, after the engine has drained


# Routes


def make_app(engine: Engine, intake: Intake, *, key: str | None) -> FastAPI:
    """The server's app. `key`: without it nothing but `/health` answers; None: there is none."""
    metrics, model_name = Metrics(engine, intake.model_name), intake.model_name
    app = FastAPI(
        title="draftkit",
        docs_url=None,  # these pages load scripts from afar
        redoc_url=None,
        responses={"4XX": {"description": "What is wrong, in OpenAI's form of errors"}},
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.add_middleware(Limits, key=key, host=intake.settings.host)
    for kind in (HTTPException, RequestValidationError, QueueFull, Draining, Exception):
        app.add_exception_handler(kind, refused)

    async def answer(body: CompletionRequest | ChatRequest, request: Request) -> Response:
        began = time.monotonic()
        # Encoding long texts takes a while: not on the event loop.
        jobs = await asyncio.to_thread(intake.prepare, body, request.headers)
        reply = Reply(body, jobs, intake.texts)
        delivery = Delivery(engine, reply, metrics, began=began)
        return delivery.stream() if reply.streams else await delivery.whole(request)

    @app.post(COMPLETIONS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        return await answer(body, request)

    @app.post(CHAT)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer in a conversation."""
        return await answer(body, request)

    model = {"id": model_name, "object": "model", "created": int(time.time())}
    model |= {"owned_by": "draftkit", "max_model_len": engine.max_length, "root": model_name}

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model."""
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The model, if that is its name."""
        if name != model_name:
            raise no_model(name)
        return json_response(model)

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken and answered."""
        if not engine.healthy():
            return json_response({"status": "failed"}, 503)
        if engine.draining:
            return json_response({"status": "draining"}, 503)
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def exposition() -> Response:
        """For Prometheus."""
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return app


async def refused(request: Request, error: Exception) -> Response:
    """An error in OpenAI's form."""
    if isinstance(error, ApiError):
        return error.response
    message, status, code = "an error of the server: its log says which", 500, "internal_error"
    headers: Mapping[str, str] | None = None
    if isinstance(error, RequestValidationError):
        is_chat = request.scope["path"] == CHAT
        return explain(error.errors(), ChatRequest if is_chat else CompletionRequest).response
    if isinstance(error, QueueFull):
        message, status, code, headers = str(error), 429, "queue_full", {"retry-after": "1"}
    elif isinstance(error, Draining):
        message, status, code, headers = str(error), 503, "draining", {"retry-after": "5"}
    elif isinstance(error, HTTPException):
        path, status, code, headers = request.scope["path"], error.status_code, None, error.headers
        messages = {
            400: "the body is no JSON in UTF-8",
            404: f"there is nothing at {path[:SHOWN]!r}",
            405: f"{request.method} is not possible at {path[:SHOWN]!r}",
        }
        message = messages.get(status, str(error.detail))
    return ApiError(message, status=status, code=code, headers=headers).response


# The door


class Limits:
    """Lets requests through to `app` whose key and body are in order.

    A pure ASGI layer, so that nothing behind it sees a request without the key or more of a body
    than the limit.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, host: str) -> None:
        """`key`: what `Authorization: Bearer` must hold, None to let everybody in.

        Everybody is not the pages of other sites, to whose names a browser may be made to find
        this server's address: without a key `Host` must be an address, localhost, or `host`.
        """
        self._app, self._key, self._host = app, key, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_BODY_BYTES:
                reason = f"the body exceeds {MAX_BODY_BYTES} bytes"
                raise ApiError(reason, status=413, code="too_large")
            return message

        headers = Headers(scope=scope)
        try:
            if scope["path"] not in OPEN_PATHS:
                check_caller(headers, key=self._key, host=self._host)
            # What a page of another site may send without asking is a body that is not JSON.
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if scope["method"] == "POST" and kind != "application/json":
                raise ApiError(
                    "the body must be JSON: send Content-Type: application/json",
                    status=415,
                    code="unsupported_media_type",
                )
        except ApiError as error:
            return await error.response(scope, receive, send)
        return await self._app(scope, counted, send)


def check_caller(headers: Headers, *, key: str | None, host: str) -> None:
    """Raise ApiError unless the request has the `key`, or there is none and its `Host` is in order.

    See `Limits`.
    """
    if key is not None:
        kind, _, word = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(word.strip().encode("latin-1"), key.encode())
        if kind.lower() != "bearer" or not is_right:
            raise ApiError(
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return
    given = headers.get("host", "")
    name = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
    name = name.lower().removesuffix(".")
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if name not in ("", "localhost", host.lower()):  # no header is no browser's
            raise ApiError(
                f"Host {name[:SHOWN]!r} needs a key: set DRAFTKIT_API_KEY at the server and "
                "send it, or ask at an address or at serve.host",
                status=403,
                code="unknown_host",
            ) from None


# The process


def listen(host: str, port: int, name: str = "serve.port") -> socket.socket:
    """A listening socket; port 0 takes any that is free. name: of the setting.

    Raises ValueError naming serve.host and `name` where it cannot listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # without the address, which follows
        raise ValueError(
            f"cannot listen on serve.host={host} {name}={port} ({reason}): "
            f"stop what listens there, or give another ({name}=0 takes any that is free)"
        ) from error
    # Accepted connections inherit it. asyncio sets it for sockets whose protocol is named alone.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setblocking(False)
    return made


class Server(uvicorn.Server):
    """A server of `app`: `run(sockets=[...])` serves, until `should_exit` is set.

    Then it takes no more connections and lets answers end: `drain` is called on another thread, and
    returns when no answer is being made any more. `close` is awaited at the very end. is_limited:
    to CONNECTIONS, also those between two requests.
    """

    def __init__(
        self,
        app: Any,
        drain: Callable[[], object],
        close: Callable[[], Awaitable[None]] | None = None,
        *,
        is_limited: bool = True,
    ) -> None:
        logging.getLogger("uvicorn.access").disabled = True  # whatever handlers a host program has
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS + CLOSING_SECONDS,
            limit_concurrency=CONNECTIONS if is_limited else None,
        )
        super().__init__(config)
        self._drain, self._close = drain, close

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(asyncio.to_thread(self._drain))
        await super().shutdown(sockets)
        await draining
        if self._close is not None:
            await self._close()
