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
LOOK_SECONDS = 0.1  # between two looks whether the server was told to stop


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


def server_of(app: Any) -> uvicorn.Server:
    """A server of `app`, for `run`; set its `should_exit` to end it."""
    logging.getLogger("uvicorn.access").disabled = True  # whatever handlers a host program has
    return uvicorn.Server(
        uvicorn.Config(
            app,
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
    )


def run(server: uvicorn.Server, listening: socket.socket, *, drain: Callable[[], object]) -> None:
    """Serve until told to stop; then take no more connections and let answers end.

    `drain` is called then, on another thread, and ends when no answer is being made any more.
    """

    async def drained() -> None:
        while not server.should_exit:
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.to_thread(drain)

    async def serve() -> None:
        draining = asyncio.create_task(drained())
        try:
            await server.serve(sockets=[listening])
        finally:
            server.should_exit = True
            await draining

    asyncio.run(serve())
