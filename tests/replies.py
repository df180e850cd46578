"""Servers that are functions: what `draftkit.endpoint` asks, `reply` answers, without a socket."""

from collections.abc import Callable

import httpx
import pytest


def answer_by(
    monkeypatch: pytest.MonkeyPatch, reply: Callable[[httpx.Request], httpx.Response]
) -> None:
    """Let `reply` answer every request of an asynchronous client."""
    transport = httpx.MockTransport(reply)

    async def handle(self: object, request: httpx.Request) -> httpx.Response:
        made = await transport.handle_async_request(request)
        # As from a socket: read by the client, which sees how long that took.
        return httpx.Response(made.status_code, stream=httpx.ByteStream(made.content))

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", handle)
