"""The door: the key, the size, kind and pace of a body, the name of each request.

A pure ASGI layer around the app, so that nothing behind it sees a request without the key or a
body beyond the limit. It knows no route but `/health` and nothing of what is asked.
"""

import asyncio
import hmac
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from draftkit.serving.replies import encode, error_body

BODY_SECONDS = 30.0  # in which a body must have arrived
OPEN_PATHS = ("/health",)  # answered without the key

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Refused(Exception):
    """A request that is not let in."""

    def __init__(self, status: int, message: str, code: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Limits:
    """Lets requests through to `app` whose key and body are in order.

    Every answer carries `x-request-id`, made here: what the client sends under that name is not
    repeated.
    """

    def __init__(
        self,
        app: App,
        *,
        key: str | None,
        max_body_bytes: int,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """`key`: what `Authorization: Bearer` must hold, None to let everybody in."""
        self._app = app
        self._key = None if key is None else key.encode()
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = name

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = (b"x-request-id", f"req-{name}".encode())
                message["headers"] = [*message.get("headers", []), own]
            await send(message)

        try:
            self._check_key(scope)
            if scope["method"] == "POST":
                self._check_kind(scope)
                body = await self._body(scope, receive)
                if body is None:
                    return None  # the client has left
                receive = _replay(body, receive)
        except Refused as refused:
            return await _answer(refused, named)
        return await self._app(scope, receive, named)

    def _check_key(self, scope: MutableMapping[str, Any]) -> None:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        given = _header(scope, b"authorization")
        kind, _, word = given.partition(b" ")
        right = hmac.compare_digest(word.strip(), self._key)
        if kind.lower() != b"bearer" or not right:
            raise Refused(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                "invalid_api_key",
                www_authenticate="Bearer",
            )

    def _check_kind(self, scope: MutableMapping[str, Any]) -> None:
        kind, _, parameters = _header(scope, b"content-type").lower().partition(b";")
        charset = parameters.replace(b'"', b"").replace(b" ", b"")
        known = charset in (b"", b"charset=utf-8", b"charset=utf8")
        if kind.strip() != b"application/json" or not known or _header(scope, b"content-encoding"):
            raise Refused(
                415,
                "the body must be plain JSON in UTF-8: send Content-Type: application/json",
                "unsupported_media_type",
            )

    async def _body(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes | None:
        """The whole body, or None where the client has left before its end."""
        declared = _header(scope, b"content-length")
        if declared.isdigit() and int(declared[:20]) > self._max_body_bytes:
            raise self._too_large()
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self._body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > self._max_body_bytes:
                        raise self._too_large()
        except TimeoutError:
            reason = f"the body did not arrive within {self._body_seconds:g} s"
            raise Refused(408, reason, "slow_body", connection="close") from None
        return bytes(body)

    def _too_large(self) -> Refused:
        return Refused(
            413,
            f"the body exceeds {self._max_body_bytes} bytes (serve.max_body_bytes)",
            "too_large",
        )


def _header(scope: MutableMapping[str, Any], name: bytes) -> bytes:
    """A header's value; empty where it is absent, or given twice and so ambiguous."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else b", ".join(found)


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` with `body` before what is still to come."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


async def _answer(refused: Refused, send: Send) -> None:
    kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
    content = encode(error_body(str(refused), kind, code=refused.code))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        **refused.headers,
    }
    start = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": start})
    await send({"type": "http.response.body", "body": content})
