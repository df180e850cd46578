"""metrics.jsonl is the truth and survives kills; W&B hears the same numbers, offline."""

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

from draftkit import tracking
from draftkit.tracking import FILE_NAME, Tracker, read_metrics, scalars

ESTIMATE = {"mean": 0.8, "ci95": [0.7, 0.9], "n": 100, "prompts": 5}


class FakeRun:
    """What a W&B run would have heard."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.summary: dict[str, Any] = {}
        self.finished: list[int] = []

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    run = FakeRun()
    monkeypatch.setattr(tracking, "_start_wandb", lambda *args, **kwargs: run)
    return run


def without_time(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "time"} for line in read_metrics(path)]


def train(tracker: Tracker, steps: range) -> None:
    for step in steps:
        tracker.log("train", step, {"loss": 1 / step})
        if step % 4 == 0:
            tracker.log("eval", step, {"alpha": step / 10})


def test_both_listeners_get_the_same_numbers(tmp_path: Path, fake: FakeRun) -> None:
    tracker = Tracker(tmp_path, mode="offline")
    tracker.log("train", 1, {"loss": torch.tensor(0.5), "tokens": 7})
    tracker.log("train", 2, {"loss": 0.25, "tokens": 8})
    tracker.log("online", 3, {"alpha": 0.9})
    assert without_time(tmp_path / FILE_NAME) == [
        {"section": "train", "step": 1, "loss": 0.5, "tokens": 7},
        {"section": "train", "step": 2, "loss": 0.25, "tokens": 8},
        {"section": "online", "step": 3, "alpha": 0.9},
    ]
    assert fake.logged == [
        {"train/step": 1, "train/loss": 0.5, "train/tokens": 7},
        {"train/step": 2, "train/loss": 0.25, "train/tokens": 8},
        {"online/step": 3, "online/alpha": 0.9},
    ]
    assert fake.axes == [
        ("train/step", None),
        ("train/*", "train/step"),
        ("online/step", None),
        ("online/*", "online/step"),
    ]


def test_non_finite_numbers_are_null_in_valid_json(tmp_path: Path, fake: FakeRun) -> None:
    Tracker(tmp_path, mode="offline").log("train", 1, {"loss": math.nan, "norm": math.inf})
    text = (tmp_path / FILE_NAME).read_text()
    line = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["loss"] is None
    assert line["norm"] is None
    assert math.isnan(fake.logged[0]["train/loss"])


@pytest.mark.parametrize("killed_after", [5, 6, 8, 9])
@pytest.mark.parametrize("checkpoint", [0, 4])
def test_a_resumed_file_equals_an_uninterrupted_one(
    tmp_path: Path, killed_after: int, checkpoint: int
) -> None:
    train(Tracker(tmp_path / "whole"), range(1, 13))
    train(Tracker(tmp_path / "killed"), range(1, killed_after + 1))
    train(Tracker(tmp_path / "killed"), range(checkpoint + 1, 13))
    assert without_time(tmp_path / "killed" / FILE_NAME) == without_time(
        tmp_path / "whole" / FILE_NAME
    )


def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path) -> None:
    train(Tracker(tmp_path), range(1, 4))
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"section": "train", "st')
    assert len(read_metrics(tmp_path / FILE_NAME)) == 3
    train(Tracker(tmp_path), range(4, 6))
    assert [line["step"] for line in read_metrics(tmp_path / FILE_NAME)] == [1, 2, 3, 4, 4, 5]


def test_names_that_the_file_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="step"):
        Tracker(tmp_path).log("train", 1, {"step": 3})


def test_a_tracker_without_a_folder_records_nothing(tmp_path: Path, fake: FakeRun) -> None:
    tracker = Tracker(None, mode="offline")
    train(tracker, range(1, 5))
    tracker.finish()
    assert fake.logged == []
    assert list(tmp_path.iterdir()) == []


def test_a_summary_becomes_scalars(tmp_path: Path, fake: FakeRun) -> None:
    summary = {
        "alpha": ESTIMATE,
        "speedup": {"measured": 1.4, "ci95": [1.3, 1.5]},
        "per_position": [0.8, 0.6],
        "verdict": "deploy",
        "p_value": None,
        "of_few": ESTIMATE | {"ci95": None},
        "before": {"alpha": ESTIMATE | {"mean": math.nan}},
    }
    Tracker(tmp_path, mode="offline").summary(summary)
    assert fake.summary == {
        "alpha": 0.8,
        "alpha/low": 0.7,
        "alpha/high": 0.9,
        "speedup/measured": 1.4,
        "speedup/ci95/0": 1.3,
        "speedup/ci95/1": 1.5,
        "per_position/0": 0.8,
        "per_position/1": 0.6,
        "verdict": "deploy",
        "of_few": 0.8,
        "before/alpha/low": 0.7,
        "before/alpha/high": 0.9,
    }
    assert dict(scalars(summary)) == fake.summary


def test_finish_passes_the_exit_code_once(tmp_path: Path, fake: FakeRun) -> None:
    tracker = Tracker(tmp_path, mode="offline")
    tracker.finish(2)
    tracker.finish(0)
    assert fake.finished == [2]


def test_a_listener_that_fails_is_dropped_aloud(
    tmp_path: Path, fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker(tmp_path, mode="offline")

    def broken(values: dict[str, Any]) -> None:
        raise BrokenPipeError("service is gone")

    monkeypatch.setattr(fake, "log", broken)
    with pytest.warns(UserWarning, match="service is gone"):
        tracker.log("train", 1, {"loss": 1.0})
    tracker.log("train", 2, {"loss": 0.5})
    assert [line["step"] for line in read_metrics(tmp_path / FILE_NAME)] == [1, 2]


def test_online_without_a_key_is_refused_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("builtins.input", lambda *args: pytest.fail("asked a question"))
    with pytest.raises(ValueError, match=r"tracker=online needs .* key") as error:
        Tracker(tmp_path, mode="online")
    assert "\n" not in str(error.value)


def test_the_tracker_is_light_until_wandb_is_wanted(tmp_path: Path) -> None:
    code = (
        "import sys; from draftkit.tracking import Tracker;"
        f"Tracker({str(tmp_path)!r}, mode='none').log('train', 1, {{'loss': 1.0}});"
        "print([name for name in ('wandb', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


OFFLINE = """
import sys
from pathlib import Path
import matplotlib.pyplot as plt
from draftkit.tracking import Tracker
folder = Path(sys.argv[1])
tracker = Tracker(folder, mode="offline", group="toy", job_type="distill", name="toy-distill",
                  tags=["source=draft"], config={"seed": 0, "provenance": {"git_commit": None}})
