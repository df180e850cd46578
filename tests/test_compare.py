"""Runs side by side: which to take, what is sure of that, what cannot be compared."""

import csv
import json
import operator
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from rich.console import Console

from draftkit.evaluation.intervals import estimate, speedup
from draftkit.theory.acceptance import Rate
from pipelines.command import run_command
from pipelines.compare import as_csv, compare, grid_tables, page_of, show
from pipelines.rankings import Ranking, differing, rankings, recommendation
from pipelines.runs import Run, expand, read_run, read_runs
from tests.keys import missing_keys

DOCUMENTS = 24


def write_stage(folder: Path, summary: dict[str, Any] | None, settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    settings = {"name": folder.parent.name, "seed": 0, "data": {"max_length": 128}} | settings
    machine = settings.pop("machine", {"cpu": "one", "cores": 2})
    inputs = settings.pop("inputs", {})
    manifest = {"inputs": inputs, "provenance": {"hardware": machine}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))


def experiment(
    path: Path,
    alpha: float = 0.5,
    *,
    faster: float = 1.2,
    gamma: int = 2,
    minutes: float = 2.0,
    contexts: str = "c",
    verdict: str = "deploy",
    documents: int = DOCUMENTS,
    temperatures: tuple[str, ...] = ("1",),
    **settings: Any,
) -> Path:
    """A run on texts that are easy or hard for all runs, with a little luck of its own."""
    shared, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(hash_of(path))
    luck = 0.01 * torch.randn(documents, generator=own, dtype=torch.float64)
    ease = 0.1 * torch.randn(documents, generator=shared, dtype=torch.float64)
    positions = torch.full((documents,), 40.0, dtype=torch.float64)
    accepted = positions * (alpha + ease + luck - luck.mean())
    numbers = [*range(documents)]
    tokens, plain = [40] * documents, [1.0 + 0.1 * (i % 5) for i in range(documents)]
    seconds = [s / faster * (1 + 0.01 * float(e)) for s, e in zip(plain, luck, strict=True)]
    rounds = [25 + i % 3 for i in range(documents)]
    rates = [Rate.of(zip(tokens, s, strict=True)) for s in (seconds, plain)]
    rate = Rate(accepted, positions)
    part = {
        "alpha": estimate(rate).as_dict(),
        "alpha_gain": estimate(Rate(accepted - 0.3 * positions, positions)).as_dict(),
        "acceptance_length": estimate(Rate.of(zip(tokens, rounds, strict=True))).as_dict(),
        "speedup": {"end_to_end": speedup(*rates).as_dict()},
        **{"gamma": gamma, "batch_size": 1, "cost_ratio": 0.1, "verdict": verdict},
    }
    timing = {
        "after": {"tokens": tokens, "rounds": rounds, "seconds": seconds},
        "plain": {"tokens": tokens, "rounds": tokens, "seconds": plain},
    }
    for way in timing.values():
        way["prefill_seconds"] = [0.0] * documents
    scores = {"alpha": accepted.tolist(), "positions": positions.tolist(), "documents": numbers}
    summary = {"by_temperature": {t: part | {"temperature": float(t)} for t in temperatures}}
    write_stage(path / "evaluate", summary, dict(settings))
    for name, kept in {
        "prompts": {"contexts": contexts, "after": scores},
        "timing": timing,
    }.items():
        content = json.dumps(dict.fromkeys(temperatures, kept))
        (path / "evaluate" / f"{name}.json").write_text(content)
    write_stage(path / "train", {"seconds": 60 * minutes}, dict(settings))
    lines = [{"section": "train", "step": 5, "total_tokens": 1000}]
    lines += [{"section": "validation", "step": step, "alpha": alpha} for step in (0, 5)]
    (path / "train" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{")
    return path


def hash_of(path: Path) -> int:
    return sum(map(ord, path.name)) + 100 * len(path.name)


def compared(*folders: Path) -> Ranking:
    (made,) = rankings(read_runs([str(folder) for folder in folders]))
    return made


def notes_of(made: Ranking) -> str:
    return "\n".join(made.notes)


# Reading


def test_a_run_has_the_numbers_of_its_evaluation_and_what_they_are_made_of(tmp_path: Path) -> None:
    folder = experiment(tmp_path / "a", 0.8, faster=1.5)
    (run,) = read_run(folder)
    entries = run.entries
    assert set(entries) == {"alpha", "gain", "tau", "speedup"}
    assert entries["alpha"].mean == pytest.approx(0.8, abs=0.05)
    for name, kept in (("alpha", estimate), ("tau", estimate), ("speedup", speedup)):
        made = kept(*entries[name].rates)
        assert entries[name][:3] == pytest.approx((made.mean, made.low, made.high))
    assert run.minutes == 2
    assert run.curve == [(0, 0.8), (1000, 0.8)]  # without the torn line of a kill
    assert (run.verdict, run.gamma, run.unfinished) == ("deploy", 2, [])


def test_of_a_drafter_that_is_used_beside_prompt_lookup_this_use_is_compared(
    tmp_path: Path,
) -> None:
    folder = experiment(tmp_path / "a")
    path = folder / "evaluate" / "summary.json"
    summary = json.loads(path.read_text())
    part = summary["by_temperature"]["1"]
    mixed = {"mean": 1.4, "ci95": [1.3, 1.5]}
    part |= {"use": "hybrid", "ways": {"hybrid": {"speedup": {"end_to_end": mixed}}}}
    path.write_text(json.dumps(summary))
    timing = json.loads((folder / "evaluate" / "timing.json").read_text())
    timing["1"]["hybrid"] = timing["1"]["plain"]
    (folder / "evaluate" / "timing.json").write_text(json.dumps(timing))
    (run,) = read_run(folder)
    assert run.entries["speedup"][:3] == (1.4, 1.3, 1.5)
    fast, slow = run.entries["speedup"].rates
    assert fast.mean == slow.mean


@pytest.mark.parametrize(
    ("stages", "waits_for"),
    [
        ({"train": None}, ["train", "evaluate"]),
        ({"train": {"seconds": 9.0}}, ["evaluate"]),
        ({"train": {"seconds": 9.0}, "evaluate": None}, ["evaluate"]),
    ],
)
def test_a_killed_run_is_named_and_does_not_count(
    tmp_path: Path, stages: dict[str, Any], waits_for: list[str]
) -> None:
    for name, summary in stages.items():
        write_stage(tmp_path / "killed" / name, summary, {})
    (tmp_path / "killed" / name / "config.yaml").unlink()  # it comes after the manifest
    (run,) = read_run(tmp_path / "killed")
    assert run.unfinished == waits_for
    others = [experiment(tmp_path / name, 0.5) for name in "ab"]
    made = compared(tmp_path / "killed", *others)
    assert {run.label for run in made.runs} == {"a", "b"}


def test_a_stage_folder_and_a_sweep_can_be_given(tmp_path: Path) -> None:
    for value in (0.1, 0.9):
        experiment(tmp_path / "sweep" / f"beta={value}")
    assert [folder.name for folder in expand(str(tmp_path / "sweep"))] == ["beta=0.1", "beta=0.9"]
    stage = tmp_path / "sweep" / "beta=0.1" / "evaluate"
    assert expand(str(stage)) == [stage.parent]


def test_runs_are_read_once_and_called_as_short_as_can_be(tmp_path: Path) -> None:
    one, other = (str(experiment(tmp_path / "s" / f"b={i},c=d")) for i in (1, 2))
    same = str(experiment(tmp_path / "t" / "b=1,c=d"))
    assert [run.label for run in read_runs([one, other, one])] == ["1 / d", "2 / d"]
    assert [run.label for run in read_runs([one, other, same])] == [one, "2 / d", same]


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
    a = experiment(tmp_path / "a", seed=1, tracker={"mode": "none"})
    b = experiment(tmp_path / "b", seed=2, tracker={"mode": "offline"})
    assert differing(read_runs([str(a), str(b)])) == ["seed"]


# Ranking


def test_a_difference_that_two_intervals_hide_is_sure_where_runs_share_their_texts(
    tmp_path: Path,
) -> None:
    made = compared(experiment(tmp_path / "a", 0.50), experiment(tmp_path / "b", 0.52))
    best, other = made.runs
    assert best.label == "b"
    assert other.entries["alpha"].high > best.entries["alpha"].low
    gap = other.gaps["alpha"]
    assert gap.paired
    assert gap.differs
    assert gap.mean == pytest.approx(other.entries["alpha"].mean - best.entries["alpha"].mean)
    verdict, tone, sentence = recommendation([made])
    assert (verdict, tone) == ("Take b", "good")
    assert " at temperature 1 is surely above 1 of 1 other." in sentence


def test_runs_of_other_texts_are_taken_as_independent_and_that_is_said(tmp_path: Path) -> None:
    a = experiment(tmp_path / "a", 0.50, seed=1, contexts="x")
    made = compared(a, experiment(tmp_path / "b", 0.51, contexts="y"))
    gap = made.runs[1].gaps["alpha"]
    assert not gap.paired
    assert not gap.differs
    assert "Not all alpha are paired" in notes_of(made)
    assert "a may be as good" in recommendation([made])[2]


def test_runs_that_answer_another_question_are_not_compared(tmp_path: Path) -> None:
    others = experiment(tmp_path / "other", 0.9, data={"max_length": 64}, contexts="x")
    for name in "ab":
        experiment(tmp_path / name)
    made, alone = rankings(read_runs([str(others), str(tmp_path / "a"), str(tmp_path / "b")]))
    assert {run.label for run in made.runs} == {"a", "b"}
    assert [run.label for run in alone.runs] == ["other"]
    assert "Not compared with those above, since data.max_length differ." in alone.notes
    neither = rankings(read_runs([str(others), str(tmp_path / "a")]))
    assert recommendation(neither)[:2] == ("Nothing to compare", "open")


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"seed": 1, "inputs": {"target": "b" * 64, "data": "d" * 16}}, "target.sha256"),
        ({"inputs": {"target": "a" * 64, "data": "e" * 16}}, "data.sha256"),
        ({"evaluate": {"max_new_tokens": 8}}, "evaluate.max_new_tokens"),
        ({"seed": 1}, None),  # a given target is the same under any seed
        ({"sampling": {"temperature": 0.0}}, None),  # whichever is served
        ({"target": {"path": "elsewhere/model"}}, None),
    ],
)
def test_a_target_is_what_its_checksum_says_whatever_it_is_called(
    tmp_path: Path, changed: dict[str, Any], keys: str | None
) -> None:
    """One that is made has no path, and another seed, or other text, makes another of it."""
    embedded = {
        "target": {"path": None},
        "evaluate": {"max_new_tokens": 64},
        "sampling": {"temperature": 1.0},
        "inputs": {"target": "a" * 64, "data": "d" * 16, "draft": "f" * 64},
    }
    a = experiment(tmp_path / "a", 0.9, **embedded)
    b = experiment(tmp_path / "b", 0.5, **embedded | changed)
    first, *others = rankings(read_runs([str(a), str(b)]))
    assert len(first.runs) == (2 if keys is None else 1)
    for other in others:
        assert f"since {keys} differ." in notes_of(other)


