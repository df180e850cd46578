"""Connections that do nothing, readers that take nothing, and the end of a server."""

import asyncio
import contextlib
import http.client
import json
import resource
import socket
import threading
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
from uvicorn.server import ServerState

from draftkit.config import ServeConfig
from draftkit.serving import connections, delivery
from draftkit.serving.connections import Connection, Server, listen, room_for
from tests.serving.blocks import watched_loops
from tests.serving.fakes import FakeEngine, ask, completion, serving, wait_for


def opened(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has ended it; waits for a second at most."""
    connection.settimeout(1)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_idle_connections_do_not_stop_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "header_seconds", 0.3)
    with serving(FakeEngine()) as address, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(opened(address)) for _ in range(100)]
        for connection in idle[:50]:
            connection.sendall(b"GET /health HT")
        assert ask(address, "/v1/completions", completion()).status == 200
        assert all(is_closed(connection) for connection in idle)


def test_headers_in_drops_do_not_set_the_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "header_seconds", 0.3)
    with serving(FakeEngine()) as address, opened(address) as connection:
        end = time.monotonic() + 5

        def drip() -> bool:
            with contextlib.suppress(OSError):
                connection.sendall(b"a")
                time.sleep(0.02)
                return False
            return True

        connection.sendall(b"GET /health HTTP/1.1\r\nX-A: ")
        assert wait_for(drip, 5)
        assert time.monotonic() < end


def test_a_request_under_way_has_no_such_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "header_seconds", 0.1)
    with serving(FakeEngine(round_seconds=0.1)) as address:
        assert ask(address, "/v1/completions", completion()).json["choices"][0]["text"]
        connection = http.client.HTTPConnection(address, timeout=10)
        for _ in range(2):  # nor has a connection between two requests
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            time.sleep(0.2)
        connection.close()


def answer_to(address: str, *parts: bytes) -> bytes:
    """All that comes back, after every part has been sent."""
    with opened(address) as connection:
        connection.settimeout(60)
        for part in parts:
            connection.sendall(part)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := connection.recv(65536):
                received += more
    return received


def in_chunks(method: str = "POST", *more: str) -> bytes:
    """The head of a request whose body comes in chunks."""
    lines = [f"{method} /v1/completions HTTP/1.1", "Host: localhost", *more]
    lines += ["Content-Type: application/json", "Transfer-Encoding: chunked", "", ""]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize(
    ("method", "key", "status"), [("POST", "secret", 401), ("POST", None, 413), ("GET", None, 405)]
)
def test_bodies_in_one_byte_chunks_do_not_hold_the_loop(
    method: str, key: str | None, status: int
) -> None:
    with serving(FakeEngine(), key=key) as address, watched_loops() as spent:
        made = answer_to(address, in_chunks(method), *[b"1\r\na\r\n" * 100_000] * 10)
        assert ask(address, "/health").status == 200
    assert max(spent) < 0.05
    assert sum(spent) < 0.5  # nor does its end cost anything
    head = made.partition(b"\r\n\r\n")[0].lower()
    assert head.startswith(f"http/1.1 {status}".encode())
    assert b"\r\nconnection: close" in head


def test_a_body_may_come_in_so_many_chunks_and_no_more() -> None:
    body = json.dumps(completion()).encode()
    body += b" " * (connections.CHUNKS - len(body))
    chunks = [b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body]
    head, end = in_chunks("POST", "Connection: close"), b"0\r\n\r\n"
    with serving(FakeEngine()) as address:
        assert answer_to(address, head, *chunks, end).startswith(b"HTTP/1.1 200")
        refused = answer_to(address, head, b"".join(chunks), b"1\r\n \r\n", end)
        assert refused.startswith(b"HTTP/1.1 413")
        assert b"more than 1024 chunks" in refused
        # A body of a known length is no chunk, in however many parts it comes.
        known = head.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % (len(body) + 1))
        assert answer_to(address, known, *[bytes([byte]) for byte in body + b" "]).startswith(
            b"HTTP/1.1 200"
        )


def test_what_comes_behind_a_refusal_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_BYTES", 1_000_000)
    with serving(FakeEngine(), key="secret") as address, opened(address) as connection:
        connection.sendall(in_chunks())
        flood = b"1\r\na\r\n" * 10_000
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            all(connection.sendall(flood) is None for _ in range(1000))


@pytest.mark.parametrize(
    "read",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a:b\r\n" * 52_000 + b"\r\n",
        in_chunks() + b"1\r\na\r\n" * 43_000,
        in_chunks() + b"0\r\n" + b"a:b\r\n" * 52_000 + b"\r\n",
    ],
    ids=["headers", "chunks", "trailers"],
)
def test_no_single_read_holds_the_loop(read: bytes) -> None:
    """As many bytes as a read may bring, without a socket: how they are cut is up to the kernel."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    async def spent() -> float:
        server = Server(app, connections=9, drain_seconds=1, drain=lambda: None)
        config = server.config
        config.load()
        connection = Connection(config, ServerState(), {})
        transport = MagicMock()
        transport.is_closing = lambda: transport.close.called
        connection.connection_made(transport)
        began = time.thread_time()
        connection.data_received(read)
        held = time.thread_time() - began
        await asyncio.sleep(0)  # its request begins
        return held

    assert asyncio.run(spent()) < 0.05


def test_a_reader_that_takes_nothing_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "BACKLOG", 1000)
    engine = FakeEngine(endless=True, per_round=20, round_seconds=0.01)
    with serving(engine, send_buffer=10_000) as address:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = address.split(":")
        made.connect((host, int(port)))
        body = json.dumps(completion(stream=True, logprobs=5)).encode()
        made.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            + f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        assert wait_for(lambda: engine.cancelled == {0}, 30)
        assert wait_for(lambda: not engine.running)
        assert ask(address, "/health").status == 200
        made.close()


