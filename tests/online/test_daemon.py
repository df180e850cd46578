"""The loop: who is updated when, what it waits for, and how it ends."""

from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from draftkit.config import OnlineConfig
from draftkit.online.buffer import Load
from draftkit.online.daemon import FRESH_SECONDS, Daemon, Stopped


class FakeBuffer:
    def __init__(self) -> None:
        self.queued, self.age, self.known = 0, 0.0, True
        self.maintained = 0

    def load(self) -> Load | None:
        found = Load(queued=self.queued, running=1, age_seconds=self.age)
        return found if self.known else None

    def maintain(self) -> None:
        self.maintained += 1


class FakeRefit:
    """Is due `turns` times; takes `steps` steps an update."""

    def __init__(self, route: str = "default", turns: int = 1, steps: int = 3, version="v2"):
        self.route, self.turns, self.steps, self.version = route, turns, steps, version
        self.state = {"seconds": 0.0}
        self.saved = 0.0
        self.backed_off = 0
        self.error: Exception | None = None
        self.collected: list[int] = []
        self.registry = SimpleNamespace(collect=self.collected.append)

    def due(self) -> bool:
        return self.turns > 0

    def update(self, hold) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        for _ in range(self.steps):
            hold()
        self.turns -= 1
        self.state["seconds"] += 1.0
        return SimpleNamespace(number=0, version=self.version)

    def seconds_saved(self) -> float:
        return self.saved

    def back_off(self) -> None:
        self.backed_off += 1


def make(*refits: FakeRefit, buffer: FakeBuffer | None = None, **changes: Any):
    buffer = buffer or FakeBuffer()
    told: list[str] = []
    stop = Event()
    total = sum(refit.turns for refit in refits)
    settings = OnlineConfig(**{"poll_seconds": 0.01, "most_updates": total, **changes})
    daemon: Any = Daemon(
        refits,  # type: ignore[arg-type]
        buffer=buffer,  # type: ignore[arg-type]
        settings=settings,
        log=lambda refit, update: told.append(refit.route),
        stop=stop,
    )
    return daemon, stop, told, buffer


def test_routes_take_turns_until_all_updates_are_done():
    refits = FakeRefit("a", turns=2), FakeRefit("b", turns=1)
    daemon, _, told, buffer = make(*refits)
    daemon.run()
    assert told == ["a", "b", "a"]
    assert buffer.maintained == 3
    assert refits[0].collected == [5, 5]


def test_no_step_is_taken_while_the_server_is_busy():
    buffer, refit = FakeBuffer(), FakeRefit()
    buffer.queued = 9
    daemon, stop, told, _ = make(refit, buffer=buffer, pause_queue=8)
    thread = Thread(target=daemon.run, daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert not told
    buffer.queued = 8
    thread.join(5)
    assert told == ["default"]
    assert not stop.is_set()


@pytest.mark.parametrize("silent", ["old", "unknown"])
def test_a_server_that_is_not_there_is_not_waited_for(silent):
    buffer = FakeBuffer()
    buffer.queued = 99
    if silent == "old":
        buffer.age = FRESH_SECONDS + 1
    else:
        buffer.known = False
    daemon, _, told, _ = make(FakeRefit(), buffer=buffer)
    daemon.run()
    assert told == ["default"]


def test_told_to_stop_it_gives_up_the_update_and_ends():
    buffer, refit = FakeBuffer(), FakeRefit()
    buffer.queued = 99
    daemon, stop, told, _ = make(refit, buffer=buffer)
    thread = Thread(target=daemon.run, daemon=True)
    thread.start()
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert not told
    assert refit.turns == 1
    with pytest.raises(Stopped):
        daemon.hold()


def test_an_update_that_fails_is_tried_again(caplog):
    refit = FakeRefit(turns=1)
    refit.error = ValueError("the loss became nan")
    daemon, _, told, _ = make(refit)
    daemon.run()
    assert told == ["default"]
    assert "the loss became nan" in caplog.text


@pytest.mark.parametrize(("saved", "waits"), [(0.0, 0), (0.5, 1), (1.5, 0)])
def test_updates_become_rarer_once_they_cost_more_than_they_save(saved, waits):
    """Before anything has served nothing is known, so nobody waits for it."""
    refit = FakeRefit()
    refit.saved = saved
    daemon, *_ = make(refit)
    daemon.run()
    assert refit.backed_off == waits


def test_an_update_that_was_not_published_is_the_gates_to_punish():
    refit = FakeRefit(version=None)
    refit.saved = 0.1
    daemon, *_ = make(refit)
    daemon.run()
    assert refit.backed_off == 0
