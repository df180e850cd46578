"""Long: memory that stays."""

import gc
import http.client
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from draftkit.online.buffer import Buffer
from tests import tiny
from tests.serving import running
from tests.serving.fakes import ask, chat, completion, serving, wait_for

REQUESTS = 10_000
PAGE = 4096


def resident() -> int:
    """Bytes of memory that this process holds."""
    gc.collect()
    return PAGE * int(Path("/proc/self/statm").read_text().split()[1])


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
    (target, draft), disk = tiny.pair(), Mock(Buffer)
    with (
        running.serving(target, lambda: draft, disk=disk, slots=8, max_length=64) as engine,
        serving(engine) as address,
        ThreadPoolExecutor(4) as pool,
    ):
        sizes = []
        for _ in range(5):  # the first fifth fills caches and pools
            list(pool.map(lambda number: mixed(address, number), range(REQUESTS // 4)))
            assert wait_for(lambda: engine.counters().running == 0)
            disk.reset_mock()  # which would keep what was recorded
            sizes.append(resident())
        assert engine.counters().errors == 0
    assert sizes[-1] - sizes[0] < 8_000_000, sizes
