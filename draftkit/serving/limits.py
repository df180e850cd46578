"""The door: the key or the host, the size, kind and pace of a body, the name of each request.

A pure ASGI layer around the app, so that nothing behind it sees a request without the key or a
body beyond the limit. An answer that does not wait for the end of its request's body closes the
connection. It knows no route but `/health` and nothing of what is asked.
"""

import asyncio
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from draftkit.serving.protocol import SHOWN
from draftkit.serving.replies import Failed

BODY_SECONDS = 30.0  # in which a body must have arrived
OPEN_PATHS = ("/health",)  # answered without the key
REFUSAL = "refusal"  # in a request's state: why the connection takes no more of its body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


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
        host: str = "localhost",
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        """`key`: what `Authorization: Bearer` must hold, None to let everybody in.

        Everybody is not the pages of other sites, to whose names a browser may be made to find
        this server's address: without a key `Host` must be an address, localhost, or `host`.
        """
        self._app = app
        self._host = host.lower()
        self._key = None if key is None else key.encode()
        self._max_body_bytes = max_body_bytes
        self._body_seconds = body_seconds

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        name = secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = name
        unread = _has_body(scope)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(b"x-request-id", f"req-{name}".encode())]
                if unread:
                    own.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", []), *own]
            await send(message)

        try:
            self._check_key(scope)
            if scope["method"] == "POST":
                self._check_kind(scope)
                body = await self._body(scope, receive)
                if body is None:
                    return None  # the client has left
                receive, unread = _replay(body, receive), False
        except Failed as failed:
            return await failed.response(scope, receive, named)
        return await self._app(scope, receive, named)

    def _check_key(self, scope: MutableMapping[str, Any]) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        if self._key is None:
            return self._check_host(_header(scope, b"host").decode("latin-1"))
        given = _header(scope, b"authorization")
        kind, _, word = given.partition(b" ")
        right = hmac.compare_digest(word.strip(), self._key)
        if kind.lower() != b"bearer" or not right:
            raise Failed(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_host(self, given: str) -> None:
        """No header is no browser's."""
        host = hostname(given)
        if host and host not in ("localhost", self._host) and not _is_address(host):
            raise Failed(
                403,
                f"Host {host[:SHOWN]!r} needs a key: set DRAFTKIT_API_KEY at the server and send "
                "it, or ask at an address or at serve.host",
                "unknown_host",
            )

    def _check_kind(self, scope: MutableMapping[str, Any]) -> None:
        kind, _, parameters = _header(scope, b"content-type").lower().partition(b";")
        charset = parameters.replace(b'"', b"").replace(b" ", b"")
        known = charset in (b"", b"charset=utf-8", b"charset=utf8")
        if kind.strip() != b"application/json" or not known or _header(scope, b"content-encoding"):
            raise Failed(
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
                    if more and (reason := scope["state"].get(REFUSAL)):
                        raise Failed(413, reason, "too_many_chunks")
        except TimeoutError:
            reason = f"the body did not arrive within {self._body_seconds:g} s"
            raise Failed(408, reason, "slow_body") from None
        return bytes(body)

    def _too_large(self) -> Failed:
        return Failed(
            413,
            f"the body exceeds {self._max_body_bytes} bytes (serve.max_body_bytes)",
            "too_large",
        )


def _header(scope: MutableMapping[str, Any], name: bytes) -> bytes:
    """A header's value; empty where it is absent, or given twice and so ambiguous."""
    found = [value for key, value in scope["headers"] if key == name]
    return found[0] if len(found) == 1 else b", ".join(found)


def _has_body(scope: MutableMapping[str, Any]) -> bool:
    in_chunks = bool(_header(scope, b"transfer-encoding"))
    return in_chunks or _header(scope, b"content-length") not in (b"", b"0")


def hostname(given: str) -> str:
    """The host of a `Host` header, without its port, in lower case; an IPv6 address bare."""
    if given.startswith("["):
        return given[1:].partition("]")[0].lower()
    return given.partition(":")[0].lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` with `body` before what is still to come."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed
