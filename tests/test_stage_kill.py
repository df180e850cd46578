"""A stage killed at any touch of the disk: the next launch finishes as if nothing had been."""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipelines.stage
from draftkit.artifacts import LOCK
from draftkit.config import Config
from pipelines.command import launch
from tests.toy import Toy, raising_at, result, with_steps

TOUCHES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")


def interrupted(toy: Toy, config: Config) -> None:
    toy.trouble = raising_at(3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        launch(toy.down, config)
    toy.trouble = lambda step: None


def stale(toy: Toy, config: Config) -> None:
    toy.content = "old text"
    launch(toy.down, config)
    toy.content = "text"
    launch(toy.up, replace(config, overwrite=True))


def complete(toy: Toy, config: Config) -> None:
    launch(toy.down, config)


def other(toy: Toy, config: Config) -> None:
    launch(toy.down, with_steps(config, 3))


# What lies there before; whether the killed launch and the one after it say overwrite=true.
SCENARIOS: dict[str, tuple[Callable[[Toy, Config], None], bool, bool]] = {
    "fresh": (lambda toy, config: None, False, False),
    "resumed": (interrupted, False, False),
    "stale": (stale, False, False),
    "overwritten": (other, True, True),
    "restarted": (interrupted, True, False),
    "redone": (complete, True, False),
}


def killed_at(event: int, root: Path, launch: Callable[[], Any]) -> bool:
    """Run `launch` in a child that dies at its `event`-th touch of the disk; False if it ended."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if name not in TOUCHES:
                return
            inside_rmtree = name in ("os.remove", "os.rmdir") and arguments[1] != -1
            if inside_rmtree or str(arguments[0]).startswith(str(root)):
                seen += 1
                if seen == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            launch()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.soak)])
def test_a_kill_at_any_moment_leaves_a_folder_that_the_next_launch_finishes(
    tmp_path: Path, scenario: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each (sixth) touch of the disk in turn is where the process dies; a relaunch goes on."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a killed process loses no cache
    monkeypatch.setattr(pipelines.stage, "provenance", dict)
    root, before = tmp_path / "outputs", tmp_path / "before"
    config = with_steps(Config(root=str(root), name="toy", tracker="none"), 5)
    path = root / "toy" / "down"
    launch(Toy().down, config)
    expected = result(path)
    shutil.rmtree(root)
    prepare, *overwrite = SCENARIOS[scenario]
    prepare(Toy(), config)
    root.mkdir(exist_ok=True)
    shutil.copytree(root, before)
    first, second = (replace(config, overwrite=value) for value in overwrite)
    event, killed = 0, True
    while killed:
        event += stride
        shutil.rmtree(root)
        shutil.copytree(before, root)
        killed = killed_at(event, root, lambda: launch(Toy().down, first))
        launch(Toy().down, second)
        assert result(path) == expected, f"killed at event {event}"
        assert not [file for file in root.rglob(".*") if file.name != LOCK], event
    assert event > 30
