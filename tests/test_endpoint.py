"""The client of other people's servers: what it sends, how many wait, one line where it ends."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from draftkit.distillation.remote import RETRIES
from draftkit.endpoint import COMPLETIONS, Endpoint
from tests.distillation.serving import Engine, served
from tests.replies import answer_by

SECRET = "S3CRET"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Says the same to all."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    said = Engine(None, [0], str)
    said.body = {"choices": []}
    with served(said) as running:
        yield running


def test_the_key_comes_from_the_environment_and_nothing_tells_of_this_machine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_ORG_ID", "an organisation")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "a project")
    for key in (SECRET, ""):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        with Endpoint("engine.url", engine.url) as server:
            server.ask(COMPLETIONS, {"prompt": [1]})
    assert [one["Authorization"] for one in engine.headers] == [f"Bearer {SECRET}", "Bearer none"]
    names = {name.lower() for one in engine.headers for name in one}
    assert not [name for name in names if name.startswith(("x-stainless", "openai"))]
    assert engine.asked == [{"prompt": [1]}] * 2


@pytest.mark.parametrize(
    ("status", "retries", "asked", "words"),
    [
        (503, 0, 1, ": .*not now"),
        (503, 2, 3, ": .*not now"),
        (400, 2, 1, ": .*not now"),
        (401, 2, 1, r" \(OPENAI_API_KEY is read for its key\): .*not now"),
        (307, 2, 1, ": .*not now"),  # a redirect, which is not followed
    ],
)
def test_a_refusal_is_one_line_and_only_what_may_pass_is_asked_again(
    engine: Engine, status: int, retries: int, asked: int, words: str
) -> None:
    engine.failures = [status] * asked
    words = f"^target.urls: .* answers /v1/completions by status {status}{words}"
    with (
        pytest.raises(ValueError, match=words) as error,
        Endpoint("target.urls", engine.url, retries=retries) as server,
    ):
        server.ask(COMPLETIONS, {"prompt": [1]})
    assert "\n" not in str(error.value)
    assert len(engine.asked) == asked


def test_an_engine_that_is_away_for_a_minute_is_waited_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals for a minute, then an answer; another address is asked without a wait."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("draftkit.endpoint.FIRST_WAIT", 0.5)
    monkeypatch.setattr("draftkit.endpoint.asyncio.sleep", sleep)
    engine.failures = [503] * RETRIES
    with Endpoint("target.urls", engine.url, retries=RETRIES) as server:
        assert server.ask(COMPLETIONS, {"prompt": [1]}).is_success
    assert waits[:3] == [0.5, 1.0, 2.0]
    assert len(waits) == RETRIES
    assert sum(waits) > 60
    waits.clear()
    with Endpoint("target.urls", "http://127.0.0.1:9", engine.url, retries=RETRIES) as server:
        assert server.ask(COMPLETIONS, {"prompt": [1]}).is_success
    assert waits == []


def test_nobody_at_an_address_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with (
            Endpoint("engine.url", f"{url}/v1/") as server,
            pytest.raises(ValueError, match=rf"^engine\.url: {url} does not answer \(.*\): start"),
        ):
            server.model()


@pytest.mark.parametrize("url", ["http://127.0.0.1:port/v1", "nonsense", "http://[bad"])
def test_a_broken_address_is_one_line(url: str) -> None:
    with (
        pytest.raises(ValueError, match=r"^engine\.url: .* (is no|does not) \w+ \(") as error,
        Endpoint("engine.url", url) as server,
    ):
        server.ask("/metrics", optional=True)
    assert "\n" not in str(error.value)


def test_no_more_are_under_way_than_allowed_and_results_keep_their_order() -> None:
    under_way: list[int] = []
    most = 0

    async def answer(item: int) -> int:
        nonlocal most
        under_way.append(item)
        most = max(most, len(under_way))
        await asyncio.sleep(0.003 * (3 - item % 3))
        under_way.remove(item)
        return item

    with Endpoint("target.urls", "http://127.0.0.1:9") as server:
        assert server.map(answer, range(7), at_once=3) == [*range(7)]
    assert most == 3


def test_the_first_refusal_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def reply(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(400)

    answer_by(monkeypatch, reply)
    with (
        pytest.raises(ValueError, match="by status 400"),
        Endpoint("target.urls", "http://127.0.0.1:9", retries=9) as server,
    ):
        server.map(lambda body: server.send(COMPLETIONS, body), [{}] * 99, at_once=2)
    assert len(asked) <= 2  # two at a time, and neither asks again


def test_only_who_asks_a_server_waits_for_the_package() -> None:
    code = "import sys, draftkit.endpoint; assert 'openai' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
