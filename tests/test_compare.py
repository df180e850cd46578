"""Runs side by side: what differs, what cannot be compared, and no winner without intervals."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from rich.console import Console

from draftkit.artifacts import read_json
from pipelines.command import run_command
from pipelines.compare import (
    compare,
    comparison,
    differing,
    expand,
    finding,
    read_run,
    read_runs,
    render,
)


def estimate(mean: float, half: float = 0.02) -> dict[str, Any]:
    return {"mean": mean, "ci95": [mean - half, mean + half], "n": 1000, "prompts": 50}


def write_stage(folder: Path, *, summary: dict[str, Any] | None, **settings: Any) -> None:
    folder.mkdir(parents=True)
    machine = settings.pop("machine", {"cpu": "one", "cores": 2})
    inputs = settings.pop("inputs", {})
    manifest = {"settings": {}, "inputs": inputs, "provenance": {"hardware": machine}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    content = {"name": folder.parent.name, "seed": 0, "data": {"max_length": 128}} | settings
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))


def experiment(root: Path, name: str, alpha: float, **settings: Any) -> Path:
    summary = {
        "alpha": estimate(alpha),
        "acceptance_length": estimate(1 + 3 * alpha),
        "speedup": {"measured": 1.5, "ci95": [1.4, 1.6], "predicted": 1.55, "ceiling": 2.0}
        | {"end_to_end": {"mean": 0.9, "ci95": [0.85, 0.95], "chunks": 24}},
        "verdict": "do_not_deploy",
        "seconds": 30.0,
    }
    before = {"alpha_after": estimate(alpha), "seconds": 100.0}
    write_stage(root / name / "distill", summary=before, **dict(settings))
    write_stage(root / name / "evaluate", summary=summary, **dict(settings))
    return root / name


def test_a_run_has_the_numbers_of_its_evaluation_and_the_seconds_of_all_stages(
    tmp_path: Path,
) -> None:
    row = read_run(experiment(tmp_path, "a", 0.8))
    assert row["alpha"] == estimate(0.8)
    assert row["speedup"]["measured"] == 1.5
    assert row["verdict"] == "do_not_deploy"
    assert row["seconds"] == 130.0
    assert row["unfinished"] == []


def test_an_unfinished_run_is_shown_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_stage(Path("a/distill"), summary={"alpha_after": estimate(0.7), "seconds": 9.0})
    write_stage(Path("a/evaluate"), summary=None)
    row = read_run(Path("a"))
    assert row["unfinished"] == ["evaluate"]
    assert row["alpha"] == estimate(0.7)
    assert row["speedup"] is None
    console = Console(width=80)
    with console.capture() as shown:
        render([row], [], console)
    assert "(evaluate unfinished)" in " ".join(shown.get().split())


@pytest.mark.parametrize(("trained", "waits_for"), [(False, "train"), (True, "evaluate")])
def test_a_run_that_has_only_been_trained_is_unfinished(
    tmp_path: Path, trained: bool, waits_for: str
) -> None:
    write_stage(tmp_path / "a" / "train", summary={"seconds": 9.0} if trained else None)
    assert expand(str(tmp_path / "a")) == [tmp_path / "a"]
    row = read_run(tmp_path / "a")
    assert row["unfinished"] == [waits_for]
    assert row["seconds"] == (9.0 if trained else None)
    write_stage(tmp_path / "a" / "evaluate", summary={"alpha": estimate(0.7), "seconds": 1.0})
    assert read_run(tmp_path / "a")["unfinished"] == ([] if trained else ["train"])


def test_a_stage_folder_and_a_sweep_can_be_given(tmp_path: Path) -> None:
    experiment(tmp_path / "sweep", "beta=0.1", 0.7)
    experiment(tmp_path / "sweep", "beta=0.9", 0.8)
    assert [folder.name for folder in expand(str(tmp_path / "sweep"))] == ["beta=0.1", "beta=0.9"]
    stage = tmp_path / "sweep" / "beta=0.1" / "distill"
    assert expand(str(stage)) == [stage]
    assert read_run(stage)["alpha"] == estimate(0.7)


def test_a_run_that_is_given_twice_is_one_row(tmp_path: Path) -> None:
    run, other = (str(experiment(tmp_path, name, 0.7)) for name in "ab")
    assert [row["run"] for row in read_runs([run, other, run])] == [run, other]


@pytest.mark.parametrize("runs", [[], ["missing"], ["empty"]])
def test_runs_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"^runs") as error:
        read_runs(runs)
    assert "\n" not in str(error.value)
    assert all(run in str(error.value) for run in runs)


def test_only_settings_that_differ_are_shown_and_never_the_name(tmp_path: Path) -> None:
    a = experiment(tmp_path, "a", 0.8, seed=1, tracker={"mode": "none"})
    b = experiment(tmp_path, "b", 0.8, seed=2, tracker={"mode": "offline"})
    assert differing([read_run(a), read_run(b)]) == ["seed"]


SAME = ("target", "data", "sampling")


@pytest.mark.parametrize(
    ("alphas", "told"),
    [
        ([0.80, 0.70], "a is above the others"),
        ([0.70, 0.80], "b is above the others"),
        ([0.80, 0.77], "intervals overlap"),
        ([0.90, 0.70, 0.88], "intervals overlap"),
        ([0.70, 0.71, 0.80], "c is above the others"),
    ],
)
def test_a_run_is_said_to_be_better_only_where_intervals_do_not_overlap(
    tmp_path: Path, alphas: list[float], told: str
) -> None:
    named = zip("abc", alphas, strict=False)
    rows = [read_run(experiment(tmp_path, name, alpha)) for name, alpha in named]
    assert told in finding(rows, "alpha", "alpha", SAME)


def test_runs_that_answer_another_question_are_not_compared(tmp_path: Path) -> None:
    rows = [
        read_run(experiment(tmp_path, "a", 0.9)),
        read_run(experiment(tmp_path, "b", 0.5, data={"max_length": 64})),
    ]
    assert finding(rows, "alpha", "alpha", SAME) == (
        "alpha: not comparable, data.max_length differ"
    )


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"seed": 1, "inputs": {"target": "b" * 64, "data": "d" * 16}}, "target.sha256 differ"),
        ({"inputs": {"target": "a" * 64, "data": "e" * 16}}, "data.sha256 differ"),
        ({"evaluate": {"max_new_tokens": 8}}, "evaluate.max_new_tokens differ"),
        ({"seed": 1}, "a is above the others"),  # a given target is the same under any seed
    ],
)
@pytest.mark.usefixtures("two")
def test_a_target_is_what_its_checksum_says_whatever_it_is_called(
    changed: dict[str, Any], told: str
) -> None:
    """One that is made has no path, and another seed, or other text, makes another of it."""
    embedded = {
        "target": {"path": None},
        "evaluate": {"max_new_tokens": 64},
        "inputs": {"target": "a" * 64, "data": "d" * 16, "draft": "f" * 64},
    }
    runs = [
        str(experiment(Path("outputs"), name, alpha, **{**embedded, **settings}))
        for name, alpha, settings in (("a", 0.9, {}), ("c", 0.5, changed))
    ]
    assert told in comparison(runs)["findings"][0]


def test_times_of_two_machines_are_not_compared(tmp_path: Path) -> None:
    rows = [
        read_run(experiment(tmp_path, "a", 0.9)),
        read_run(experiment(tmp_path, "b", 0.5, machine={"cpu": "two", "cores": 2})),
    ]
    assert "machine.cpu" in finding(rows, "speedup", "speedup", (*SAME, "machine"))
    assert "a is above" in finding(rows, "alpha", "alpha", SAME)


def test_numbers_without_intervals_are_never_ranked(tmp_path: Path) -> None:
    rows = [read_run(experiment(tmp_path, name, 0.8)) for name in "ab"]
    rows[0]["alpha"] = {"mean": 0.99}
    assert finding(rows, "alpha", "alpha", SAME) == ""


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    root = Path("outputs")
    return [
        str(experiment(root, "a_drafter_with_a_rather_long_name", 0.8, seed=1)),
        str(experiment(root, "b", 0.7, seed=2)),
    ]


def test_the_command_shows_80_columns_and_keeps_what_it_showed(
    two: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["compare", "tracker=none", f"runs=[{','.join(two)}]"])
    run_command("compare", compare)
    out, err = capsys.readouterr()
    assert err == ""
    assert max(len(line) for line in out.splitlines()) <= 80
    speedup = ("0.900x", "0.85-0.95")  # the one that the verdict rests on
    for part in ("0.800", "0.78-0.82", "3.400", *speedup, "130", "seed=1", "seed=2", "is above"):
        assert part in out
    stored = read_json("outputs/default/compare/compare.json")
    assert [row["run"] for row in stored["runs"]] == two
    assert stored["differing"] == ["seed"]
    assert all(line in " ".join(out.split()) for line in stored["findings"])


def test_a_missing_run_is_one_line_and_exit_code_2(
    two: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["compare", "tracker=none", f"runs=[{two[0]},outputs/c]"])
    with pytest.raises(SystemExit) as end:
        run_command("compare", compare)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("compare: runs: there is no folder outputs/c")
    assert err.count("\n") == 1
    assert not Path("outputs/default").exists()


def test_runs_that_have_changed_are_compared_anew(two: list[str], tmp_path: Path) -> None:
    first = comparison(two)["findings"]
    summary = Path(two[1]) / "evaluate" / "summary.json"
    content = read_json(summary) | {"alpha": estimate(0.79)}
    summary.write_text(json.dumps(content))
    assert comparison(two)["findings"] != first


def test_of_a_sweep_over_divergences_and_sources_there_are_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # the command sets it, for its own process
    monkeypatch.chdir(tmp_path)
    sweep = tmp_path / "outputs" / "sweep"
    for number, (divergence, source) in enumerate(
        [("tvd", "fixed"), ("tvd", "draft"), ("jsd", "draft")]
    ):
        folder = experiment(
            sweep, f"job{number}", 0.8, divergence={"name": divergence}, source={"name": source}
        )
        part = {
            "alpha": estimate(0.8),
            "alpha_gain": estimate(0.1 + number / 100, 0.01),
            "acceptance_length": estimate(3.0),
            "before": {"acceptance_length": estimate(2.0)},
        }
        path = folder / "evaluate" / "summary.json"
        path.write_text(json.dumps(read_json(path) | {"by_temperature": {"1": part}}))
    monkeypatch.setattr(sys, "argv", ["compare", "tracker=none", f"runs=[{sweep}]"])
    run_command("compare", compare)
    out = capsys.readouterr().out
    assert "alpha gained, temperature 1" in out
    assert [f"+0.1{number}0" in out for number in range(3)] == [True] * 3


class FakeApi:
    """The part of `wandb.Api` that the comparison asks."""

    def runs(self, path: str, filters: dict[str, str], lazy: bool) -> list[Any]:
        assert (path, filters["group"], lazy) == ("me/draftkit", "quick", False)
        run = type("Run", (), {})()
        run.name, run.state = "quick-evaluate", "finished"
        run.summary = {"alpha": 0.8, "alpha/low": 0.7, "alpha/high": 0.9, "verdict": "deploy"}
        run.summary |= {"speedup/measured": 1.2, "speedup/ci95/0": 1.1, "speedup/ci95/1": 1.3}
        run.summary |= {f"speedup/end_to_end{end}": 1.1 for end in ("", "/low", "/high")}
        run.config = {"seed": 3, "optim": {"max_steps": 4}, "provenance": {"python": "3"}}
        run.config["inputs"] = {"target": "a" * 64, "draft": "f" * 64}
        return [run] if filters["jobType"] == "evaluate" else []


def test_uploaded_runs_are_read_from_the_scalars_that_the_tracker_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wandb, "Api", FakeApi)
    (row,) = read_runs(["wandb:me/draftkit/quick"])
    assert row["alpha"] == {"mean": 0.8, "ci95": [0.7, 0.9]}
    assert row["speedup"] == {"measured": 1.2, "ci95": [1.1, 1.3], "predicted": None}
    assert row["end_to_end"] == {"mean": 1.1, "ci95": [1.1, 1.1]}
    assert row["verdict"] == "deploy"
    assert row["settings"] == {"seed": 3, "optim.max_steps": 4, "target.sha256": "a" * 12}
    assert row["unfinished"] == []


def test_without_an_account_uploaded_runs_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ValueError, match=r"^runs: W&B does not answer") as error:
        read_runs(["wandb:me/draftkit/quick"])
    assert "\n" not in str(error.value)
