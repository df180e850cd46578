"""uvicorn as draftkit runs it: connections that do nothing go, the end of the server is orderly.

uvicorn waits for ever for the first request of a connection, and for the rest of its headers.
Here a connection that is not waiting for an answer has HEADER_SECONDS to send its next request's
headers. The listening socket lets the kernel drop readers that take nothing any more. Nothing is
logged of requests. Knows no routes and no engine.
"""

import asyncio
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 30.0  # between the requests of a connection
CLOSING_SECONDS = 5.0  # for the last answers to be sent, after the engine has drained
SPARE_FILES = 128  # descriptors for models, database and logs beside the connections


class Connection(H11Protocol):
    """One connection of a client."""

    header_seconds = HEADER_SECONDS
    _clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self.access_log = False  # whatever handlers a host program gives to its logs
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the clock once headers are complete; other bytes do not set it back."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        # DONE: answered before its body had come, the rest of which is thrown away.
        if self.conn.our_state not in (h11.IDLE, h11.DONE):
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
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"serve.host={host}: no such address ({error.strerror})") from error
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with suppress(AttributeError, OSError):  # Linux only
        milliseconds = int(stalled_seconds * 1000)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    try:
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        made.close()
        raise ValueError(
            f"cannot listen on serve.host={host} serve.port={port} ({error.strerror}): "
            "stop what listens there, or give another (serve.port=0 takes any that is free)"
        ) from error
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