def test_alpha_decides_where_training_differs_and_the_clock_where_the_drafter_does(
    tmp_path: Path,
) -> None:
    def pair(name: str, **changed: Any) -> Ranking:
        a = experiment(tmp_path / name / "a", 0.6, faster=1.1)
        return compared(a, experiment(tmp_path / name / "b", 0.5, faster=1.3, **changed))

    trained = pair("trained", divergence={"name": "tvd"})
    assert (trained.measure, trained.runs[0].label) == ("alpha", "a")
    assert "a pass costs the same" in trained.notes[0]
    larger = pair("larger", draft={"layers": 3})
    assert (larger.measure, larger.runs[0].label) == ("speedup", "b")
    assert "draft.layers may change" in larger.notes[0]
    gap = larger.runs[1].gaps["speedup"]
    assert gap.mean == pytest.approx(1.1 - 1.3, abs=0.01)
    assert gap.differs
    assert "Its speedup of 1.3" in recommendation([larger])[2]
    elsewhere = pair("elsewhere", draft={"layers": 3}, machine={"cpu": "two", "cores": 2})
    assert elsewhere.measure == "alpha"
    assert "speedup" not in elsewhere.runs[1].gaps
    assert "No differences of speedup, since machine.cpu differ." in elsewhere.notes
    few = pair("few", draft={"layers": 3}, documents=8)
    assert few.measure == "alpha"


