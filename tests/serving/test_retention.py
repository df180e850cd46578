"""What is in the buffer does not outlive its time, whether or not the server records anything."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftkit.config import BufferConfig
from draftkit.online.buffer import Buffer
from draftkit.serving.jobs import Counters
from draftkit.serving.recorder import Recorder
from tests.online.traffic import DAY, Clock, entries, stored
from tests.serving.running import until


def opened(path: Path, clock: Clock) -> Buffer:
    return Buffer(path, BufferConfig(retention_days=1), clock=clock)


def idle(buffer: Buffer, *, fraction: float = 0.0) -> Recorder:
    """A running recorder that is offered nothing."""
    recorder = Recorder(buffer, BufferConfig(retention_days=1, fraction=fraction))
    recorder.start(lambda: Counters(queued=1))
    return recorder


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_server_that_starts_deletes_what_is_due(tmp_path: Path, fraction: float) -> None:
    clock = Clock()
    buffer = opened(tmp_path / "b.sqlite", clock)
    buffer.append(entries(range(5)))
    clock.pass_time(0.6 * DAY)
    buffer.append(entries(range(5, 8)))
    buffer.close()
    clock.pass_time(0.6 * DAY)
    buffer = opened(tmp_path / "b.sqlite", clock)
    assert len(stored(buffer)) == 8
    recorder = idle(buffer, fraction=fraction)
    until(lambda: buffer.queued(within=DAY) == 1)  # its first look at everything is over
    recorder.stop()
    assert len(stored(buffer)) == 3
    buffer.close()


def test_an_idle_server_deletes_what_becomes_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, monotonic = Clock(), time.monotonic
    watch = SimpleNamespace(monotonic=lambda: monotonic() + clock.seconds)
    monkeypatch.setattr("draftkit.serving.recorder.time", watch)
    buffer = opened(tmp_path / "b.sqlite", clock)
    buffer.append(entries(range(5)))
    recorder = idle(buffer)
    until(lambda: buffer.queued(within=DAY) == 1)
    assert len(stored(buffer)) == 5
    clock.pass_time(1.5 * DAY)
    until(lambda: buffer.queued(within=DAY) == 1)
    recorder.stop()
    assert len(stored(buffer)) == 0
    buffer.close()
