"""The loop: who is updated when, what it waits for, and how it ends."""

from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from draftkit.config import OnlineConfig
from draftkit.online.daemon import FRESH_SECONDS, HOLD_SECONDS, Daemon, Stopped
from draftkit.online.registry import NotInForce


class FakeBuffer:
    def __init__(self) -> None:
        self.waiting = 0

    def queued(self, *, within: float) -> int:
        assert within == FRESH_SECONDS
        return self.waiting


class FakeRefit:
    """Is due `turns` times; takes `steps` steps an update."""

    def __init__(self, route: str = "default", turns: int = 1, steps: int = 3):
        self.route, self.turns, self.steps = route, turns, steps
        self.updates = 0
        self.error: Exception | None = None
        self.collected: list[int] = []
        self.registry = SimpleNamespace(collect=self.collected.append)

    def review(self) -> str | None:
        return None

    def due(self) -> bool:
        return self.turns > 0

    def update(self, hold) -> Any:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        for _ in range(self.steps):
            hold()
        self.turns -= 1
        self.updates += 1
        return SimpleNamespace(number=0, version="v2")


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
        show=lambda: None,
        stop=stop,
    )
    return daemon, stop, told, buffer


def test_routes_take_turns_until_all_updates_are_done():
    refits = FakeRefit("a", turns=2), FakeRefit("b", turns=1)
    daemon, _, told, _ = make(*refits)
    daemon.begin = lambda refit: told.append(f"{refit.route} begins")
    daemon.run()
    assert told == ["a begins", "a", "b begins", "b", "a begins", "a"]
    assert refits[0].collected == [5, 5]


def test_what_serves_is_looked_at_before_each_update_and_the_reason_is_logged(caplog):
    refit, reasons = FakeRefit(turns=2), ["alpha -0.1", None]
    refit.review = lambda: reasons.pop(0)  # type: ignore[method-assign]
    daemon, _, told, _ = make(refit)
    daemon.run()
    assert told == ["default"] * 2
    (record,) = caplog.records
    message = "route default: the version in force is taken back: alpha -0.1"
    assert record.getMessage() == message


def test_what_is_in_force_is_brought_at_every_turn_and_before_an_update_is_told():
    refit, told, seconds = FakeRefit(turns=2), [], [0.0]
    daemon, *_ = make(refit, most_updates=9)
    daemon.bring, daemon.clock = told.append, lambda: seconds[0]
    daemon.log = lambda *_: told.append("log")
    daemon._turn(refit)
    assert told == ["default", "default", "log"]
    refit.error = RuntimeError("out of memory")
    daemon._turn(refit)
    daemon._turn(refit)  # left alone, but for this
    refit.turns, seconds[0] = 0, 99.0
    daemon._turn(refit)  # nothing to do
    assert told[3:] == ["default"] * 3
    daemon.bring = lambda route: 1 / 0
    assert not daemon._turn(refit)


def test_the_last_update_is_brought_again_to_an_engine_that_was_not_there():
    refit, answers = FakeRefit(), [True, False, False, False, True]
    daemon, *_ = make(refit)
    daemon.bring = lambda route: answers.pop(0)
    daemon.run()
    assert not answers
    daemon, stop, *_ = make(again := FakeRefit(turns=1))
    brought: list[str] = []
    daemon.bring = lambda route: bool(brought.append(route))
    stop.wait = lambda seconds: stop.set() if again.updates else None  # type: ignore[method-assign]
    daemon.run()
    assert brought == ["default"] * 3  # before the update, behind it, and at the end, once


def test_an_engine_that_stays_away_ends_the_daemon_late_and_in_one_line(caplog):
    daemon, stop, *_ = make(FakeRefit("a"), FakeRefit("b"))
    seconds, shown = [0.0], []
    daemon.clock, daemon.show = lambda: seconds[0], lambda: shown.append(seconds[0])
    daemon.bring = lambda route: route == "a"
    stop.wait = lambda _: seconds.__setitem__(0, seconds[0] + 500.0)  # type: ignore[method-assign]
    daemon.run()
    assert [record.getMessage() for record in caplog.records] == [
        "what is in force did not reach the engine of b"
    ]
    assert shown[-3:] == [0.0, 500.0, 1000.0]  # the page, at each try


def test_no_step_is_taken_while_the_server_is_busy():
    buffer, refit = FakeBuffer(), FakeRefit()
    buffer.waiting = 9
    daemon, stop, told, _ = make(refit, buffer=buffer)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        assert not told
        waits.append(seconds)
        buffer.waiting = 8 if len(waits) == 3 else 9
        return False

    stop.wait = wait  # type: ignore[method-assign]
    daemon.run()
    assert waits == [HOLD_SECONDS] * 3
    assert told == ["default"]
    assert not stop.is_set()


def test_told_to_stop_it_gives_up_the_update_and_ends():
    buffer, refit = FakeBuffer(), FakeRefit()
    buffer.waiting = 99
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


def test_whatever_an_update_raises_is_logged_with_its_traceback_and_tried_again(caplog):
    refits = FakeRefit("a"), FakeRefit("b")
    refits[0].error = RuntimeError("out of memory")
    daemon, _, told, _ = make(*refits)
    daemon.run()
    assert told == ["b", "a"]  # the other route does not wait for it
    assert "out of memory" in caplog.text
    assert "Traceback" in caplog.text


def test_a_rollback_during_an_update_is_told_in_one_line_and_tried_again_at_once(caplog):
    refit = FakeRefit()
    refit.error = NotInForce("v2 is in force now")
    daemon, stop, told, _ = make(refit)
    waits: list[float] = []
    stop.wait = waits.append  # type: ignore[method-assign]
    daemon.run()
    (record,) = caplog.records
    assert (record.exc_info, record.getMessage()) == (None, "route default: v2 is in force now")
    assert (told, waits) == (["default"], [0.01])


@pytest.mark.parametrize("step", ["log", "collect"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("broken")])
def test_an_error_after_an_update_ends_nothing_and_trains_nothing_again(step, error, caplog):
    refit = FakeRefit(turns=2)
    daemon, *_ = make(refit)

    def fails(*_: Any) -> Any:
        raise error

    if step == "log":
        daemon.log = fails
    else:
        refit.registry.collect = fails
    daemon.run()
    assert daemon.updates == 2
    assert refit.updates == 2  # each was trained once
    assert caplog.text.count("Traceback") == 2
    assert str(error) in caplog.text


def test_a_route_whose_updates_fail_is_left_alone_for_a_while_and_no_other_is(caplog):
    seconds, tried = [0.0], []
    bad, good = FakeRefit("bad", turns=9), FakeRefit("good", turns=9)

    def fails(hold: Any) -> Any:
        tried.append(seconds[0])
        raise ValueError("the loss became nan")

    bad.update = fails  # type: ignore[method-assign]
    daemon, _, told, _ = make(bad, good, poll_seconds=2)
    daemon.clock = lambda: seconds[0]
    for seconds[0] in range(0, 180, 20):
        for refit in (bad, good):
            daemon._turn(refit)
    assert tried == [0, 60, 120]
    assert told == ["good"] * 9