@pytest.mark.parametrize(
    ("inputs", "apart"),
    [
        ([{"draft": "d", "train": "a"}, {"draft": "d", "train": "a"}], False),
        ([{"draft": "d", "train": "a"}, {"draft": "d", "train": "b"}], True),
        ([{"draft": "d"}, {"draft": "d"}], False),  # judged alone
        ([{"draft": "a"}, {"draft": "d", "train": "a"}], False),  # what was trained, judged alone
        ([{"draft": "a"}, {"draft": "b"}], True),
        ([{}, {}], True),  # nothing is known of them
    ],
)
def test_differences_of_runs_that_were_trained_apart_hold_the_deviation_of_a_seed(
    tmp_path: Path, inputs: list[dict[str, str]], apart: bool
) -> None:
    made = compared(
        *(experiment(tmp_path / name, inputs=one) for name, one in zip("ab", inputs, strict=True))
    )
    best, other = (run.entries["alpha"] for run in made.runs)
    documents = estimate(*other.rates, *best.rates, compare=operator.sub)
    gap = made.runs[1].gaps["alpha"]
    wider = (gap.high - gap.low) / (documents.high - documents.low)
    assert (wider > 1.05) is apart
    assert ("deviation of 0.003 in alpha" in notes_of(made)) is apart
    tau, speed = (made.runs[0].entries[name] for name in ("tau", "speedup"))
    assert tau.deviation == pytest.approx(2 * 0.003, rel=0.1)  # 1 + 2 alpha, at two proposals
    assert speed.deviation == pytest.approx(0.006 / 1.75 * speed.mean, rel=0.1)


