"""The door: the key or the host, the size, kind and pace of a body, the name of each request.

A pure ASGI layer around the app, so that nothing behind it sees a request without the key or a
body beyond the limit. It knows no route but `/health` and nothing of what is asked.
"""

import asyncio
import hmac
import ipaddress
import secrets

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftkit.serving.protocol import SHOWN
from draftkit.serving.wire import ApiError

BODY_SECONDS = 30.0  # in which a body must have arrived
OPEN_PATHS = ("/health",)  # answered without the key


class Limits:
    """Lets requests through to `app` whose key and body are in order.

    Every answer carries `x-request-id`, made here: what the client sends under that name is not
    repeated.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None,
        max_body_bytes: int,
        host: str = "localhost",
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """`key`: what `Authorization: Bearer` must hold, None to let everybody in.

        Everybody is not the pages of other sites, to whose names a browser may be made to find
        this server's address: without a key `Host` must be an address, localhost, or `host`.
        """
        self._app = app
        self._hosts = ("", "localhost", host.lower())  # no header is no browser's
        self._key = None if key is None else key.encode()
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request, name = Request(scope, receive), secrets.token_hex(12)
        request.state.request_id = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = (b"x-request-id", f"req-{name}".encode())
                message["headers"] = [*message.get("headers", []), own]
            await send(message)

        try:
            self._check_key(request)
            if request.method == "POST":
                self._check_kind(request)
                receive = _replay(await self._body(request), receive)
        except ApiError as error:
            return await error.response(scope, receive, named)
        except ClientDisconnect:
            return None
        return await self._app(scope, receive, named)

    def _check_key(self, request: Request) -> None:
        if request.scope["path"] in OPEN_PATHS:
            return
        if self._key is None:
            return self._check_host(_header(request, "host"))
        kind, _, word = _header(request, "authorization").partition(" ")
        is_right = hmac.compare_digest(word.strip().encode("latin-1"), self._key)
        if kind.lower() != "bearer" or not is_right:
            raise ApiError(
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_host(self, given: str) -> None:
        host = given[1:].partition("]")[0] if given.startswith("[") else given.partition(":")[0]
        host = host.lower().removesuffix(".")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if host not in self._hosts:
                raise ApiError(
                    f"Host {host[:SHOWN]!r} needs a key: set DRAFTKIT_API_KEY at the server and "
                    "send it, or ask at an address or at serve.host",
                    status=403,
                    code="unknown_host",
                ) from None

    def _check_kind(self, request: Request) -> None:
        kind, _, parameters = _header(request, "content-type").lower().partition(";")
        charset = parameters.replace('"', "").replace(" ", "")
        is_json = kind.strip() == "application/json"
        is_plain = charset in ("", "charset=utf-8", "charset=utf8")
        if not (is_json and is_plain) or _header(request, "content-encoding"):
            raise ApiError(
                "the body must be plain JSON in UTF-8: send Content-Type: application/json",
                status=415,
                code="unsupported_media_type",
            )

    async def _body(self, request: Request) -> bytes:
        """The whole body. Raises ClientDisconnect where the client leaves before its end."""
        too_large = ApiError(
            f"the body exceeds {self._max_body_bytes} bytes (serve.max_body_bytes)",
            status=413,
            code="too_large",
        )
        declared = _header(request, "content-length")
        if declared.isdecimal() and int(declared[:20]) > self._max_body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > self._max_body_bytes:
                        raise too_large
        except TimeoutError:
            reason = f"the body did not arrive within {self._body_seconds:g} s"
            raise ApiError(reason, status=408, code="slow_body") from None
        return bytes(body)


def _header(request: Request, name: str) -> str:
    """A header's value, empty without one; several are joined."""
    return ", ".join(request.headers.getlist(name))


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` with `body` before what is still to come."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
