"""All that needs a GPU, rehearsed on a CPU; and parts that fail, hang or are killed."""

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from draftkit.artifacts import read_json, write_json, write_text
from draftkit.config import GPU_PARTS
from draftkit.tracking import Tracker
from pipelines.benchmark import benchmark
from pipelines.benchmarks.gpu import part, run, suite
from pipelines.benchmarks.gpu.part import Part
from pipelines.benchmarks.gpu.report import goals, report
from pipelines.configuration import compose_config
from pipelines.plan import StageFolder

ROOT = Path(__file__).resolve().parents[2]
# A machine that lacks what no part needs: whoever imports it fails.
ABSENT = ("wandb", "trl", "openai", "fastapi", "uvicorn")
ORIGIN = {"git_commit": "abc", "git_dirty": False, "time": "now"}


@pytest.fixture(scope="module")
def composed():
    return compose_config(["+experiment=bench_gpu", "gpu.rehearse=true"])


@pytest.fixture
def config(composed, tmp_path):
    return replace(composed, root=str(tmp_path), gpu=replace(composed.gpu))


@pytest.fixture
def bare(tmp_path):
    """An environment in which the modules of `ABSENT` cannot be imported."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for name in ABSENT:
        (folder / f"{name}.py").write_text("raise ImportError('not on this machine')\n")
    path = os.pathsep.join([str(folder), str(ROOT)])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


# The command, with all parts in its own process: each of theirs would import torch anew.
IN_ONE_PROCESS = """
import runpy
from pipelines.benchmarks.gpu import part, run
def run_process(command, *, log, seconds, environment):
    status = run.status_of(part.main(*command[-3:]))
    return {"status": status, "exit_code": 0, "seconds": 0.0, "output": ""}
run.run_process = run_process
runpy.run_module("pipelines.benchmark", run_name="__main__", alter_sys=True)
"""


@pytest.mark.timeout(900)  # on a machine that may be loud
def test_every_part_is_rehearsed_by_the_command_itself(bare, tmp_path):
    command = [sys.executable, "-W", "default", "-c", IN_ONE_PROCESS]
    command += ["+experiment=bench_gpu", "gpu.rehearse=true", "gpu.seconds=5200"]
    command += [f"root={tmp_path}"]
    environment = bare | run.ENVIRONMENT | run.REHEARSAL
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    folder = tmp_path / "bench_gpu" / "benchmark"
    summary = read_json(folder / "summary.json")
    assert (summary["rehearsal"], summary["all_well"]) == (True, True)
    assert tuple(summary["parts"]) == GPU_PARTS
    for letter, told in summary["parts"].items():
        assert told["status"] == "complete", letter
        assert told["steps"], letter
        for name, step in told["steps"].items():
            assert not {"error", "left_out", "unfinished"} & set(step), (letter, name)
    tests = summary["parts"]["b"]["steps"]["results"]["result"]
    assert (tests["passed"], tests["failed"]) == (0, 0)
    assert tests["skipped"] >= 1
    assert {goal.value is not None for goal in goals(summary["parts"])} == {True}
    text = (folder / run.REPORT).read_text()
    assert "REHEARSAL" in text
    assert "| rehearsal |" in text
    for word in ("hf_static", "hf_assisted", "speculative", "chunked_peak_fraction", "alpha after"):
        assert word in text


def test_a_part_is_a_process_of_its_own(config, capfd):
    config.gpu.parts = ["a"]
    benchmark.launch(config)
    summary = read_json(Path(config.root) / "bench_gpu" / "benchmark" / "summary.json")
    assert summary["parts"]["a"]["status"] == "complete"
    assert "a: machine" in capfd.readouterr().out


# What a part may do to itself


def fake(code: str) -> list[str]:
    """A part that writes a step and then runs `code`."""
    head = """
