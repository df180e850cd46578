"""The stage folder: complete, resumed, refused, redone, stale, locked, cleared of refused runs."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pipelines.plan
import pipelines.stage
from draftkit.artifacts import LOCK, locked, read_json, write_json
from draftkit.config import Config, HardwareConfig, flatten
from pipelines.benchmarks import decoder, drift, training
from pipelines.command import launch
from pipelines.experiments import loop_vllm
from pipelines.product import Stage, plan
from pipelines.stage import StageFolder, ensure
from tests.toy import CHECKPOINT, Toy, metrics, raising_at, result, stage, with_steps

RECORDS = [LOCK, "config.yaml", "manifest.json", "metrics.jsonl", "summary.json"]


@pytest.fixture(autouse=True)
def _quick_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines.stage, "provenance", lambda: {"git_commit": None})
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(root=str(tmp_path / "outputs"), name="toy", tracker="none")


@pytest.fixture
def toy() -> Toy:
    return Toy()


def test_a_fresh_run_leaves_records_product_and_summary(toy: Toy, config: Config) -> None:
    summary = launch(toy.down, with_steps(config, 3))
    path = Path(config.root) / "toy" / "down"
    assert path == plan(toy.down, with_steps(config, 3)).folder
    assert sorted(child.name for child in path.iterdir()) == sorted([*RECORDS, "model"])
    assert summary == read_json(path / "summary.json") == {"weight": 4.25, "seconds": 1.0}
    manifest = read_json(path / "manifest.json")
    assert manifest["settings"]["optim.max_steps"] == 3
    assert manifest["settings"]["seed"] == 0
    assert set(manifest["inputs"]) == {"up"}
    assert manifest["provenance"] == {"git_commit": None}
    assert "max_steps: 3" in (path / "config.yaml").read_text()
    assert [line["step"] for line in metrics(path)] == [1, 2, 3]


def test_what_a_stage_does_not_declare_does_not_count(toy: Toy, config: Config) -> None:
    launch(toy.down, config)
    launch(
        toy.down,
        replace(
            config,
            hardware=HardwareConfig(device="cpu", threads=1),
            tracker="disabled",
            runs=["elsewhere"],
            sampling=replace(config.sampling, top_k=5),
        ),
    )
    assert toy.runs == ["up", "down"]


STAGES = [one for one in vars(pipelines.plan).values() if isinstance(one, Stage)]
STAGES += [script.STAGE for script in (decoder, drift, training, loop_vllm)]
NEVER_COUNT = {"name", "root", "job", "overwrite", "plan", "limit", "runs", "hardware", "tracker"}


def test_a_stage_reads_settings_that_are_there_and_none_that_never_counts() -> None:
    known = flatten(Config())
    for section in (section for one in STAGES for section in one.reads):
        assert section.split(".")[0] not in NEVER_COUNT, section
        assert any(f"{key}.".startswith(f"{section}.") for key in known), section


def test_another_configuration_is_refused_with_key_values_and_both_ways_out(
    toy: Toy, config: Config
) -> None:
    launch(toy.down, config)
    before = result(plan(toy.down, config).folder)
    with pytest.raises(ValueError, match="was made with other settings") as error:
        launch(toy.down, replace(with_steps(config, 7), seed=5))
    text = str(error.value)
    for part in ("seed was 0, now 5", "optim.max_steps was 100, now 7", "name=", "overwrite=true"):
        assert part in text
    assert "\n" not in text
    assert result(plan(toy.down, config).folder) == before
    with pytest.raises(ValueError, match="seed was 0, now 5"):
        ensure(toy.down, replace(config, seed=5))


def test_overwrite_redoes_the_launched_stage_and_no_other(
    toy: Toy, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(toy.down, config)
    (plan(toy.down, config).folder / "model" / "stray").write_text("old")
    launch(toy.down, replace(with_steps(config, 2), overwrite=True))
    assert toy.runs == ["up", "down", "down"]
    assert "overwrite=true" in capsys.readouterr().out
    path = plan(toy.down, config).folder
    assert read_json(path / "summary.json")["weight"] == 2.5
    assert not (path / "model" / "stray").exists()
    assert len(metrics(path)) == 2


def test_a_part_of_a_command_is_redone_by_its_own_name_too(config: Config) -> None:
    runs: list[str] = []
    part = stage("part", lambda c, folder: runs.append("part") or {}, command="whole")
    whole = stage("whole", lambda c, folder: {}, inputs=(part,))
    for again in (whole, part, whole):
        launch(again, replace(config, overwrite=bool(runs)))
    assert runs == ["part"] * 3


def test_a_changed_input_makes_the_stage_stale_and_it_says_so(
    toy: Toy, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(toy.down, config)
    toy.content = "other text"
    launch(toy.up, replace(config, overwrite=True))
    capsys.readouterr()
    launch(toy.down, config)
    assert toy.runs == ["up", "down", "up", "down"]
    assert "stale, redoing it (changed: up)" in capsys.readouterr().out


def test_a_redone_but_equal_input_keeps_what_was_made_of_it(toy: Toy, config: Config) -> None:
    launch(toy.down, config)
    launch(toy.up, replace(config, overwrite=True))
    launch(toy.down, config)
    assert toy.runs == ["up", "down", "up"]


def test_a_complete_stage_is_used_in_silence(
    toy: Toy, config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(toy.down, config)
    capsys.readouterr()
    assert ensure(toy.up, config) == plan(toy.up, config).folder
    assert capsys.readouterr().out == ""


def test_experiments_share_a_shared_stage(toy: Toy, config: Config) -> None:
    launch(toy.down, config)
    launch(toy.down, replace(config, name="other", seed=3))
    assert toy.runs == ["up", "down", "down"]
    longer = replace(config, name="third", data=replace(config.data, max_length=99))
    launch(toy.down, longer)
    assert toy.runs[3:] == ["up", "down"]
    folders = list((Path(config.root) / "shared" / "up").iterdir())
    assert len(folders) == 2
    assert {len(folder.name) for folder in folders} == {16}


def test_a_second_launch_is_refused_wherever_the_first_one_is(config: Config) -> None:
    """Also in a step before the last one that the command makes."""
    before = stage("before", lambda c, folder: {}, reads=("seed",), command="after")
    after = stage("after", lambda c, folder: {}, inputs=(before,))
    with (
        locked(plan(before, config).folder),
        pytest.raises(ValueError, match=r"in use by another run: wait.*, or use name="),
    ):
        launch(after, config)
    launch(after, config)


def test_a_needed_stage_that_another_run_is_making_is_waited_for(toy: Toy, config: Config) -> None:
    path = plan(toy.up, config).folder
    with locked(path):
        waiting = threading.Thread(target=ensure, args=(toy.up, config))
        waiting.start()
        other = Toy()
        elsewhere = replace(config, root=config.root + "-other")
        launch(other.up, elsewhere)
        made = plan(other.up, elsewhere).folder
        shutil.copytree(made, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns(LOCK))
    waiting.join(timeout=60)
    assert not waiting.is_alive()
    assert toy.runs == []


def test_a_refused_run_leaves_no_folder_and_a_checkpoint_is_never_thrown_away(
    toy: Toy, config: Config
) -> None:
    refusal = ValueError("data.path: no such file")
    toy.trouble = raising_at(1, refusal)
    with pytest.raises(ValueError, match=r"data\.path"):
        launch(toy.down, config)
    assert not (Path(config.root) / "toy").exists()
    toy.trouble = raising_at(5, refusal)
    with pytest.raises(ValueError, match=r"data\.path"):
        launch(toy.down, config)
    assert read_json(plan(toy.down, config).folder / CHECKPOINT / "step") == 4


def test_a_killed_removal_of_a_refused_run_does_not_stand_in_the_way(
    toy: Toy, config: Config
) -> None:
    path = plan(toy.down, config).folder
    left = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    for folder in (path, left):
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("name: toy\n")
    launch(toy.down, config)
    assert not left.exists()


FOREIGN: dict[str, Any] = {
    "thesis.txt": "years of work",
    ".git": "a repository",
    "manifest.json of an app": {"name": "my app", "icons": []},
    "manifest.json of another stage": {"stage": "up", "settings": {"seed": 0}, "inputs": {}},
    "manifest.json of settings alone": {"settings": {"seed": 0}, "inputs": {}},
    "manifest.json being cleared by another stage": {"stage": "up", "cleared": True},
    "manifest.json of a list": ["down"],
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_somebody_else_are_not_touched(
    toy: Toy, config: Config, name: str, overwrite: bool
) -> None:
    path = plan(toy.down, config).folder
    file = path / name.split()[0]
    write_json(path / file, FOREIGN[name])
    write_json(path / "zoo" / "code.json", "precious")
    with pytest.raises(ValueError, match=rf"\({file.name}, \.\.\.\): move them away, or use name="):
        launch(toy.down, replace(config, overwrite=overwrite))
    assert read_json(file) == FOREIGN[name]
    assert read_json(path / "zoo" / "code.json") == "precious"
    assert "down" not in toy.runs


def test_results_do_not_depend_on_whether_an_input_had_to_be_made(config: Config) -> None:
    drawn: list[float] = []

    def up_run(config: Config, folder: StageFolder) -> dict[str, Any]:
        torch.rand(7)
        return {}

    def down_run(config: Config, folder: StageFolder) -> dict[str, Any]:
        drawn.append(torch.rand(()).item())
        return {}

    up = stage("up", up_run, reads=("seed",))
    down = stage("down", down_run, reads=("seed",), inputs=(up,))
    state = torch.get_rng_state()
    launch(down, config)
    launch(down, replace(config, overwrite=True))
    assert drawn[0] == drawn[1]
    assert torch.equal(state, torch.get_rng_state())
    launch(down, replace(config, name="other", seed=1))
    assert drawn[2] != drawn[0]


def test_what_is_shown_follows_every_launch_and_no_ensure(config: Config) -> None:
    told: list[Path] = []

    def show(config: Config, path: Path) -> None:
        assert (path / "summary.json").is_file()
        told.append(path)

    toy = stage("toy", lambda config, folder: {}, reads=("seed",))
    toy.code.show = show
    path = ensure(toy, config)
    assert told == []
    launch(toy, config)
    launch(toy, replace(config, overwrite=True))
    assert told == [path, path]


def test_another_rank_computes_and_writes_nothing(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(pipelines.stage, "agree", lambda value: value)
    ran: list[str] = []

    def run(config: Config, folder: StageFolder) -> dict[str, Any]:
        ran.append(folder.stage)
        folder.note("silent")
        folder.tracker.log("train", 1, {"loss": 1.0})
        return {"loss": 1.0}

    launch(stage("toy", run, reads=("seed",), everywhere=True), config)
    assert ran == ["toy"]
    assert not Path(config.root).exists()
    assert capsys.readouterr().out == ""


def test_a_plan_says_how_many_processes_train(
    toy: Toy,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A launcher that was asked for two may have started one."""
    for count, text in (("1", "1 process\n"), ("2", "2 processes\n")):
        monkeypatch.setenv("WORLD_SIZE", count)
        launch(toy.down, replace(config, plan=True))
        assert f"down: 2 steps, training in {text}" in capsys.readouterr().out


