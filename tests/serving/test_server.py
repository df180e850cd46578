"""How many connections, readers that take nothing, and the end of a server."""

import contextlib
import http.client
import json
import socket
import threading
from contextlib import closing

import pytest

from draftkit.serving import delivery, server
from draftkit.serving.server import listen
from tests.serving.fakes import FakeEngine, ask, completion, serving, wait_for


def opened(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_reader_that_takes_nothing_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "BACKLOG", 10)
    engine = FakeEngine(endless=True, per_round=100, round_seconds=0.01)
    with serving(engine) as address:
        with closing(http.client.HTTPConnection(address)) as connection:
            body = json.dumps(completion(stream=True, logprobs=5))
            kind = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", body, kind)
            assert wait_for(lambda: engine.cancelled == {0}, 30)
            assert wait_for(lambda: not engine.running)
        assert ask(address, "/health").status == 200


def test_too_many_connections_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 5)
    with serving(FakeEngine()) as address:
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


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"serve\.host=300\.0\.0\.1"):
        listen("300.0.0.1", 0)
