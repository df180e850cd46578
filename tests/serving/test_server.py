"""The door of the server, how many connections it takes, idle readers, and its end."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from draftkit.config import ServeConfig
from draftkit.serving import replies, server
from draftkit.serving.server import listen
from tests.serving.fakes import FakeEngine, ask, chat, completion, serving, wait_for

PATHS = [
    "/v1/models",
    "/v1/models/health",
    "/v1/models/tiny",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/redoc",
    "/",
    "/x",
]
KEY = "a key, ü"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(FakeEngine()) as found:
        yield found


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with serving(FakeEngine(), key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def named() -> Iterator[str]:
    with serving(FakeEngine(), ServeConfig(host="Box.Example")) as found:
        yield found


def bearer(word: str) -> dict[str, str]:
    """The header as bytes that http.client lets through."""
    return {"authorization": f"Bearer {word}".encode().decode("latin-1")}


def test_without_the_key_nothing_but_health_answers(locked: str) -> None:
    assert ask(locked, "/health").status == 200
    for path in PATHS:
        refused = ask(locked, path)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(locked, "/v1/completions", completion(), method=method).status == 401
    assert ask(locked, "/v1/chat/completions", chat()).status == 401
    for trick in ("//health", "/health/", "/health/../metrics", "/metrics?/health", "/HEALTH"):
        assert ask(locked, trick).status in (401, 404)
        assert b"vllm" not in ask(locked, trick).body


@pytest.mark.parametrize(
    "headers",
    [
        bearer("a key"),
        bearer(KEY + "x"),
        bearer(""),
        {"authorization": "Bearer"},
        {"authorization": f"Basic {KEY}".encode().decode("latin-1")},
        {"x-api-key": KEY.encode().decode("latin-1")},
    ],
)
def test_a_wrong_key_is_refused(locked: str, headers: dict[str, str]) -> None:
    assert ask(locked, "/v1/models", headers=headers).status == 401


def test_the_right_key_opens(locked: str) -> None:
    assert ask(locked, "/v1/models", headers=bearer(KEY)).status == 200
    assert ask(locked, "/metrics", headers=bearer(KEY)).status == 200
    assert ask(locked, "/v1/completions", completion(), bearer(KEY)).status == 200


def test_the_key_is_compared_in_constant_time(locked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    right = server.hmac.compare_digest

    def watched(given: bytes, known: bytes) -> bool:
        compared.append(given)
        return right(given, known)

    monkeypatch.setattr(server.hmac, "compare_digest", watched)
    ask(locked, "/v1/models", headers=bearer("guess"))
    assert compared == [b"guess"]


def test_a_body_that_is_too_large(address: str) -> None:
    refused = ask(address, "/v1/completions", b"x" * 10_000_000)
    assert refused.status == 413
    assert "4000000 bytes" in refused.error["message"]
    assert ask(address, "/v1/completions", completion(prompt="a" * 4_000_000)).status == 413
    assert ask(address, "/v1/completions", completion(stop="a" * 100)).status == 200


def test_a_body_in_chunks_is_counted(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=10)
    headers = {"content-type": "application/json", "transfer-encoding": "chunked"}
    chunks = (b"x" * 500_000 for _ in range(10))
    connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost", True),
        ("LocalHost:8000", True),
        ("localhost.:8000", True),
        ("127.0.0.1", True),
        ("127.0.0.1:8000", True),
        ("[::1]", True),
        ("[::1]:8000", True),
        ("192.168.1.7:8000", True),  # an address is no name that somebody could point here
        ("box.example:80", True),  # serve.host
        ("evil.example", False),
        ("evil.example:8000", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("evil.example:80@localhost", False),
        ("[evil.example]", False),
    ],
)
def test_without_a_key_the_names_of_others_are_no_way_in(
    named: str, locked: str, host: str, is_known: bool
) -> None:
    """Pages of another site reach loopback by a name of theirs that they let point to it."""
    hosts = {"host": host}
    reply = ask(named, "/v1/completions", completion(), hosts)
    assert reply.status == (200 if is_known else 403)
    if not is_known:
        assert reply.error["code"] == "unknown_host"
        assert "DRAFTKIT_API_KEY" in reply.error["message"]
    assert ask(named, "/health", headers=hosts).status == 200
    # With a key any name will do: no other site knows it.
    assert ask(locked, "/v1/models", headers=hosts | bearer(KEY)).status == 200


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
        ("application/json; charset=UTF-8", 200),
        ('APPLICATION/JSON;charset="utf-8"', 200),
    ],
)
def test_a_body_must_be_json(address: str, kind: str, status: int) -> None:
    assert ask(address, "/v1/completions", completion(), {"content-type": kind}).status == status


def opened(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_a_reader_that_takes_nothing_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "BACKLOG", 10)
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


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_small_pieces_are_sent_at_once(host: str) -> None:
    """Else the second of two waits for the client's word on the first, 40 ms and more."""
    with (
        closing(listen(host, 0)) as listening,
        socket.create_connection(listening.getsockname()[:2]),
    ):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