tracker.log("train", 1, {"loss": 0.5})
tracker.log("eval", 1, {"alpha": 0.75})
tracker.table("eval/prompts", ["prompt", "tokens"], [["a", 3], [7, None]])
plt.plot([1, 2])
plt.savefig(folder / "figure.png")
tracker.figure("eval/figure", folder / "figure.png")
tracker.report("<h1>a page</h1>")
(folder / "draft").mkdir()
(folder / "draft" / "weights").write_bytes(b"123")
tracker.artifact("toy drafter", folder / "draft", {"alpha": {"mean": 1, "ci95": [0, 1]}})
tracker.summary({"verdict": "deploy"})
tracker.finish(0)
assert tracker._run is None
"""


def test_an_offline_run_writes_its_file_and_contacts_nobody(tmp_path: Path) -> None:
    """The service process gets the address of a listener that must stay unasked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        hidden = ("WANDB_API_KEY", "WANDB_MODE")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "WANDB_BASE_URL"), address)
        done = subprocess.run(
            [sys.executable, "-c", OFFLINE, str(tmp_path)],
            env={
                **environment,
                **proxies,
                "HOME": str(tmp_path / "home"),
                "MPLCONFIGDIR": matplotlib.get_cachedir(),  # it tells when it must look for fonts
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert done.stdout == ""
    assert done.stderr == ""
    stored = list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(stored) == 1
    content = stored[0].read_bytes()
    for word in (b"toy-distill", b"train/loss", b"eval/step", b"source=draft", b"toy-drafter"):
        assert word in content
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/eval/figure*.png"))
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/report*.html")
    assert page.read_text() == "<h1>a page</h1>"
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/eval/prompts*.table.json")
    assert json.loads(table.read_text())["data"] == [["a", 3], [7, None]]
    assert [line["section"] for line in read_metrics(tmp_path / FILE_NAME)] == ["train", "eval"]


@pytest.mark.parametrize(("mode", "resume"), [("offline", None), ("online", "allow")])
def test_a_relaunch_goes_on_with_the_run_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, resume: str | None
) -> None:
    """So that one training is one run, whatever was killed, and two trainings are two."""
    import wandb

    begun: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "init", lambda **labels: begun.append(labels))
    monkeypatch.setattr(type(wandb.api), "api_key", "key")
    for folder in ("one", "one", "two"):
        Tracker(tmp_path / folder, mode=mode)
    first, again, other = (labels["id"] for labels in begun)
    assert first == again != other
    assert {labels.get("resume") for labels in begun} == {resume}


def test_disabled_keeps_the_file_and_nothing_of_wandb(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(tmp_path, mode="disabled")
    calls: list[Callable[[], None]] = [
        lambda: tracker.log("train", 1, {"loss": 1.0}),
        lambda: tracker.summary({"alpha": ESTIMATE}),
        lambda: tracker.table("t", ["a"], [[1]]),
        lambda: tracker.artifact("a", tmp_path, {}),
        lambda: tracker.finish(0),
    ]
    for call in calls:
        call()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert capfd.readouterr() == ("", "")
