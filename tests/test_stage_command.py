"""A stage as a command: one clear line and exit code 2 for bad input, sweeps, ranks, Hydra."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import pipelines.stage
from draftkit.artifacts import read_json
from draftkit.config import Config
from pipelines.command import launch, main
from tests.toy import CHECKPOINT, Toy, metrics, raising_at, stage

ROOT = Path(__file__).resolve().parents[1]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def command(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """`python -m pipelines.down <arguments>` in `tmp_path`: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(pipelines.stage, "provenance", lambda: {"git_commit": None})

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["down", "tracker=none", *arguments])
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
        code = 0
        try:
            main(toy.down)
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return run


def one_line(text: str) -> str:
    """The only non-empty line."""
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    return lines[0]


def test_a_command_composes_runs_and_then_has_nothing_to_do(command: Command, toy: Toy) -> None:
    code, out, err = command("+experiment=smoke", "optim.max_steps=3")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert [line[:3] for line in lines[:3]] == [
        ["down:", "2", "steps,"],
        ["up", "to", "do"],
        ["down", "to", "do"],
    ]
    assert lines[3:] == [["up:", "running"], ["down:", "running"]]
    path = Path("outputs/smoke/down")
    assert read_json(path / "summary.json")["weight"] == 4.25
    stored = yaml.safe_load((path / "config.yaml").read_text())
    assert stored["optim"]["max_steps"] == 3
    assert stored["data"]["max_length"] == 48
    code, out, err = command("+experiment=smoke", "optim.max_steps=3")
    assert (code, err) == (0, "")
    assert "nothing to do" in one_line(out)
    assert toy.runs == ["up", "down"]
    assert sorted(child.name for child in Path("outputs").iterdir()) == [
        ".hydra",
        "shared",
        "smoke",
    ]
    assert Path("outputs/.hydra/down/overrides.yaml").is_file()
    assert [child.name for child in Path().iterdir()] == ["outputs"]


@pytest.mark.parametrize("sweep", [(), ("-m",), ("seed=1,2", "-m")])
def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_written(
    command: Command, toy: Toy, sweep: tuple[str, ...]
) -> None:
    """Hydra writes records of its own before a setting is looked at."""
    other = Path("outputs/other/down")
    other.mkdir(parents=True)
    (other / "config.yaml").write_text("precious: true\n")
    code, out, err = command("name=../other", *sweep)
    assert (code, out) == (2, "")
    assert "name must be a plain folder name" in one_line(err)
    files = sorted(path for path in Path().rglob("*") if path.is_file())
    assert [path for path in files if ".hydra" not in path.parts] == [other / "config.yaml"]
    assert (other / "config.yaml").read_text() == "precious: true\n"
    assert [child.name for child in Path().iterdir()] == ["outputs"]
    assert sorted(child.name for child in Path("outputs").iterdir()) == [".hydra", "other"]
    assert toy.runs == []