import json, os, pathlib, subprocess, sys, time
letter, folder = sys.argv[1:3]
step = {"one": {"seconds": 0.1, "result": {"measured": letter}}}
pathlib.Path(folder, "parts", f"{letter}.json").write_text(json.dumps(step))
print(f"part {letter} is at work", flush=True)
"""
    return [sys.executable, "-c", head + code]


LONG = 3600.0  # seconds that no test waits for
HANGS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(folder, "written").write_text(str(child.pid))
os.rename(pathlib.Path(folder, "written"), pathlib.Path(folder, "child"))
time.sleep(600)
"""
FAKES = {
    "a": "print('all is well')",
    "b": "os.kill(os.getpid(), 9)",
    "c": HANGS,
    "d": "raise ValueError('on purpose')",
}


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though nobody may have asked after it."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_part_that_is_killed_hangs_or_raises_costs_itself_alone(config, monkeypatch, capfd):
    folder = Path(config.root) / "bench_gpu" / "benchmark"
    fakes = {**FAKES, "e": FAKES["a"]}
    config.gpu.parts, config.gpu.seconds = list(fakes), 4 * LONG
    monkeypatch.setattr(run, "ALL_SECONDS", 4 * LONG)
    plans = {letter: part.Plan(letter, "", 0, LONG / 2) for letter in fakes}
    monkeypatch.setattr(run, "PLANS", plans)
    monkeypatch.setattr(
        run, "command_of", lambda letter, folder, _: [*fake(fakes[letter]), letter, str(folder)]
    )

    def clock():
        """Jumps as soon as the part that hangs has come so far."""
        return time.monotonic() + LONG * (folder / "child").exists()

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=clock))
    with pytest.raises(SystemExit) as end:
        benchmark.launch(config)
    assert end.value.code == 1
    summary, text = read_json(folder / "summary.json"), (folder / run.REPORT).read_text()
    ends = {letter: told["status"] for letter, told in summary["parts"].items()}
    assert ends == {
        "a": "complete",
        "b": "killed by SIGKILL",
        "c": "out of time",
        "d": "failed",
        "e": "complete",
    }
    for letter, told in summary["parts"].items():
        assert told["steps"]["one"]["result"] == {"measured": letter}
        assert f"| one | measured | {letter} |" in text
    assert summary["parts"]["c"]["seconds"] > LONG
    assert is_gone(int((folder / "child").read_text()))
    assert "ValueError: on purpose" in text
    assert "Traceback (most recent call last)" in summary["parts"]["d"]["output"]
    shown = capfd.readouterr()
    assert "part b is at work" in shown.out
    assert "not all is well: part b, c, d" in shown.err
    with pytest.raises(SystemExit):  # what is complete is shown again, and is no better
        benchmark.launch(config)


def test_a_report_is_of_its_code_and_parts(config, monkeypatch):
    before = run.needs(config)
    assert run.needs(config) == before
    config.gpu.parts = ["b"]
    assert run.needs(config)["gpu"] != before["gpu"]
    with monkeypatch.context() as other:
        other.setattr(run, "CODE", ("conf",))
        assert run.needs(config)["code"] != before["code"]
        other.setattr(run, "TESTS", ROOT / "not" / "there")  # as installed
        with pytest.raises(ValueError, match=r"^gpu\.parts: b runs the tests of a clone"):
            run.needs(config)
    config.gpu.rehearse = False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"no CUDA device is visible.*gpu\.rehearse=true") as error:
        run.needs(config)
    assert "\n" not in str(error.value)


def test_all_parts_end_within_the_seconds_and_leave_each_other_what_they_do_not_need(
    config, tmp_path, monkeypatch
):
    """The limit of a part is what is left, without what is kept for those after it."""
    plans = {"a": (10, 20), "b": (100, 200), "c": (150, 400), "d": (0, 90)}
    plans = {letter: part.Plan(letter, "", *seconds) for letter, seconds in plans.items()}
    monkeypatch.setattr(run, "PLANS", plans)
    folder = StageFolder(tmp_path, Tracker(None))
    (tmp_path / "manifest.json").write_text('{"provenance": {}}')
    monkeypatch.setattr(run, "report", lambda summary, origin: "")

    def run_part(letter, folder, limit, environment):
        return {"status": "complete", "seconds": taken.get(letter, limit)}

    def limits():
        parts = run.measure(config, folder)["parts"]
        return {letter: part["limit"] for letter, part in parts.items()}

    monkeypatch.setattr(run, "run_part", run_part)
    config.gpu.parts, config.gpu.seconds = list("abcd"), run.ALL_SECONDS
    left = run.ALL_SECONDS - 5
    for told, expected in (
        ({"a": 5}, {"a": 20, "b": 200, "c": left - 200, "d": 0}),
        ({"a": 5, "b": 50, "c": 60}, {"a": 20, "b": 200, "c": 400, "d": 90}),
    ):
        taken = told
        assert limits() == pytest.approx(expected)
    config.gpu.seconds = run.ALL_SECONDS / 10
    taken = {"a": 0.5}
    assert limits() == pytest.approx({"a": 2, "b": 20, "c": left / 10 - 20, "d": 0})