def test_tokens_a_pass_of_other_numbers_of_proposals_are_not_compared(tmp_path: Path) -> None:
    a, b = experiment(tmp_path / "a", gamma=2), experiment(tmp_path / "b", gamma=3)
    made = compared(a, b)
    assert [set(run.gaps) for run in made.runs] == [set(), {"alpha", "speedup"}]
    assert "No differences of tau, since numbers of proposals differ." in made.notes
    same = compared(a, experiment(tmp_path / "d", gamma=2))
    assert same.runs[1].gaps["tau"].mean == 0
    assert not same.runs[1].gaps["tau"].differs


def test_runs_on_more_and_more_text_say_what_yet_more_would_give(tmp_path: Path) -> None:
    """By the law of the forecast: each doubling gains four fifths of the one before."""
    alphas = [0.5, 0.5 + 0.04, 0.5 + 0.04 * 1.8]
    folders = [
        experiment(tmp_path / f"n{steps}", alpha, optim={"max_steps": steps})
        for steps, alpha in zip((100, 200, 400), alphas, strict=True)
    ]
    for folder, tokens in zip(folders, (10_000, 20_000, 40_000), strict=True):
        lines = [{"section": "train", "step": 5, "total_tokens": tokens}]
        lines.append({"section": "validation", "step": 5, "alpha": 0.5})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "train" / "metrics.jsonl").write_text(text)
    made = compared(*folders)
    (note,) = (one for one in made.notes if one.startswith("Forecast"))
    twice, low, high = map(float, re.findall(r"0\.\d{3}", note)[:3])
    most = made.runs[0].entries["alpha"].mean
    assert twice == pytest.approx(most + 0.04 * 0.64, abs=0.008)
    assert low < twice < high < twice + 0.03
    assert note.endswith("at 10 times the most (40,000); 80 % intervals.")
    assert "Forecast" not in notes_of(compared(*folders[:2]))
    other = experiment(tmp_path / "other", 0.6, optim={"max_steps": 800, "learning_rate": 1})
    assert "Forecast" not in notes_of(compared(*folders, other))


def sweep(root: Path, seeds: dict[str, tuple[int, ...]]) -> list[Path]:
    """Cells of these seeds, on texts of their own; each is better by 0.05 than the last."""
    return [
        experiment(
            root / f"{name}{seed}",
            0.5 + 0.05 * number + 0.02 * seed + 0.001 * (seed * (number + 1) % 3),
            divergence={"name": name},
            seed=seed,
            contexts=f"of {seed}",
        )
        for number, (name, some) in enumerate(seeds.items())
        for seed in some
    ]


def test_seeds_of_a_cell_are_pooled_and_their_spread_is_the_error(tmp_path: Path) -> None:
    made = compared(*sweep(tmp_path, dict.fromkeys(("jsd", "tvd", "lk_hybrid"), (0, 1, 2))))
    assert [run.settings["divergence.name"] for run in made.runs] == ["lk_hybrid", "tvd", "jsd"]
    best, second, _ = made.runs
    assert best.entries["alpha"].by_seed == pytest.approx((0.6, 0.62, 0.641), abs=0.05)
    assert second.gaps["alpha"].mean == pytest.approx(-0.05, abs=0.01)
    assert second.gaps["alpha"].differs
    assert best.label == "lk_hybrid0 (3 seeds)"
    assert next(csv.DictReader(as_csv([made]).splitlines()))["seeds"] == "3"
    assert "Means of 3 seeds" in notes_of(made)
    assert "Left out: 0 runs." in notes_of(made)


