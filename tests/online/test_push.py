"""Versions reach an engine: in which order, what happens when it fails, and what is reported."""

import json
import logging
import os
import select
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from draftkit.endpoint import Endpoint
from draftkit.engines.push_vllm import digest
from draftkit.online.push import Command, Delivery, Vllm
from draftkit.online.registry import Registry
from tests.online.drafters import chain, name_of, publish
from tests.serving.fakes import running

PUSH = [
    "draftkit_version",
    "draftkit_read",
    "/pause?mode=keep",
    "draftkit_push",
    "/reset_prefix_cache",
    "draftkit_read",
    "draftkit_version v000002",
    "/resume",
]


@dataclass
class Stub:
    """An engine of one worker, which computes with `held`.

    spoils: the versions whose tensors it mixes up. fails: by what is called, the reply instead.
    busy: whether requests hold its prefix cache.
    """

    spoils: set[str] = field(default_factory=set)
    fails: dict[str, Callable[[], Response]] = field(default_factory=dict)
    busy: bool = False
    calls: list[str] = field(default_factory=list)
    held: dict[str, Tensor] = field(default_factory=dict)
    version: str = ""
    paused: bool = False

    def answer(self, method: str, words: list[str]) -> dict[str, Any]:
        if method == "draftkit_push":
            assert self.paused
            self.version = ""
            for name in json.loads(words[1]):
                self.held |= load_file(Path(words[0]) / name)
            if Path(words[0]).name in self.spoils:
                self.held = {name: tensor + 1 for name, tensor in self.held.items()}
        if method == "draftkit_version":
            self.version = words[0] if words else self.version
            return {"version": self.version}
        return {"read": [entry(name, tensor) for name, tensor in self.held.items()]}

    async def post(self, request: Request) -> Response:
        path, body = request.url.path, await request.json()
        called = path + ("?" + request.url.query if request.url.query else "")
        if path == "/collective_rpc":
            version = [word for word in body["args"] if word.startswith("v0")]
            called = " ".join([body["method"], *version])
        self.calls.append(called)
        if (failing := self.fails.get(called)) is not None:
            return failing()
        if path == "/collective_rpc":
            return JSONResponse({"results": [self.answer(body["method"], body["args"])]})
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        return JSONResponse({"success": not self.busy})

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{rest:path}", self.post, methods=["POST"])])


def entry(name: str, tensor: Tensor) -> dict[str, Any]:
    rows, columns = [0, len(tensor), 1], [0, tensor[0].numel(), 1]
    more = {"dtype": "float32", "sha256": digest(tensor)}
    return {"name": name, "rows": rows, "columns": columns, **more}


@dataclass
class Pushing:
    """A registry of two versions, an engine, and what brings the one to the other."""

    stub: Stub
    registry: Registry
    delivery: Delivery

    def bring(self) -> tuple[str | None, list[str]]:
        """What serves from now on, and the calls for it."""
        self.stub.calls.clear()
        return self.delivery.bring(), [*self.stub.calls]

    def serves(self, value: float) -> bool:
        """Whether the engine computes with the version of that value."""
        return bool(self.stub.held) and all((t == value).all() for t in self.stub.held.values())


@contextmanager
def pushing(folder: Path, stub: Stub | None = None) -> Iterator[Pushing]:
    stub, registry = stub or Stub(), Registry(folder / "drafters")
    chain(registry, 2)
    with running(stub.app) as address, Endpoint("engine.url", f"http://{address}") as endpoint:
        yield Pushing(stub, registry, delivery_of(folder, registry, Vllm(endpoint)))


def delivery_of(folder: Path, registry: Registry, engine: Any) -> Delivery:
    def write(version: Any, path: Path) -> None:
        shutil.copytree(version.path, path)

    return Delivery("default", registry, engine, write=write, folder=folder / "pushed")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_what_is_in_force_is_pushed_in_order_once_and_whenever_it_does_not_serve(
    tmp_path: Path,
) -> None:
    stub = Stub(version="v000002", paused=True)  # as another daemon left it that was killed
    with pushing(tmp_path, stub) as one:
        assert one.bring() == ("v000002", PUSH)
        assert one.serves(1)
        assert not stub.paused
        assert one.bring() == (None, ["draftkit_version"])
        assert one.registry.served() == one.delivery.serves == "v000002"
        one.registry.rollback(reason="by a person")
        assert one.bring()[0] == "v000001"
        assert one.serves(0)
        publish(one.registry, 2)
        assert one.bring()[0] == "v000003"
        stub.held, stub.version = {}, ""  # it was started anew
        assert one.bring()[0] == "v000003"
        assert one.serves(2)
        assert {path.name for path in (tmp_path / "pushed").iterdir()} == {"v000001", "v000003"}


def test_requests_that_hold_the_prefix_cache_are_read_anew(tmp_path: Path) -> None:
    with pushing(tmp_path, Stub(busy=True)) as one:
        name, calls = one.bring()
    assert name == "v000002"
    assert calls[4:6] == ["/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true"]


def refusal(status: int, text: str = "") -> Callable[[], Response]:
    return lambda: Response(text, status)


NO_METHOD = "Worker failed with error ''CPUWorker' object has no attribute 'draftkit_version''"