def test_a_request_is_given_up_though_the_engine_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("draftkit.serving.api.GRACE_SECONDS", 0.0)
    engine = FakeEngine(round_seconds=2)
    with serving(engine, ServeConfig(request_seconds=0.2)) as address:
        refused = ask(address, "/v1/completions", completion())
        assert (refused.status, refused.error["code"]) == (408, "timeout")
        assert engine.cancelled == {0}


def test_too_many_connections_are_told_so() -> None:
    with serving(FakeEngine(), ServeConfig(connections=5)) as address:
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(opened(address))
            assert wait_for(lambda: ask(address, "/health").status == 503)
        assert wait_for(lambda: ask(address, "/health").status == 200)


def test_the_end_waits_for_answers_and_takes_no_more() -> None:
    engine = FakeEngine(round_seconds=0.05)
    replies = []
    with serving(engine, drain=engine.drain) as address:
        body = completion(max_tokens=20)
        thread = threading.Thread(
            target=lambda: replies.append(ask(address, "/v1/completions", body))
        )
        thread.start()
        assert wait_for(lambda: engine.running)
    thread.join()
    assert engine.draining
    assert replies[0].status == 200
    assert replies[0].json["usage"]["completion_tokens"] == 20
    with pytest.raises(ConnectionRefusedError):
        opened(address)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_the_kernel_ends_connections_whose_reader_takes_nothing() -> None:
    with listen("127.0.0.1", 0, stalled_seconds=1.5) as made:
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0, stalled_seconds=1) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen on .* serve.port={port} \(.*in use"):
            listen("127.0.0.1", port, stalled_seconds=1)


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"serve\.host=300\.0\.0\.1"):
        listen("300.0.0.1", 0, stalled_seconds=1)


def test_open_files_bound_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (256, 1000)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert room_for(100) == 100
    assert limits["now"] == (256, 1000)  # enough: left alone
    assert room_for(500) == 500
    assert limits["now"] == (500 + connections.SPARE_FILES, 1000)
    assert room_for(5000) == 1000 - connections.SPARE_FILES
