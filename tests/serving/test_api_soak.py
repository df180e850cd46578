"""Long and large: memory that stays, crowds that do nothing, readers that take nothing."""

import contextlib
import gc
import http.client
import json
import resource
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftkit.config import ServeConfig
from draftkit.serving import delivery, server
from tests import tiny
from tests.serving import running
from tests.serving.fakes import FakeEngine, ask, chat, completion, serving, wait_for
from tests.serving.test_server import opened

IDLE = 1000
REQUESTS = 10_000
PAGE = 4096


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return PAGE * int(Path("/proc/self/statm").read_text().split()[1])


def slow_reader(address: str) -> socket.socket:
    """A client that asks for a stream and reads none of it."""
    host, port = address.split(":")
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((host, int(port)))
    body = json.dumps(completion(stream=True, logprobs=5)).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    made.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return made


def leaves_early(address: str) -> None:
    """Ask for a stream and go at its first bytes."""
    connection = http.client.HTTPConnection(address, timeout=30)
    body = json.dumps(completion(stream=True, max_tokens=40))
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    connection.getresponse().read(1)
    connection.close()


def mixed(address: str, number: int) -> None:
    """One request of many kinds: answers, streams, errors, clients that leave."""
    kinds: list[Callable[[], Any]] = [
        lambda: ask(address, "/v1/completions", completion(logprobs=2, n=2)),
        lambda: ask(address, "/v1/completions", completion(stream=True)),
        lambda: ask(address, "/v1/chat/completions", chat(max_tokens=4)),
        lambda: ask(address, "/v1/completions", completion(temperature=-1)),
        lambda: ask(address, "/v1/completions", b"{" * 1000),
        lambda: ask(address, "/v1/completions", completion(**{f"x{number}": 1})),
        lambda: ask(address, f"/v1/models/{number}"),
        lambda: ask(address, f"/{number}", method="BREW"),
        lambda: ask(address, "/metrics"),
        lambda: leaves_early(address),
    ]
    kinds[number % len(kinds)]()


@pytest.mark.soak
def test_ten_thousand_requests_leave_no_memory_behind() -> None:
    target, draft = tiny.pair()
    with (
        running.serving(target, lambda: draft, slots=8, max_length=64) as engine,
        serving(engine, ServeConfig(top_logprobs=5)) as address,
        ThreadPoolExecutor(4) as pool,
    ):
        sizes = []
        for _ in range(5):  # the first fifth fills caches and pools
            list(pool.map(lambda number: mixed(address, number), range(REQUESTS // 4)))
            assert wait_for(lambda: engine.counters().running == 0)
            sizes.append(resident())
        assert engine.counters().errors == 0
    assert sizes[-1] - sizes[0] < 8_000_000, sizes


@pytest.mark.soak
def test_a_thousand_idle_connections_do_not_stop_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client and server are one process here: each connection takes two files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * IDLE + 256
    if hard not in (resource.RLIM_INFINITY, max(hard, wanted)):
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    monkeypatch.setattr(server, "CONNECTIONS", 2 * IDLE)
    with serving(FakeEngine()) as address, contextlib.ExitStack() as stack:
        before = resident()
        for number in range(IDLE):
            connection = stack.enter_context(opened(address))
            if number % 2:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
        with ThreadPoolExecutor(8) as pool:
            body = completion()
            found = list(pool.map(lambda _: ask(address, "/v1/completions", body), range(200)))
        assert {reply.status for reply in found} == {200}
        assert resident() - before < 60_000 * IDLE


@pytest.mark.soak
def test_slow_readers_cost_little_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "BACKLOG", 50)
    engine = FakeEngine(endless=True, per_round=20, round_seconds=0.1)
    with serving(engine, send_buffer=10_000) as address, contextlib.ExitStack() as stack:
        before = resident()
        for _ in range(40):
            stack.enter_context(slow_reader(address))
        for _ in range(20):
            assert ask(address, "/v1/models").status == 200
        assert wait_for(lambda: len(engine.cancelled) == 40 and not engine.running, 120)
        assert resident() - before < 80_000_000
