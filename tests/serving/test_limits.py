"""The door: nothing without the key, no body that is too large, too slow or no JSON."""

import asyncio
import http.client
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from draftkit.config import ServeConfig
from draftkit.serving import limits
from draftkit.serving.limits import Limits
from tests.serving.fakes import FakeEngine, ask, chat, completion, serving

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
    with serving(FakeEngine(), ServeConfig(max_body_bytes=2000)) as found:
        yield found


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with serving(FakeEngine(), key=KEY) as found:
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
    right = limits.hmac.compare_digest

    def watched(given: bytes, known: bytes) -> bool:
        compared.append(given)
        return right(given, known)

    monkeypatch.setattr(limits.hmac, "compare_digest", watched)
    ask(locked, "/v1/models", headers=bearer("guess"))
    assert compared == [b"guess"]


def test_a_body_that_is_too_large(address: str) -> None:
    refused = ask(address, "/v1/completions", b"x" * 10_000_000)
    assert refused.status == 413
    assert "2000 bytes" in refused.error["message"]
    assert ask(address, "/v1/completions", completion(prompt="a" * 2000)).status == 413
    assert ask(address, "/v1/completions", completion(stop="a" * 100)).status == 200


def test_a_body_in_chunks_is_counted(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=10)
    headers = {"content-type": "application/json", "transfer-encoding": "chunked"}
    chunks = (b"x" * 500 for _ in range(10))
    connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_connection_goes_on_after_a_refused_body(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=10)
    for _ in range(2):
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", b"x" * 500_000, headers)
        answer = connection.getresponse()
        assert answer.status == 413
        answer.read()
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": ""},
        {"content-encoding": "gzip"},
    ],
)
def test_another_kind_of_body(address: str, headers: dict[str, str]) -> None:
    assert ask(address, "/v1/completions", completion(), headers).status == 415


def test_utf8_may_be_named(address: str) -> None:
    for kind in ("application/json; charset=UTF-8", 'APPLICATION/JSON;charset="utf-8"'):
        assert ask(address, "/v1/completions", completion(), {"content-type": kind}).status == 200


def test_a_body_that_does_not_come() -> None:
    async def app(*_: Any) -> None:
        raise AssertionError("it was let in")

    async def receive() -> Any:
        if not received:
            received.append(True)
            return {"type": "http.request", "body": b"{", "more_body": True}
        return await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    received: list[bool] = []
    sent: list[Any] = []
    door = Limits(app, key=None, max_body_bytes=100, body_seconds=0.05)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"9")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    asyncio.run(door(scope, receive, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert b"slow_body" in sent[1]["body"]


def test_every_answer_has_a_name_of_its_own(address: str) -> None:
    names = set()
    for path, body in (
        ("/health", None),
        ("/x", None),
        ("/v1/completions", {}),
        ("/metrics", None),
    ):
        given = {"x-request-id": "mine"}
        names.add(ask(address, path, body, given).headers["x-request-id"])
    assert len(names) == 4
    assert all(name.startswith("req-") for name in names)
    made = ask(address, "/v1/completions", completion())
    assert made.json["id"] == "cmpl-" + made.headers["x-request-id"].removeprefix("req-")


def test_headers_cannot_be_injected(address: str) -> None:
    host, port = address.split(":")
    lines = [
        b"GET /v1/models/a%0d%0aX-Evil:%201 HTTP/1.1",
        b"Host: a",
        b"X-Request-Id: a\rX-Evil: 1",
        b"X-Draftkit-Route: a\x0bX-Evil: 1",
    ]
    for extra in (lines[:2], lines[:3], [*lines[:2], lines[3]]):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"\r\n".join([*extra, b"Connection: close", b"", b""]))
            received = b""
            while part := connection.recv(65536):
                received += part
        head = received.partition(b"\r\n\r\n")[0].lower()
        assert head.split()[1] in (b"400", b"404")
        assert b"evil" not in head
