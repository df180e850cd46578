"""uvicorn as draftkit runs it: connections that do nothing go, the end of the server is orderly.

uvicorn waits for ever for the first request of a connection, and for the rest of its headers.
Here a connection that is not waiting for an answer has HEADER_SECONDS to send its next request's
headers. A body comes in CHUNKS chunks at most: each costs the event loop microseconds, and one
read may bring tens of thousands. The listening socket lets the kernel drop readers that take
nothing any more. Nothing is logged of requests. Knows no routes and no engine.
"""

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from draftkit.serving.limits import REFUSAL

HEADER_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 30.0  # between the requests of a connection
CLOSING_SECONDS = 5.0  # for the last answers to be sent, after the engine has drained
CHUNKS = 1024  # of a body with Transfer-Encoding: chunked
PIECE = 16_384  # bytes that are parsed at once: as many as headers may have
UNREAD_BYTES = 64_000_000  # thrown away of a request that is answered before its end
SPARE_FILES = 128  # descriptors for models, database and logs beside the connections


class _Parser(h11.Connection):
    """Takes nothing more from a body that comes in more than CHUNKS chunks."""

    chunks = 0  # of the body under way

    def next_event(self) -> Any:
        """As h11's; PAUSED from the first chunk on that is too many."""
        if self.chunks > CHUNKS:
            return h11.PAUSED
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.chunks = 0
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
        return event


class _Transport:
    """A transport that leaves to its connection what it means to close it."""

    def __init__(self, inner: Any, connection: "Connection") -> None:
        self._inner = inner
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        """Whether nothing more is to be sent."""
        return self._connection.lingers or self._inner.is_closing()


class Connection(H11Protocol):
    """One connection of a client."""

    header_seconds = HEADER_SECONDS
    lingers = False  # answered and ended; what still comes is thrown away
    _unread = 0
    _clock: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self._parser = _Parser(h11.SERVER, PIECE)
        self.conn = self._parser

    def connection_made(self, transport: Any) -> None:
        self._inner = transport
        super().connection_made(_Transport(transport, self))  # pyrefly: ignore
        self.access_log = False  # whatever handlers a host program gives to its logs
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once headers are complete; other bytes do not set it back."""
        for start in range(0, len(data), PIECE):
            if not self.transport.is_closing():
                super().data_received(data[start : start + PIECE])
        if self.lingers:
            self._unread += len(data)
            if self._unread > UNREAD_BYTES:
                self.transport.abort()
        else:
            self._watch()

    def handle_events(self) -> None:
        """Handle what has come; a body of too many chunks is a reason to refuse its request."""
        super().handle_events()
        if self._parser.chunks > CHUNKS:
            self.scope["state"][REFUSAL] = (
                f"the body comes in more than {CHUNKS} chunks: send larger ones, or Content-Length"
            )

    def end(self) -> None:
        """Close the connection, at once if the request has come to its end.

        To close before would reset it, and the client might lose the answer: so only this side
        ends. What still comes is not parsed, and bounded in bytes and in time.
        """
        if self.lingers or self.conn.their_state is not h11.SEND_BODY:
            self._inner.close()
        elif not self._inner.is_closing():
            self.lingers = True
            self._inner.write_eof()
            self._inner.resume_reading()
            self._stop()
            self._clock = self.loop.call_later(self.header_seconds, self._inner.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        if self.conn.our_state is not h11.IDLE:
            self._stop()
        elif self._clock is None and not self.transport.is_closing():
            self._clock = self.loop.call_later(self.header_seconds, self.transport.abort)

    def _stop(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None


def listen(host: str, port: int, *, stalled_seconds: float) -> socket.socket:
    """A listening socket; port 0 takes any that is free.

    The kernel ends connections whose reader takes nothing for `stalled_seconds`. Raises ValueError
    naming serve.host and serve.port where it cannot listen there.
    """
    try:
        (family, _, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"serve.host={host}: no such address ({error.strerror})") from error
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        made = socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ValueError(
            f"cannot listen on serve.host={host} serve.port={port} ({reason}): "
            "stop what listens there, or give another (serve.port=0 takes any that is free)"
        ) from error
    with suppress(AttributeError, OSError):  # Linux only
        milliseconds = int(stalled_seconds * 1000)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    made.setblocking(False)
    return made


def room_for(connections: int) -> int:
    """Raise this process's limit of open files for so many; return how many it allows."""
    wanted, (soft, hard) = connections + SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(connections, soft - SPARE_FILES))


class Server(uvicorn.Server):
    """Serves until told to stop; then takes no more connections and waits for `drain`.

    `drain` ends when no answer is being made any more, and may block.
    """

    def __init__(
        self, app: Any, *, connections: int, drain_seconds: float, drain: Callable[[], object]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(KEEP_ALIVE_SECONDS),
                timeout_graceful_shutdown=int(drain_seconds + CLOSING_SECONDS),
                limit_concurrency=connections,
            )
        )
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the answers that have begun end."""
        draining = asyncio.create_task(asyncio.to_thread(self._drain))
        await super().shutdown(sockets)
        await draining
