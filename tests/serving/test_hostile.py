"""Whatever is sent: an answer or one clear line, never an error of the server."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftkit.serving.protocol import ChatRequest, CompletionRequest
from tests.serving.fakes import NAME, FakeEngine, Reply, ask, chat, completion, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FIXED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": NAME, "prompt": "a", "max_tokens": 4, "n": 2},
    CHAT: {**chat(), "max_tokens": 4, "n": 2},
}
FUZZED = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**30, -(10**400), 2**63, float("nan"), float("inf"), -0.0, 1e308])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["\x00", "\ud800", "a" * 5000, "../../etc", "\r\nX-Evil: 1", "{{ 7 * 7 }}"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
HUGE = b'{"model": "tiny", "prompt": "a", "n": 1' + b"0" * 5000 + b"}"
DEEP = b'{"model": "tiny", "prompt": ' + b"[" * 9000 + b"1" + b"]" * 9000 + b"}"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as found:
        yield found


def fits(reply: Reply) -> None:
    """An answer, or an error in OpenAI's form whose status is the client's."""
    if reply.status == 200:
        assert reply.body.endswith(b"data: [DONE]\n\n") or reply.json["choices"]
    else:
        assert 400 <= reply.status < 500
        assert reply.status != 422
        assert reply.error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b"\xff\xfe\xfd",
        b'{"model": "tiny", "prompt": "\xc3\x28"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e400}',
        b'{"model": "tiny", "prompt": "a", "\\ud800": 1}',
        b'{"model": "tiny", "prompt": "a", "seed": 1e3}',
        b'{"model": "tiny", "prompt": "a"} {}',
        HUGE,
        DEEP,
        b"[" * 20_000,
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bodies_that_are_no_request(address: str, path: str, body: bytes) -> None:
    reply = ask(address, path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


def test_a_nul_is_a_character_like_others(address: str) -> None:
    made = ask(address, COMPLETIONS, completion(prompt="a\x00b", stop="\x00"))
    assert made.json["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
def test_other_methods(address: str, method: str) -> None:
    reply = ask(address, COMPLETIONS, completion() if method == "PUT" else None, method=method)
    assert reply.status == 405
    assert reply.error["message"].startswith(method)


def nearly_right(path: str) -> st.SearchStrategy[Any]:
    """Bodies that would be answered but for what is thrown in, and sometimes whole junk."""
    known = sorted(FUZZED[path].model_fields)
    names = st.sampled_from(known) | st.text(max_size=9)
    mild = st.none() | st.booleans() | st.integers(0, 3) | st.just("a") | st.just([])
    thrown = st.dictionaries(names, mild, max_size=3) | st.dictionaries(names, JUNK, max_size=2)
    return st.builds(lambda more: FIXED[path] | more, thrown) | JUNK


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bodies_that_are_nearly_right(address: str, path: str, count: int) -> None:
    statuses: set[int] = set()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(nearly_right(path))
    def send(body: Any) -> None:
        reply = ask(address, path, json.dumps(body).encode())
        statuses.add(reply.status)
        fits(reply)

    send()
    assert {200, 400} <= statuses


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.binary(max_size=40), st.sampled_from(["x-draftkit-route", "x-draftkit-record"]))
def test_headers_of_any_bytes(address: str, value: bytes, name: str) -> None:
    clean = value.translate(None, b"\r\n\x00").strip().decode("latin-1")
    reply = ask(address, COMPLETIONS, completion(), {name: clean})
    assert reply.status in (200, 400)
    assert not any("evil" in key for key in reply.headers)
