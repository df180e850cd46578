"""uvicorn as draftkit runs it: its own limits, and an end that lets begun answers end.

A connection between two requests has `KEEP_ALIVE_SECONDS`, more than `CONNECTIONS` are
answered with 503, and nothing is logged of requests. Clients that send headers or bodies in drops,
or hold connections open, are the proxy's in front (docs/online.md). Knows no routes and no engine.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

KEEP_ALIVE_SECONDS = 30
CONNECTIONS = 512  # at once; more are answered with 503
DRAIN_SECONDS = 30  # in which answers under way end
CLOSING_SECONDS = 5  # for the last answers to be sent, after the engine has drained


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free.

    Raises ValueError naming serve.host and serve.port where it cannot listen there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # without the address, which follows
        raise ValueError(
            f"cannot listen on serve.host={host} serve.port={port} ({reason}): "
            "stop what listens there, or give another (serve.port=0 takes any that is free)"
        ) from error
    made.setblocking(False)
    return made


class Server(uvicorn.Server):
    """A server of `app`: `run(sockets=[...])` serves, until `should_exit` is set.

    Then it takes no more connections and lets answers end: `drain` is called on another thread, and
    returns when no answer is being made any more.
    """

    def __init__(self, app: Any, drain: Callable[[], object]) -> None:
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
            limit_concurrency=CONNECTIONS,
        )
        super().__init__(config)
        self._drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(asyncio.to_thread(self._drain))
        await super().shutdown(sockets)
        await draining
