"""Connections that do nothing, readers that take nothing, and the end of a server."""

import contextlib
import http.client
import json
import resource
import socket
import threading
import time

import pytest

from draftkit.config import ServeConfig
from draftkit.serving import connections, streams
from draftkit.serving.connections import Connection, listen, room_for
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


def test_a_reader_that_takes_nothing_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BACKLOG", 1000)
    engine = FakeEngine(endless=True, per_round=20, round_seconds=0.01)
    with serving(engine, send_buffer=10_000) as address:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = address.split(":")
        made.connect((host, int(port)))
        body = json.dumps(completion(stream=True, logprobs=5)).encode()
        made.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
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