def test_seeds_that_not_all_cells_have_are_left_out_or_none_is_pooled(tmp_path: Path) -> None:
    made = compared(*sweep(tmp_path / "more", {"jsd": (0, 1), "tvd": (0, 1, 2)}))
    assert [len(run.entries["alpha"].by_seed) for run in made.runs] == [2, 2]
    assert "Left out: 1 runs." in notes_of(made)
    single = compared(*sweep(tmp_path / "single", {"jsd": (0,), "tvd": (0, 1)}))
    assert [run.entries["alpha"].by_seed for run in single.runs] == [(), (), ()]


def test_a_run_that_gains_no_time_is_not_recommended(tmp_path: Path) -> None:
    a = experiment(tmp_path / "a", 0.6, verdict="do_not_deploy")
    made = compared(a, experiment(tmp_path / "b", 0.5, verdict="do_not_deploy"))
    verdict, tone, sentence = recommendation([made])
    assert (verdict, tone) == ("Deploy none", "bad")
    assert sentence.startswith("Even the best, a, gains no time. Its alpha of 0.6")
    made = compared(a, experiment(tmp_path / "c", 0.5))
    verdict, tone, sentence = recommendation([made])
    assert (verdict, tone) == ("Take a", "open")
    assert sentence.endswith("Its own verdict: do not deploy.")


# What people see


GRID = {
    ("forward_kl", "fixed"): 0.55,
    ("forward_kl", "draft"): 0.62,
    ("tvd", "draft"): 0.52,
    ("next_token", "fixed"): 0.51,
    ("next_token", "target"): 0.50,
}


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    for (divergence, source), alpha in GRID.items():
        experiment(
            tmp_path / "grid" / f"divergence.name={divergence},source.name={source}",
            alpha,
            divergence={"name": divergence},
            source={"name": source},
            temperatures=("1", "0"),
        )
    return tmp_path / "grid"


def shown(made: list[Ranking], unread: list[str] | None = None) -> str:
    console = Console(width=80, force_terminal=False, markup=False)
    with console.capture() as capture:
        show(made, unread or [], console)
    assert max(map(len, capture.get().splitlines())) <= 80
    return capture.get()


def test_a_grid_has_a_table_of_what_was_gained_and_one_over_plain_training(grid: Path) -> None:
    made = rankings(read_runs([str(grid)]))
    assert [one.runs[0].temperature for one in made] == ["1", "0"]
    gained, over = grid_tables(made[0].runs)
    assert [column.header for column in gained.columns] == ["", "fixed", "target", "draft"]
    names, fixed, target, draft = ([*column.cells] for column in over.columns)
    assert names == ["forward_kl", "tvd", "next_token"]
    assert "next_token / fixed" in over.title
    assert fixed[0].startswith("+0.04")
    assert fixed[0].split("\n")[0].endswith(" *")
    assert fixed[1] == target[0] == draft[2] == ""  # were not run
    assert fixed[2] == ""  # the control itself
    text = shown(made)
    for part in (
        "Take forward_kl / draft.",
        "alpha gained, temperature 1",
        "alpha gained, temperature 0",
    ):
        assert part in text


def test_a_grid_is_of_divergences_and_sources_alone(tmp_path: Path) -> None:
    runs = [
        experiment(
            tmp_path / f"{layers}{name}", draft={"layers": layers}, divergence={"name": name}
        )
        for layers in ([0], [0, 1])
        for name in ("jsd", "tvd")
    ]
    assert grid_tables(compared(*runs).runs) == []


def test_the_page_needs_nothing_else_and_escapes_what_runs_are_called(grid: Path) -> None:
    experiment(grid / "<b>&divergence", 0.5, divergence={"name": "jsd"}, source={"name": "mix"})
    made = rankings(read_runs([str(grid)]))
    text = page_of(made, ["x: evaluate unfinished"])
    assert "<b>&divergence" not in text
    assert "&lt;b&gt;&amp;divergence" in text
    assert "http" not in text
    assert "<script" not in text
    assert text.count("<svg") == 8
    for part in ("Take forward_kl / draft", "surely above", "x: evaluate unfinished", "0.62"):
        assert part in text


def test_a_page_and_a_table_of_nothing_say_so() -> None:
    run = Run("outputs/killed", {}, ["evaluate"])
    assert rankings([run]) == []
    assert "Nothing to compare" in page_of([], ["killed: evaluate unfinished"])
    assert as_csv([]).strip() == ""
    assert shown([], ["killed: evaluate unfinished"]).startswith("Nothing to compare.")