def test_a_part_without_time_is_skipped_and_says_so(tmp_path, config, monkeypatch):
    taken = run.ALL_SECONDS - run.LEAST_SECONDS + 1
    ended = {"status": "complete", "seconds": taken, "steps": {}}
    monkeypatch.setattr(run, "run_part", lambda *_: ended)
    write_json(tmp_path / "manifest.json", {"provenance": ORIGIN})
    config.gpu.parts, config.gpu.seconds = ["a", "f"], run.ALL_SECONDS
    summary = run.measure(config, StageFolder(tmp_path, Tracker(None)))
    skipped = summary["parts"]["f"]
    assert (skipped["status"], skipped["seconds"]) == ("skipped", 0.0)
    assert summary["all_well"]
    assert "Skipped: 9 s were left of gpu.seconds." in (tmp_path / run.REPORT).read_text()


# One part


def made_part(tmp_path, config, seconds=100.0, **options):
    (tmp_path / part.FOLDER).mkdir(exist_ok=True)
    return Part("c", tmp_path, config, seconds, **options)


def test_steps_are_written_as_they_are_known_and_a_failed_one_costs_itself(tmp_path, config):
    work = made_part(tmp_path, config)
    assert work.config.hardware.device == "cpu", "a rehearsal, whatever the experiment says"
    assert work.step("one", lambda: {"x": 1.0}) == {"x": 1.0}
    assert work.step("two", lambda: 1 / 0) is None
    written = read_json(part.result_path(tmp_path, "c"))
    assert written["one"]["result"] == {"x": 1.0}
    assert "ZeroDivisionError" in written["two"]["error"]
    with pytest.raises(ZeroDivisionError):
        work.step("three", lambda: 1 / 0, needed=True)


def test_a_step_for_which_no_time_is_left_is_left_out_and_no_failure(tmp_path, config):
    looks = itertools.count(step=10.0)  # each look costs 10 s
    config.gpu.rehearse = False
    work = made_part(tmp_path, config, seconds=75.0, clock=lambda: next(looks))
    assert work.step("guessed", lambda: 1, kind="slow", guess=50.0) == 1  # 10 s long, at 30
    assert work.step("too long", lambda: 1, guess=60.0) is None
    assert work.step("like the first", lambda: 1, kind="slow", guess=60.0) == 1
    assert all("error" not in step for step in work.steps.values())
    assert work.steps["too long"] == {"left_out": "needs about 60 s, 35 are left"}


HANGING = """
import pathlib, sys, time, types
from pipelines.benchmarks.gpu import part
def run(work):
    work.step("one", lambda: 1)
    hang_until_told_of()
def hang_until_told_of():
    while "most recent call first" not in pathlib.Path(sys.argv[1], "log").read_text():
        time.sleep(0.02)
sys.modules["hanging"] = types.SimpleNamespace(run=run)
part.PLANS["c"] = part.Plan("", "hanging", 0, 0)
sys.exit(part.main("c", sys.argv[1], str(part.LAST_WORDS_SECONDS + 3.0)))
"""


def test_a_part_tells_where_it_hangs_before_its_time_is_over(tmp_path, config):
    (tmp_path / part.FOLDER).mkdir()
    write_text(tmp_path / "config.yaml", yaml.safe_dump({"gpu": {"rehearse": True}}))
    process = [sys.executable, "-c", HANGING, str(tmp_path)]
    environment = run.environment_of(config)
    log = tmp_path / "log"
    ended = run.run_process(process, log=log, seconds=100.0, environment=environment)
    assert ended["status"] == "complete"
    assert "in hang_until_told_of" in ended["output"]
    assert read_json(part.result_path(tmp_path, "c"))["one"]["result"] == 1