def test_what_more_processes_began_no_other_number_goes_on_with(
    toy: Toy, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines.stage, "agree", lambda value: value)
    monkeypatch.setenv("WORLD_SIZE", "8")
    toy.trouble = raising_at(7, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        launch(toy.down, config)
    toy.trouble = lambda step: None
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=r"begun with 8 processes.* has 1.*overwrite=true"):
        launch(toy.down, config)
    assert toy.runs == ["up", "down"]
    launch(toy.down, replace(config, overwrite=True))
    assert toy.runs == ["up", "down", "down"]


def test_what_more_processes_made_is_complete_for_fewer(
    toy: Toy, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines.stage, "agree", lambda value: value)
    monkeypatch.setenv("WORLD_SIZE", "8")
    summary = launch(toy.down, config)
    monkeypatch.setenv("WORLD_SIZE", "1")
    launch(stage("reading", lambda config, folder: {}, inputs=(toy.down,)), config)
    assert launch(toy.down, config) == summary
    assert toy.runs == ["up", "down"]


def test_what_another_version_of_a_stage_made_is_not_used(config: Config) -> None:
    """A shared product lies elsewhere; the folder of an experiment is refused."""

    def made(version: int, *, shared: bool) -> Stage:
        return stage(
            "made", lambda config, folder: {}, reads=("seed",), shared=shared, version=version
        )

    first, second = (plan(made(version, shared=True), config).folder for version in (1, 2))
    assert first != second
    launch(made(1, shared=False), config)
    with pytest.raises(ValueError, match=r"version of the stage was 1, now 2.*overwrite=true"):
        launch(made(2, shared=False), config)


def test_a_model_that_was_edited_in_place_is_another_one(config: Config) -> None:
    def write(config: Config, folder: StageFolder) -> dict[str, Any]:
        (folder.path / "model").mkdir()
        write_json(folder.path / "model" / "config.json", {"hidden_size": 1})
        return {}

    made = stage("made", write, product="model")
    judged = stage(
        "judged", lambda config, folder: {"digest": folder.digests["made"]}, inputs=(made,)
    )
    before = launch(judged, config)["digest"]
    (plan(made, config).folder / "model" / "notes.txt").write_text("fine")
    assert launch(judged, config)["digest"] == before
    write_json(plan(made, config).folder / "model" / "config.json", {"hidden_size": 2})
    assert launch(judged, config)["digest"] != before
