"""An engine without models, a server around any engine, and clients for it."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftkit.config import SamplingConfig, ServeConfig
from draftkit.serving.answers import Answer, Counters, Draining, Job, Listener, QueueFull
from draftkit.serving.intake import Intake, Texts
from draftkit.serving.protocol import TOP_LOGPROBS
from draftkit.serving.server import Server, listen, make_app
from tests.tiny import VOCAB_SIZE, byte_tokenizer

NAME = "tiny"
ROUTES = ("default", "code")
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SAID = "Grüße an alle. "  # again and again; with characters of two bytes
TOKENIZER = byte_tokenizer()
SAID_IDS: list[int] = TOKENIZER(SAID * 100)["input_ids"]


def decode(ids: Sequence[int]) -> str:
    """The text of ids."""
    return str(TOKENIZER.decode(list(ids)))


def chat_tokenizer() -> PreTrainedTokenizerBase:
    """The byte tokenizer with a template that refuses the role `tool`."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass
class FakeEngine:
    """Says `SAID_IDS`, `per_round` a round, from a thread for each job.

    Every token has -0.5, its alternatives 1 less each.
    """

    max_length: int = 120
    slots: int = 4
    room: int = 64  # jobs at once
    per_round: int = 2
    round_seconds: float = 0.0
    ends: str | None = None  # the reason that every job ends with, at once
    endless: bool = False  # ignores max_new_tokens
    draining: bool = False
    is_healthy: bool = True
    jobs: list[Job] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    counts: Counters = field(default_factory=Counters)

    def submit(self, jobs: Sequence[Job], listeners: Sequence[Listener]) -> list[int]:
        if self.draining:
            raise Draining("the server is stopping")
        if len(self.running) + len(jobs) > self.room:
            raise QueueFull("the queue is full")
        ids = list(range(len(self.jobs), len(self.jobs) + len(jobs)))
        self.jobs += jobs
        self.running.update(ids)
        for number, job, listener in zip(ids, jobs, listeners, strict=True):
            threading.Thread(target=self._run, args=(number, job, listener), daemon=True).start()
        return ids

    def _run(self, number: int, job: Job, listener: Listener) -> None:
        answer, done = Answer(job, listener, detokenize=decode, seed=0), 0
        said, completion = SAID_IDS[job.row :], answer.completion
        try:
            while True:
                if number in self.cancelled or self.ends is not None:
                    return listener(answer.end(self.ends or "cancelled"))
                time.sleep(self.round_seconds)
                place = done % (len(said) // 2)
                left = self.per_round if self.endless else job.max_new_tokens - done
                ids = said[place : place + min(self.per_round, left)]
                done += len(ids)
                completion.output_ids += ids
                completion.topk_ids += [[(i + a) % 256 for a in range(TOP_LOGPROBS)] for i in ids]
                completion.topk_log_probs += [[-0.5 - a for a in range(TOP_LOGPROBS)]] * len(ids)
                is_last = done >= job.max_new_tokens and not self.endless
                piece = answer.take([-0.5] * len(ids), version="v000002", done=is_last)
                if piece is not None:
                    listener(piece)
                    if piece.finish_reason is not None:
                        return None
        finally:
            self.running.discard(number)

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled.update(ids)

    def counters(self) -> Counters:
        return replace(self.counts, queued=1, running=len(self.running))

    @property
    def drafters(self) -> Any:
        return SimpleNamespace(versions=lambda: {"default": "v000002"})

    def healthy(self) -> bool:
        return self.is_healthy

    def drain(self) -> bool:
        self.draining = True
        return wait_for(lambda: not self.running)


def wait_for(condition: Any, seconds: float = 10.0) -> bool:
    """Poll until `condition()` holds or the time is over; whether it holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def serving(
    engine: Any,
    settings: ServeConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sampling: SamplingConfig | None = None,
    key: str | None = None,
    drain: Any = lambda: True,
    start: int | None = None,
) -> Iterator[str]:
    """A server on a free port of loopback; its address, `127.0.0.1:PORT`.

    start: that begins the decoder's text of an encoder-decoder engine.
    """
    settings = settings or ServeConfig()
    intake = Intake(
        texts=Texts(tokenizer or chat_tokenizer(), VOCAB_SIZE, start=start),
        settings=settings,
        max_length=engine.max_length,
        sampling=sampling or SamplingConfig(),
        routes=ROUTES,
        model_name=NAME,
    )
    with running(make_app(engine, intake, key=key), drain) as address:
        yield address


@contextlib.contextmanager
def running(app: Any, drain: Any = lambda: True, *, port: int = 0) -> Iterator[str]:
    """`app` on a port of loopback, 0: a free one; its address, `127.0.0.1:PORT`."""
    socket = listen("127.0.0.1", port)
    server = Server(app, drain, close=getattr(app, "close", None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        assert wait_for(lambda: server.started)
        yield "{}:{}".format(*socket.getsockname())
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@dataclass
class Reply:
    """What the server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has OpenAI's four keys and one line."""
        found = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert found["message"]
        assert "\n" not in found["message"]
        assert len(found["message"]) < 400
        return found


def ask(
    address: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    *,
    method: str | None = None,
) -> Reply:
    """One request over a connection of its own; a body that is no bytes is sent as JSON."""
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"content-type": "application/json"} if content is not None else {}
        verb = method or ("GET" if content is None else "POST")
        connection.request(verb, path, content, kind | (headers or {}))
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, found, answer.read())
    finally:
        connection.close()


def completion(**changes: Any) -> dict[str, Any]:
    """The body of a small completion."""
    return {"model": NAME, "prompt": "Say: ", "max_tokens": 8, **changes}


def chat(**changes: Any) -> dict[str, Any]:
    """The body of a small chat."""
    return {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], **changes}


def events(body: bytes) -> list[Any]:
    """The JSON of a stream's events, and "[DONE]" for its end."""
    lines = [line for line in body.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    texts = [line.removeprefix(b"data: ").decode() for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]