@pytest.mark.parametrize(
    ("called", "reply", "line"),
    [
        ("draftkit_version", refusal(404), "has no /collective_rpc: start vLLM with VLLM_SERVER_D"),
        ("/pause?mode=keep", refusal(404), "has no /pause: start vLLM with VLLM_SERVER_DEV_MODE=1"),
        ("draftkit_version", refusal(500, NO_METHOD), "--worker-extension-cls push_vllm.Push"),
        ("draftkit_push", refusal(500, "a\nb"), "answers /collective_rpc by status 500: a b"),
        (
            "draftkit_read",
            lambda: JSONResponse({"results": [{"error": "ValueError: no q"}]}),
            "cannot take the drafter: ValueError: no q",
        ),
        ("/resume", refusal(500), "answers /resume by status 500"),
    ],
)
def test_a_push_that_fails_is_one_line_lets_requests_go_on_and_is_tried_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    called: str,
    reply: Callable[[], Response],
    line: str,
) -> None:
    with pushing(tmp_path, Stub(fails={called: reply})) as one:
        name, calls = one.bring()
        assert name is None
        assert one.delivery.serves == one.registry.served() == (one.stub.version or None)
        assert one.delivery.serves is None or called == "/resume"
        assert "/pause?mode=keep" not in calls or calls[-2:] == ["/resume", "draftkit_version"]
        (logged,) = lines(caplog)
        assert logged.startswith("route default: the push failed: ")
        assert line in logged
        assert "\n" not in logged
        one.stub.fails.clear()
        assert one.bring()[0] == "v000002"
        assert not one.stub.paused


def test_an_engine_that_computes_with_something_else_gets_back_what_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pushing(tmp_path, Stub(spoils={"v000003"})) as one:
        one.bring()
        publish(one.registry, 2)
        name, calls = one.bring()
        assert name == one.delivery.serves == one.registry.served() == "v000002"
        assert name_of(one.registry.current()) == "v000002"
        assert one.serves(1)
        assert (calls.count("draftkit_push"), calls.count("draftkit_read")) == (2, 3)
        assert (calls.count("/pause?mode=keep"), calls[-1]) == (1, "/resume")
        (logged,) = lines(caplog)
        assert logged == (
            "route default: v000003 is taken back: the engine does not compute with layer1 and 1 "
            "more tensors of v000003: v000002 serves again"
        )
        assert one.bring() == (None, ["draftkit_version"])


def test_without_a_version_that_served_it_is_tried_again_ever_more_rarely(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pushing(tmp_path, Stub(spoils={"v000001", "v000002"})) as one:
        pushes = [turn for turn in range(16) if "draftkit_push" in one.bring()[1]]
        assert pushes == [0, 1, 3, 6, 11]
        assert len(lines(caplog)) == len(pushes)
        assert one.delivery.serves is None
        assert name_of(one.registry.current()) == "v000002"


def test_an_engine_killed_between_pause_and_resume_gets_the_version_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, registry = Stub(), Registry(tmp_path / "drafters")
    chain(registry, 2)
    with ExitStack() as life:
        address = life.enter_context(running(stub.app))
        with Endpoint("engine.url", f"http://{address}") as endpoint:
            delivery = delivery_of(tmp_path, registry, Vllm(endpoint))
            with monkeypatch.context() as patch:
                patch.setattr(Vllm, "_load", lambda *_: life.close() or endpoint.ask("/load", {}))
                assert delivery.bring() is None
            assert delivery.bring() is None
            assert registry.served() is None
            logged = lines(caplog)
            assert len(logged) == 2
            assert all("does not answer" in line for line in logged)
            again = Stub()
            with running(again.app, port=int(address.rpartition(":")[2])):
                names = [delivery.bring() for _ in range(2)]
            assert names == [None, "v000002"]  # it waited a turn
            assert not again.paused


# Commands


def test_a_command_gets_the_folder_and_says_by_its_status_how_it_went(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry, out = Registry(tmp_path / "drafters"), tmp_path / "out"
    chain(registry, 2)
    command = (
        f'ls "$DRAFTKIT_DRAFT" >> {out}; echo $DRAFTKIT_VERSION $DRAFTKIT_ROUTE >> {out}; '
        f"test -e {tmp_path / 'works'}"
    )
    delivery = delivery_of(tmp_path, registry, Command(command, "code"))
    assert delivery.bring() is None
    assert "online.command ended with status 1 for v000002" in lines(caplog)[0]
    (tmp_path / "works").touch()
    assert (delivery.bring(), delivery.bring()) == ("v000002", None)
    written = out.read_text().splitlines()
    assert written.count("v000002 code") == 2
    assert "model-1.safetensors" in written
    assert registry.served() == "v000002"


def test_a_command_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    command = Command(f"sleep 600 > {pipe} & wait", "default", seconds=0.5)
    with pytest.raises(ValueError, match=r"^online\.command did not end within 0 s with v000001$"):
        command.push(tmp_path, "v000001", None)
    hung_up = select.poll()
    hung_up.register(reading, select.POLLHUP)
    assert hung_up.poll(60_000)
    os.close(reading)
    assert command.serves() is None
