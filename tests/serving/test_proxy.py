"""The recording proxy before a stub engine: clients see no difference, and answers are kept."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from draftkit.config import BufferConfig, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.online.buffer import Buffer
from draftkit.serving.capture import is_recordable, waiting_in
from draftkit.serving.intake import Texts
from draftkit.serving.proxy import Proxy
from draftkit.serving.recorder import Recorder
from draftkit.serving.server import MAX_BODY_BYTES
from tests.online.traffic import stored
from tests.serving.fakes import TOKENIZER, Reply, ask, chat_tokenizer, running, wait_for
from tests.tiny import VOCAB_SIZE

SAID = "Grüße. "
PROMPT_IDS = [5, 6, 7]
DEFAULT = SamplingConfig(temperature=0.5, top_p=0.9)
COMPLETION = {"model": "m", "prompt": "Say", "temperature": 1.0, "n": 2, "seed": 3}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "top_k": -1}
ACCEPTED = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [1, 2, 1],
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 8,
    "num_spec_tokens": 2,
}


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass
class Stub:
    """An engine that answers as vLLM does: it tells ids where it is asked, else null.

    knows_ids: else it takes no notice of that. waiting: requests that hang until they are left.
    """

    knows_ids: bool = True
    seen: list[tuple[str, str, bytes, dict[str, str]]] = field(default_factory=list)
    waiting: int = 0
    lines: str = ""  # of every stream, if any
    metrics: bytes = b"engine:up 1\n"  # which the proxy reads of itself too, so not `seen`

    def choice(self, body: dict[str, Any], index: int, part: str, ids: list[int]) -> dict[str, Any]:
        is_chat, streams = "messages" in body, body.get("stream", False)
        ids_asked = self.knows_ids and body.get("return_token_ids")
        said: dict[str, Any] = {"text": part}
        if is_chat:
            message = {"content": part} | ({} if streams else {"role": "assistant"})
            said = {"delta" if streams else "message": message}
        ended = {"finish_reason": "stop" if ids[-1:] == [0] else None}
        told = {"token_ids": ids if ids_asked else None} if self.knows_ids else {}
        if not is_chat and self.knows_ids:
            told["prompt_token_ids"] = PROMPT_IDS if ids_asked else None
        return {"index": index, **said, **ended, **told}

    def reply(self, body: dict[str, Any], choices: list[dict[str, Any]]) -> dict[str, Any]:
        whole: dict[str, Any] = {"id": "x", "model": body["model"], "choices": choices}
        if "messages" in body and self.knows_ids:
            whole["prompt_token_ids"] = PROMPT_IDS if body.get("return_token_ids") else None
        return whole

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """Two tokens a chunk, and one chunk that is sent for its ids alone."""
        ids = [*TOKENIZER(SAID)["input_ids"], 0]
        for index in range(body.get("n", 1)):
            for at in range(0, len(ids), 2):
                some = ids[at : at + 2]
                choice = self.choice(body, index, SAID[at : at + 2], some)
                yield self.event(body, choice)
            if "messages" in body and body.get("return_token_ids"):
                hidden = {"index": index, "delta": {}, "finish_reason": None, "token_ids": [9]}
                yield self.event(body, hidden)
        yield "data: [DONE]\n\n"

    async def endless(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.waiting += 1
        try:
            while True:
                yield self.event(body, self.choice(body, 0, "a", [97]))
                await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1

    def event(self, body: dict[str, Any], choice: dict[str, Any]) -> str:
        return f"data: {compact(self.reply(body, [choice]))}\n\n"

    async def answer(self, request: Request) -> Response:
        content = await request.body()
        self.seen.append((request.method, str(request.url), content, dict(request.headers)))
        try:
            body = json.loads(content)
        except ValueError:
            return JSONResponse({"error": {"message": "no JSON"}}, 400)
        if body.get("prompt") == "wait":
            self.waiting += 1
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.waiting -= 1
        if body.get("prompt") == "endless":
            return StreamingResponse(self.endless(body), media_type="text/event-stream")
        if body.get("prompt") == ["refused"]:
            return JSONResponse({"error": {"message": "no"}}, 400)
        if self.lines and body.get("stream"):
            return Response(self.lines, media_type="text/event-stream")
        if body.get("stream"):
            return StreamingResponse(self.stream(body), media_type="text/event-stream")
        ids = [*TOKENIZER(SAID)["input_ids"], 0]
        choices = [self.choice(body, index, SAID, ids) for index in range(body.get("n", 1))]
        reply = self.reply(body, choices) | {"metrics": {"speculative_decoding": ACCEPTED}}
        return Response(compact(reply), media_type="application/json")

    async def other(self, request: Request) -> Response:
        if request.url.path == "/none/metrics":
            return Response(status_code=501)
        if request.url.path.endswith("/metrics"):
            return Response(self.metrics, media_type="text/plain")
        content = await request.body()
        self.seen.append((request.method, str(request.url), content, dict(request.headers)))
        if request.url.path == "/v1/models" and not request.url.query:
            return JSONResponse({"data": [{"id": "m", "owned_by": "vllm"}]})
        return Response(content[::-1], 207, {"x-engine": "a", "content-language": "de"})

    @property
    def app(self) -> Starlette:
        verbs = ["GET", "HEAD", "POST", "PUT", "DELETE"]
        asked = [
            Route(f"/v1/{name}", self.answer, methods=["POST"])
            for name in ("completions", "chat/completions")
        ]
        return Starlette(routes=[*asked, Route("/{path:path}", self.other, methods=verbs)])


@dataclass
class Capture:
    """A proxy before a stub, and what it has stored."""

    stub: Stub
    engine: str
    address: str
    proxy: Proxy
    buffer: Buffer

    def records(self, count: int) -> list[Record]:
        """All records, once there are `count`."""
        assert wait_for(lambda: len(stored(self.buffer)) >= count)
        return sorted(stored(self.buffer), key=lambda one: one.row)

    def outcomes(self) -> dict[str, int]:
        """Requests by what became of them, as /metrics says."""
        lines = ask(self.address, "/metrics").body.decode().splitlines()
        found = [line.split() for line in lines if line.startswith("draftkit:captured_requests_to")]
        return {name.split('"')[1]: int(float(n)) for name, n in found if float(n)}


@contextlib.contextmanager
def capturing(
    path: Path,
    stub: Stub | None = None,
    *,
    fraction: float = 1.0,
    path_of_engine: str = "",
    engine: str = "",
    **options: Any,
) -> Iterator[Capture]:
    """engine: the address of one that runs, in place of a stub that ends with the block."""
    stub = stub or Stub()
    settings = BufferConfig()
    with contextlib.ExitStack() as stack:
        engine = engine or stack.enter_context(running(stub.app))
        b = stack.enter_context(contextlib.closing(Buffer(path / "b.sqlite", settings)))
        recorder = Recorder(b, settings)
        given: dict[str, Any] = {
            **{"has_ids": stub.knows_ids, "default": DEFAULT, "routes": ("default", "code")},
            "models": ["m"],
            **{"fraction": fraction, "key": None, "host": "127.0.0.1"},
        }
        texts = Texts(chat_tokenizer(), VOCAB_SIZE)
        proxy = Proxy(f"http://{engine}{path_of_engine}", recorder, texts, **given | options)
        recorder.start(proxy.counters)
        try:
            with running(proxy) as address:
                yield Capture(stub, engine, address, proxy, b)
        finally:
            recorder.stop()


def without_date(reply: Reply) -> tuple[int, dict[str, str], bytes]:
    return reply.status, {k: v for k, v in reply.headers.items() if k != "date"}, reply.body


@pytest.mark.parametrize(
    ("path", "body", "headers", "method"),
    [
        ("/v1/models?limit=3&x=%2F", None, {"x-own": "ü".encode().decode("latin-1")}, None),
        ("/health", None, {}, "HEAD"),
        ("/v1/audio/%7Efile", b"\x00\xff binary", {"content-type": "audio/wav"}, "PUT"),
        ("/v1/completions", COMPLETION, {"X-Draftkit-Record": "no"}, None),
        ("/v1/completions", COMPLETION, {"X-Draftkit-Record": "maybe"}, None),
        ("/v1/completions", COMPLETION, {"X-Draftkit-Route": "prose"}, None),
        ("/v1/chat/completions", {**CHAT, "stream": True, "min_p": 0.1}, {}, None),
        ("/v1/completions", b"{no json", {}, None),
        ("/v1/files", b"x" * (MAX_BODY_BYTES + 10), {}, None),
        ("/v1/completions", b'{"model":"' + b"x" * MAX_BODY_BYTES + b'"}', {}, None),
    ],
)
def test_what_is_not_recorded_passes_byte_for_byte(
    tmp_path: Path, path: str, body: Any, headers: dict[str, str], method: str | None
) -> None:
    with capturing(tmp_path) as capture:
        direct = ask(capture.engine, path, body, headers, method=method)
        passed = ask(capture.address, path, body, headers, method=method)
        assert without_date(passed) == without_date(direct)
        (verb, url, content, told), (*same, had) = capture.stub.seen
        assert same[0] == verb
        assert same[1] == url  # the engine's own
        assert same[2] == content
        ours = {"x-draftkit-record", "x-draftkit-route"}
        assert {k: v for k, v in told.items() if k not in ours} == had
    assert stored_in(tmp_path) == []


def stored_in(path: Path) -> list[Record]:
    with contextlib.closing(Buffer(path / "b.sqlite", BufferConfig())) as buffer:
        return stored(buffer)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)]
)
def test_a_recorded_reply_is_the_one_that_the_engine_gives_without_a_proxy(
    tmp_path: Path, path: str, body: dict[str, Any], streams: bool
) -> None:
    """Though it was asked for ids, which it tells in chunks of their own too."""
    body = {**body, "stream": streams}
    with capturing(tmp_path) as capture:
        direct = ask(capture.engine, f"/v1/{path}", body)
        passed = ask(capture.address, f"/v1/{path}", body)
        assert passed.body == direct.body
        assert passed.headers["content-type"] == direct.headers["content-type"]
        assert json.loads(capture.stub.seen[1][2])["return_token_ids"] is True
        count = body.get("n", 1)
        records = capture.records(count)
        assert capture.outcomes() == {"recorded": 1}
    said = [*TOKENIZER(SAID)["input_ids"], 0]
    is_chat = "messages" in body
    hidden = [9] if is_chat and streams else []
    assert [one.row for one in records] == [*range(count)]
    for one in records:
        assert (one.prompt_ids, one.output_ids) == (PROMPT_IDS, said + hidden)
        law = {"temperature": 0.5, "top_k": 0.0} if is_chat else {"temperature": 1.0, "top_k": 0.0}
        assert one.sampling == {**law, "top_p": 0.9, "repetition_penalty": 1.0}
        assert bool(one.document) == is_chat
        assert (one.sampler, one.seed) == ("engine", 0 if is_chat else 3)


@pytest.mark.parametrize(
    "odd", [{"seed": 10**30}, {"temperature": 10**400}, {"seed": "x"}, {"seed": -5}]
)
def test_no_value_of_one_client_costs_the_records_of_another(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    with capturing(tmp_path) as capture:
        ask(capture.address, "/v1/completions", {**COMPLETION, **odd})
        ask(capture.address, "/v1/completions", COMPLETION)
        assert wait_for(lambda: sum(capture.outcomes().values()) == 2)
        assert {one.seed for one in capture.records(2)} >= {3}
        assert b"draftkit:records_dropped 0.0" in ask(capture.address, "/metrics").body


def test_a_stop_string_leaves_no_end_of_text(tmp_path: Path) -> None:
    with capturing(tmp_path, Stub(knows_ids=False)) as capture:
        ask(capture.address, "/v1/completions", {**COMPLETION, "n": 1, "stop": ["!"]})
        (one,) = capture.records(1)
    assert one.output_ids == TOKENIZER(SAID)["input_ids"]


def posted(body: bytes) -> bytes:
    """A completion as it goes over the wire."""
    length = f"content-type: application/json\r\ncontent-length: {len(body)}"
    return f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{length}\r\n\r\n".encode() + body


def test_who_leaves_in_a_stream_is_told_to_the_engine(tmp_path: Path) -> None:
    body = json.dumps({**COMPLETION, "prompt": "endless", "stream": True}).encode()
    with capturing(tmp_path) as capture:
        host, port = capture.address.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(posted(body))
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
            assert wait_for(lambda: capture.stub.waiting == 1)
        assert wait_for(lambda: capture.stub.waiting == 0)
        assert wait_for(lambda: capture.outcomes() == {"unfinished": 1})


def test_ids_that_the_client_asked_for_stay(tmp_path: Path) -> None:
    with capturing(tmp_path) as capture:
        body = {**COMPLETION, "return_token_ids": True}
        direct, passed = (
            ask(address, "/v1/completions", body) for address in (capture.engine, capture.address)
        )
        assert passed.body == direct.body
        assert passed.json["choices"][0]["prompt_token_ids"] == PROMPT_IDS
        assert len(capture.records(2)) == 2


@pytest.mark.parametrize(
    ("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)]
)
@pytest.mark.parametrize("streams", [False, True])
def test_where_an_engine_tells_no_ids_the_texts_are_tokenised(
    tmp_path: Path, path: str, body: dict[str, Any], streams: bool
) -> None:
    with capturing(tmp_path, Stub(knows_ids=False)) as capture:
        passed = ask(capture.address, f"/v1/{path}", {**body, "stream": streams})
        assert passed.status == 200
        assert "return_token_ids" not in json.loads(capture.stub.seen[0][2])
        one = capture.records(1)[0]
    prompt = "user: Hi\nassistant: " if "messages" in body else "Say"
    assert TOKENIZER.decode(one.prompt_ids) == prompt
    assert one.output_ids == [*TOKENIZER(SAID)["input_ids"], TOKENIZER.eos_token_id]


def test_the_acceptance_of_a_request_is_counted_where_it_is_reported(tmp_path: Path) -> None:
    with capturing(tmp_path) as capture:
        ask(capture.address, "/v1/completions", {**COMPLETION, "n": 1})
        assert wait_for(lambda: capture.buffer.served("default"))
        (served,) = capture.buffer.served("default")
    assert (served.version, served.requests, served.tokens) == ("engine", 1, len(SAID.encode()) + 1)
    assert (served.rounds, served.drafted, served.accepted) == (4, 8, 4)
    assert (served.tested, served.acceptance) == (7, 4.0)  # three rounds refused one


def test_counts_and_records_name_the_version_that_serves(tmp_path: Path) -> None:
    now: list[str | None] = [None]
    with capturing(tmp_path, version=lambda route: now[0]) as capture:
        for now[0] in (None, "v000001", "v000002"):
            ask(capture.address, "/v1/completions", {**COMPLETION, "n": 1})
        records = capture.records(3)
        assert wait_for(lambda: len(capture.buffer.served("default")) == 3)
        served = {one.version: one.accepted for one in capture.buffer.served("default")}
    assert served == {"engine": 4, "v000001": 4, "v000002": 4}
    assert sorted(one.sampler_version for one in records) == ["", "v000001", "v000002"]


@pytest.mark.parametrize("streams", [False, True])
def test_metrics_of_another_release_cost_their_counts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    monkeypatch.delitem(ACCEPTED, "num_spec_steps")
    with capturing(tmp_path) as capture:
        reply = ask(capture.address, "/v1/completions", {**COMPLETION, "n": 1, "stream": streams})
        assert b'"token_ids":null' in reply.body
        assert len(capture.records(1)) == 1


def test_counts_go_on_after_they_were_stored(tmp_path: Path) -> None:
    with capturing(tmp_path) as capture:
        for requests in (1, 2):
            ask(capture.address, "/v1/completions", {**COMPLETION, "n": 1})
            assert wait_for(lambda n=requests: counted(capture.buffer) == n)


def counted(buffer: Buffer) -> int:
    return sum(one.requests for one in buffer.served("default"))


@pytest.mark.parametrize(
    ("body", "headers", "outcome"),
    [
        ({**COMPLETION, "model": "m-sql"}, {}, "other_law"),  # an adapter
        (COMPLETION, {"content-type": "text/plain"}, "left_out"),  # as a page of another site sends
        ({**COMPLETION, "store": False}, {}, "opted_out"),
        ({**COMPLETION, "user": "x" * (1 << 20)}, {}, "left_out"),
        ({**COMPLETION, "prompt": ["refused"]}, {}, "unfinished"),
    ],
)
def test_a_request_counts_once_by_what_became_of_it(
    tmp_path: Path, body: dict[str, Any], headers: dict[str, str], outcome: str
) -> None:
    with capturing(tmp_path) as capture:
        ask(capture.address, "/v1/completions", body, headers)
        assert wait_for(lambda: capture.outcomes() == {outcome: 1})
    assert stored_in(tmp_path) == []


def test_the_path_of_the_engine_stands_before_every_path(tmp_path: Path) -> None:
    with capturing(tmp_path, path_of_engine="/llm/") as capture:
        ask(capture.address, "/x?y=%2F")
        assert capture.stub.seen[0][1] == f"http://{capture.engine}/llm/x?y=%2F"


def test_the_proxys_own_numbers_are_there_without_the_engines(tmp_path: Path) -> None:
    with capturing(tmp_path, path_of_engine="/none") as capture:
        reply = ask(capture.address, "/metrics")
        assert (reply.status, reply.body[:6]) == (200, b"# HELP")
        assert capture.outcomes() == {}
        looking = capture.proxy._looking
        assert looking is not None
        assert wait_for(looking.done)  # nobody keeps asking for what is not there


@pytest.mark.parametrize("ending", ["", "\n\n"])
def test_lines_in_any_form_of_a_stream_leave_without_ids(tmp_path: Path, ending: str) -> None:
    """Without a space behind `data:`, with CR, and a last one that no newline ends."""
    stub = Stub()
    choice = stub.choice({"return_token_ids": True}, 0, "a", [7, 0])
    event = "data:" + json.dumps({"id": "x", "choices": [choice]})
    stub.lines = f": a comment\r\n\r\n{event}\r\n\r\n{event}{ending}"
    with capturing(tmp_path, stub) as capture:
        reply = ask(capture.address, "/v1/completions", {**COMPLETION, "stream": True})
        assert reply.body.startswith(b": a comment\r\n\r\ndata: ")
        assert b"[7" not in reply.body
        assert capture.records(1)[0].output_ids == [7, 0, 7, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low"},
        {"skip_special_tokens": False},
        {"repetition_penalty": 1.2},
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Go"}]},
    ],
)
def test_a_prompt_that_an_engine_may_read_otherwise_is_not_tokenised(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with capturing(tmp_path, Stub(knows_ids=False)) as capture:
        ask(capture.address, "/v1/chat/completions", {**CHAT, **changes})
        assert wait_for(lambda: capture.outcomes() == {"unknown": 1})


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({}, True),
        ({"logprobs": 3, "stop": ["x"], "user": "u", "presence_penalty": 0, "min_p": None}, True),
        ({"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}}, True),
        ({"logit_bias": {}, "best_of": 1, "ignore_eos": False}, True),
        ({"include_reasoning": True, "add_generation_prompt": True}, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, False),
        ({"parallel_tool_calls": False}, False),
        ({"session_id": "x", "length_penalty": 1, "watermarking": False}, True),
        ({"min_p": 0.05}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": -1}, False),
        ({"logit_bias": {"5": 1}}, False),
        ({"tool_choice": "required"}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"guided_json": {}}, False),
        ({"echo": True}, False),
        ({"ignore_eos": True}, False),
        ({"include_reasoning": False}, False),
        ({"temperature": "hot"}, False),
        ({"temperature": True}, False),
        ({"some_new_setting": 1}, False),
    ],
)
def test_only_answers_of_a_known_law_are_recorded(changes: dict[str, Any], recorded: bool) -> None:
    assert is_recordable({**CHAT, **changes}) is recorded
    assert not is_recordable([CHAT])


def test_what_became_of_requests_is_counted_behind_the_engines_own_metrics(tmp_path: Path) -> None:
    with capturing(tmp_path, fraction=0.0) as capture:
        ask(capture.address, "/v1/completions", COMPLETION)
        ask(capture.address, "/v1/completions", COMPLETION, {"x-draftkit-record": "No"})
        ask(capture.address, "/v1/completions", {**COMPLETION, "store": False})
        assert capture.outcomes() == {"left_out": 2, "opted_out": 1}
        body = ask(capture.address, "/metrics").body
        assert body.startswith(b"engine:up 1\n")
        assert b"draftkit:records_dropped 0.0" in body


def test_an_answer_that_finds_no_room_is_passed_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftkit.serving.recorder.QUEUE_NUMBERS", 1000)
    with capturing(tmp_path) as capture:
        for long in ("a" * 5000, "Say"):
            body = {**COMPLETION, "prompt": long}
            assert ask(capture.address, "/v1/completions", body).status == 200
        assert wait_for(lambda: capture.outcomes() == {"dropped": 1, "recorded": 1})


@pytest.mark.parametrize(
    ("metrics", "waiting"),
    [
        (
            b'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0\n'
            b'vllm:num_requests_waiting{engine="0",model_name="a } b"} 7.0\n'
            b'vllm:num_requests_waiting{engine="1",model_name="m"} 5.0\n',
            12,
        ),
        (b'# HELP x y\nsglang:num_queue_reqs{model_name="m",tp_rank="0"} 12.0\n', 12),
        (b"llamacpp:requests_deferred 12\n", 12),
        (b"vllm:num_requests_waiting NaN\n", 0),
    ],
)
def test_what_waits_at_the_engine_is_what_the_daemon_hears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metrics: bytes, waiting: int
) -> None:
    assert waiting_in(metrics) == waiting
    monkeypatch.setattr("draftkit.serving.proxy.TELL_SECONDS", 0.05)
    monkeypatch.setattr("draftkit.serving.recorder.TELL_SECONDS", 0.05)
    with capturing(tmp_path, Stub(metrics=metrics)) as capture:
        ask(capture.address, "/v1/models")
        assert wait_for(lambda: capture.buffer.queued(within=5) == waiting)
        capture.stub.metrics = b"engine:up 1\n"
        assert wait_for(lambda: capture.buffer.queued(within=5) == 0)


def test_an_engine_that_is_gone_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = "{}:{}".format(*free.getsockname())
    with capturing(tmp_path) as capture:
        capture.proxy._url = capture.proxy._url.copy_with(netloc=host.encode())
        for path, body in (("/v1/models", None), ("/v1/completions", COMPLETION)):
            reply = ask(capture.address, path, body)
            assert (reply.status, reply.error["code"]) == (502, "engine_unreachable")
            assert host in reply.error["message"]


def test_who_leaves_is_told_to_the_engine_and_blocks_nobody(tmp_path: Path) -> None:
    """Before the engine has answered at all."""
    body = json.dumps({**COMPLETION, "prompt": "wait"}).encode()
    with capturing(tmp_path) as capture:
        host, port = capture.address.split(":")
        clients = [socket.create_connection((host, int(port))) for _ in range(64)]
        for client in clients:
            client.sendall(posted(body))
        assert wait_for(lambda: capture.stub.waiting == 64)
        assert ask(capture.address, "/v1/completions", COMPLETION).status == 200
        for client in clients:
            client.close()
        assert wait_for(lambda: capture.stub.waiting == 0)
        assert wait_for(lambda: capture.outcomes().get("unfinished") == 64)
        assert len(capture.records(2)) == 2


def test_the_door_is_that_of_the_server(tmp_path: Path) -> None:
    with capturing(tmp_path, key="word") as capture:
        assert ask(capture.address, "/v1/models").status == 401
        assert ask(capture.address, "/health").status == 207  # as at the server
        key = {"authorization": "Bearer word"}
        assert ask(capture.address, "/v1/models", headers=key).status == 200
        assert capture.stub.seen[1][3]["authorization"] == "Bearer word"
    with capturing(tmp_path) as capture:
        assert ask(capture.address, "/v1/models", headers={"host": "evil.example"}).status == 403


def test_a_disk_that_is_full_costs_records_and_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(entries: Any) -> None:
        raise OSError(28, "No space left on device")

    with capturing(tmp_path) as capture:
        monkeypatch.setattr(capture.buffer, "append", full)
        assert ask(capture.address, "/v1/completions", COMPLETION).status == 200
        dropped = b"draftkit:records_dropped 2.0"
        assert wait_for(lambda: dropped in ask(capture.address, "/metrics").body)
    assert stored_in(tmp_path) == []