def test_of_two_hundred_runs_thirty_are_shown_and_all_are_in_the_table(tmp_path: Path) -> None:
    experiment(tmp_path / "many" / "run0")
    (first,) = read_runs([str(tmp_path / "many")])
    runs = []
    for number in range(200):
        entry = first.entries["alpha"]._replace(mean=0.4 + number / 1000)
        name = f"run{number}"
        settings = first.settings | {"optim.learning_rate": number / 1000}
        runs.append(Run(name, settings, [], label=name, temperature="1", entries={"alpha": entry}))
    (made,) = rankings(runs)
    text = shown([made])
    assert "170 more in compare.csv" in text
    assert "run170" in text
    assert "run169" not in text
    assert len(as_csv([made]).splitlines()) == 201


def test_the_command_says_what_to_take_and_leaves_a_page_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("COLUMNS", "80")
    root, long = Path("outputs"), "a_drafter_with_a_rather_long_name"
    a = experiment(root / long, 0.8, optim={"max_steps": 10})
    two = [str(a), str(experiment(root / "b", 0.7, optim={"max_steps": 20}))]
    write_stage(Path("outputs/c/train"), None, {})
    runs = ",".join([*two, "outputs/c"])
    monkeypatch.setattr(sys, "argv", ["compare", "tracker=none", f"runs=[{runs}]"])
    run_command("compare", compare)
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 80
    first, *_ = out.splitlines()
    assert first.startswith("Take a_drafter_with_a_rather_long_name. Its alpha of 0.8")
    for part in (
        "optim.max_steps=10",
        "optim.max_steps=20",
        "outputs/c: train, evaluate unfinished",
    ):
        assert part in out
    folder = Path("outputs/default/compare")
    assert "Take a_drafter_with_a_rather_long_name" in (folder / "compare.html").read_text()
    a, b = csv.DictReader((folder / "compare.csv").read_text().splitlines())
    assert missing_keys("compare", a) == []
    assert [a["name"], b["name"]] == two
    (run,) = read_run(Path(two[1]))
    assert float(b["alpha"]) == run.entries["alpha"].mean
    assert float(b["speedup/low"]) == run.entries["speedup"].low
    assert float(b["alpha_gap/high"]) < 0
    assert float(b["alpha_gap/p"]) < 0.05
    assert a["alpha_gap"] == ""
    assert (a["optim.max_steps"], b["optim.max_steps"]) == ("10", "20")


# Weights & Biases


class FakeApi:
    """The part of `wandb.Api` that the comparison asks."""

    def runs(self, path: str, filters: dict[str, str], lazy: bool) -> list[Any]:
        assert (path, filters["group"], lazy) == ("me/draftkit", "quick", False)
        assert filters["jobType"] == "evaluate"
        return [self.run("good", 0.8), self.run("bad", 0.5)]

    def run(self, name: str, alpha: float) -> Any:
        run = type("Run", (), {})()
        run.name, run.state = name, "finished" if name == "good" else "crashed"
        run.summary = {"alpha": alpha, "alpha/low": alpha - 0.1, "alpha/high": alpha + 0.1}
        run.summary |= {"verdict": "deploy", "temperature": 0.6}
        run.summary |= {f"speedup/end_to_end{end}": 1.1 for end in ("", "/low", "/high")}
        run.config = {"seed": 3, "optim": {"max_steps": 4}, "provenance": {"python": "3"}}
        run.config["inputs"] = {"target": "a" * 64, "draft": "f" * 64}
        return run


def test_uploaded_runs_are_read_from_the_scalars_that_the_tracker_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wandb, "Api", FakeApi)
    good, bad = read_runs(["wandb:me/draftkit/quick"])
    assert good.name == "wandb:me/draftkit/good"
    assert good.entries["alpha"][:3] == (0.8, pytest.approx(0.7), 0.9)
    assert good.entries["speedup"][:3] == (1.1,) * 3
    assert good.settings == {"seed": 3, "optim.max_steps": 4, "target.sha256": "a" * 12}
    assert (good.temperature, good.unfinished, bad.unfinished) == ("0.6", [], ["evaluate"])
    (made,) = rankings([good, bad])
    assert "Not all alpha are paired" in notes_of(made)
    assert recommendation([made])[0] == "Take good"
    assert made.runs[1].gaps["alpha"].differs  # by 0.3 of intervals of 0.1


def test_without_an_account_uploaded_runs_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ValueError, match=r"^runs: W&B does not answer") as error:
        read_runs(["wandb:me/draftkit/quick"])
    assert "\n" not in str(error.value)