ORPHAN = """
import os, subprocess, sys
code = "import time; from pipelines.benchmarks.gpu.part import _die_with_parent as die; die()"
code += "; print('here', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for it")
def test_a_part_does_not_outlive_the_command(config):
    process = [sys.executable, "-c", ORPHAN]
    environment = run.environment_of(config)
    done = subprocess.run(process, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -9
    while not is_gone(int(done.stdout)):
        time.sleep(0.01)


def test_what_crashes_is_named_by_its_signal(tmp_path):
    for code, status in (("import os; os.abort()", "killed by SIGABRT"), ("exit(3)", "failed")):
        ended = run.run_process(
            [sys.executable, "-c", code],
            log=tmp_path / "log",
            seconds=60,
            environment=os.environ,
        )
        assert ended["status"] == status
    assert run.status_of(-100) == "killed by signal 100"


# What the report makes of it


def point(method, **more):
    found = {"method": method, "batch_size": 1, "temperature": 1.0, "gamma": 4, "compiled": True}
    return found | {"tokens_per_second": {"median": 100.0}, "ratios": {}} | more


def test_goals_are_judged_by_what_was_measured_and_by_nothing_else():
    drafted = point(
        "speculative",
        ratios={"hf_assisted": {"median": 3.5}},
        speedup={"measured": 1.8, "predicted": 2.0},
    )
    case = {"points": [point("plain"), drafted], "rate": 0.8, "draft": "0.15B"}
    steps = {"x": {"result": case | {"fraction_of_copy": 0.7}}, "y": {"left_out": "no time"}}
    found = {goal.text: goal.verdict for goal in goals({"c": {"steps": steps}})}
    verdicts = iter(found.values())
    assert [next(verdicts) for _ in range(3)] == ["no", "yes", "yes"]
    assert set(verdicts) == {""}


def test_tests_that_fail_are_counted_and_told(tmp_path, config):
    work = made_part(tmp_path, config)
    counting = suite.Counting(work, "results")
    for name, when, outcome, text in (
        ("a", "setup", "passed", None),
        ("a", "call", "passed", None),
        ("a", "teardown", "passed", None),
        ("b", "call", "failed", "assert 1 == 2"),
        ("c", "setup", "skipped", ("file", 3, "Skipped: no card")),
    ):
        told = SimpleNamespace(when=when, outcome=outcome, nodeid=name, longrepr=text, duration=1.0)
        told.capstdout = "\n" if name != "a" else "3 us\n"
        counting.pytest_runtest_logreport(told)
    counting.pytest_collectreport(SimpleNamespace(outcome="failed", nodeid="d", longrepr="no"))
    assert {k: counting.results[k] for k in ("passed", "failed", "skipped")} == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
    }
    assert counting.results["reasons"] == {"c": "Skipped: no card"}
    told = {"title": "tests", "status": "failed", "seconds": 1.0, "limit": 9.0, "output": "x"}
    parts = {"b": told | {"steps": read_json(part.result_path(tmp_path, "c"))}}
    text = report({"rehearsal": False, "parts": parts}, ORIGIN)
    assert "- b failed:\n\n````text\nassert 1 == 2\n````" in text
    assert text.count("printed:") == text.count("- a printed:\n\n````text\n3 us\n````") == 1
    assert "tests marked gpu that failed | 2 | no" in text


def test_only_files_with_a_marked_test_are_collected(tmp_path):
    (tmp_path / "test_one.py").write_text("@pytest.mark." + "gpu\ndef test(): ...\n")
    (tmp_path / "test_two.py").write_text("import missing\n")
    (tmp_path / "test_three.py").write_text("from tests.cuda.card import on_devices\n")
    marked = [tmp_path / "test_one.py", tmp_path / "test_three.py"]
    assert suite.marked_files(tmp_path) == marked


def test_training_takes_as_many_steps_as_fit_into_its_time():
    from draftkit.config import OptimConfig
    from pipelines.benchmarks.gpu import pair

    now = 0.0
    trainer = SimpleNamespace(optim=OptimConfig(), steps=0, tokens=0)

    def step(batch):
        nonlocal now
        now += 5.0 if trainer.steps == 0 else 0.5  # the first compiles
        trainer.steps, trainer.tokens = trainer.steps + 1, trainer.tokens + 10
        return SimpleNamespace(loss=1.0)

    trainer.step = step
    told = pair.train(trainer, lambda step: None, 60.0, None, clock=lambda: now)
    assert told["seconds"] == pytest.approx(60.0, abs=0.5)
    assert told["steps"] == trainer.optim.max_steps == 111
    assert pair.train(trainer, lambda step: None, 60.0, 3, clock=lambda: now)["steps"] == 114


def test_the_clock_of_a_process_that_ends_by_itself_is_not_its_limit(tmp_path):
    started = time.monotonic()
    ended = run.run_process(
        [sys.executable, "-c", "print('here')"],
        log=tmp_path / "log",
        seconds=60,
        environment=os.environ,
    )
    assert (ended["status"], ended["output"]) == ("complete", "here\n")
    assert time.monotonic() - started < 30
