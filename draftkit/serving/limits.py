"""The door: the key or the host, and the kind and size of a body.

A pure ASGI layer around the app, so that nothing behind it sees a request without the key or more
of a body than the limit. It knows no route but `/health` and nothing of what is asked. Clients that
send in drops are the proxy's in front (docs/online.md).
"""

import hmac
import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftkit.serving.protocol import SHOWN, ApiError

MAX_BODY_BYTES = 4_000_000
OPEN_PATHS = ("/health",)  # answered without the key


class Limits:
    """Lets requests through to `app` whose key and body are in order."""

    def __init__(self, app: ASGIApp, *, key: str | None, host: str) -> None:
        """`key`: what `Authorization: Bearer` must hold, None to let everybody in.

        Everybody is not the pages of other sites, to whose names a browser may be made to find
        this server's address: without a key `Host` must be an address, localhost, or `host`.
        """
        self._app = app
        self._hosts = ("", "localhost", host.lower())  # no header is no browser's
        self._key = None if key is None else key.encode()

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

        try:
            headers = Headers(scope=scope)
            if scope["path"] not in OPEN_PATHS:
                self._check_caller(headers)
            if scope["method"] == "POST":
                _check_kind(headers)
        except ApiError as error:
            return await error.response(scope, receive, send)
        return await self._app(scope, counted, send)

    def _check_caller(self, headers: Headers) -> None:
        if self._key is None:
            return self._check_host(headers.get("host", ""))
        kind, _, word = headers.get("authorization", "").partition(" ")
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


def _check_kind(headers: Headers) -> None:
    """Refuse what a page of another site may send without asking: a body that is not JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            "the body must be JSON: send Content-Type: application/json",
            status=415,
            code="unsupported_media_type",
        )