def test_a_full_disk_is_one_line_and_the_same_command_goes_on_later(
    command: Command, toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fill(step: int) -> None:
        if step == 5:

            def full(descriptor: int) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            monkeypatch.setattr(os, "fsync", full)

    toy.trouble = fill
    code, _, err = command("optim.max_steps=9")
    monkeypatch.setattr(os, "fsync", real)
    assert code == 2
    assert one_line(err).startswith("down: no space left on the device of ")
    path = Path("outputs/default/down")
    assert read_json(path / CHECKPOINT / "step") == 4
    assert not list(path.glob(".*.tmp-*"))
    toy.trouble = lambda step: None
    assert command("optim.max_steps=9")[0] == 0
    assert toy.runs == ["up", "down", "resumed down"]
    assert len(read_json(path / "manifest.json")["resumed"]) == 1


def test_an_error_of_the_stage_is_the_users_a_bug_keeps_its_traceback(
    command: Command, toy: Toy
) -> None:
    toy.trouble = raising_at(0, ValueError("data.path: rows.jsonl\nis not a file"))
    code, _, err = command()
    assert (code, err) == (2, "down: data.path: rows.jsonl is not a file\n")
    toy.trouble = raising_at(0, KeyError("weights"))
    code, _, err = command()
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("KeyError: 'weights'\n")
    toy.trouble = raising_at(0, KeyboardInterrupt())
    code, _, err = command()
    assert code == 130
    assert "interrupted" in one_line(err)


def test_who_asks_for_whole_errors_gets_them(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["down", "decode.gamma=-1"])
    with pytest.raises(ValueError, match=r"decode\.gamma must"):
        main(toy.down)


@pytest.mark.parametrize("flag_first", [True, False])
def test_a_sweep_has_a_folder_a_seed_and_a_tracker_for_each_job(
    command: Command, toy: Toy, flag_first: bool
) -> None:
    words = ["optim.max_steps=2,3", "seed=7", "divergence=jsd", "optim.learning_rate=1e-3"]
    code, out, err = command(*(["-m", *words] if flag_first else [*words, "-m"]))
    assert (code, err) == (0, "")
    root = Path("outputs/default")
    assert sorted(child.name for child in root.iterdir()) == [
        "optim.max_steps=2",
        "optim.max_steps=3",
    ]
    for steps in (2, 3):
        path = root / f"optim.max_steps={steps}" / "down"
        assert len(metrics(path)) == steps
        assert read_json(path / "manifest.json")["seed"] == 7
        assert f"sweep job optim.max_steps={steps}" in out
    assert toy.runs == ["up", "down", "down"]


def test_a_sweep_over_experiments_needs_no_folder_of_its_own(command: Command) -> None:
    code, _, err = command("+experiment=smoke,quickstart", "-m")
    assert (code, err) == (0, "")
    assert Path("outputs/smoke/down/summary.json").is_file()
    assert Path("outputs/quickstart/down/summary.json").is_file()


def test_a_bad_job_ends_a_sweep_with_one_line(command: Command) -> None:
    code, _, err = command("decode.gamma=-1,2", "-m")
    assert code == 2
    assert "decode.gamma must" in one_line(err)


def test_the_stage_sets_threads_and_seed(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seen.append(seed))

    config = Config(root=str(tmp_path), seed=5, tracker="none")
    config.hardware.threads = 3
    launch(stage("toy", lambda config, folder: {}, reads=("seed",)), config)
    assert seen == [3, 5]


SCRIPT = """
import os
from pathlib import Path
from pipelines.command import main
from tests.toy import Toy
if __name__ == "__main__":
    toy = Toy()
    toy.trouble = lambda step: Path(f"rank-{os.environ.get('RANK', 'alone')}").touch()
    main(toy.down)
"""


def test_help_shows_how_the_command_is_used(command: Command, toy: Toy) -> None:
    code, out, _ = command("--help")
    assert code == 0
    usage, groups = ("draftkit down +experiment=NAME", "-m"), ("quickstart", "forward_kl")
    for part in (*usage, *groups, "draftkit settings"):
        assert part in out
    assert toy.runs == []


def test_experiments_of_ones_own_are_added_by_their_folder(
    command: Command, tmp_path: Path
) -> None:
    """The one of docs/extending.md, and what may be wrong with it."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    example = page.partition("```yaml\n")[2].partition("```")[0]
    for group in ("experiment", "optim"):
        (tmp_path / "own" / group).mkdir(parents=True)
    own = tmp_path / "own" / "experiment" / "stories.yaml"
    own.write_text(example)
    (tmp_path / "own" / "optim" / "long.yaml").write_text("learning_rate: 0.25\n")
    words = ["optim=long", "--config-dir", "own", "+experiment=stories", "optim.max_steps=3"]
    assert command(*words, "sampling.from=config")[0] == 0  # as there is no target to ask
    stored = yaml.safe_load(Path("outputs/stories/down/config.yaml").read_text())
    assert stored["optim"]["learning_rate"] == 0.25
    assert (stored["source"]["name"], stored["draft"]["path"]) == ("draft", "models/small")

    def refused(*words: str) -> str:
        code, _, err = command(*words)
        assert code == 2
        return one_line(err)

    assert "Could not find 'experiment/story': did you mean stories? Available options" in refused(
        "--config-dir=own", "+experiment=story"
    )
    assert refused("--config-dir", "owm", "+experiment=stories") == (
        f"down: Additional config directory '{tmp_path / 'owm'}' not found"
    )
    own.write_text(example + "decode: {gama: 3}\n")
    assert refused(*words) == (
        "down: experiment/stories.yaml: there is no setting decode.gama: did you mean decode.gamma?"
    )


def test_a_distributed_launch_runs_all_ranks_and_the_first_one_writes(tmp_path: Path) -> None:
    """The launcher behind `accelerate launch --multi_gpu`, here on the CPU."""
    (tmp_path / "toy_command.py").write_text(SCRIPT)
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command = ["-m", "toy_command", "optim.max_steps=3", "tracker=none"]
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]
    assert done.stdout.count("down: running\n") == done.stdout.count("up: running\n") == 1
    path = tmp_path / "outputs/default/down"
    assert [line["step"] for line in metrics(path)] == [1, 2, 3]
    assert read_json(path / "summary.json")["weight"] == 4.25
