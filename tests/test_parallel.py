"""A parallel drafter through the commands: trained, judged, exported, served, refitted, refused."""

from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from pipelines.command import launch
from pipelines.plan import DISTILL, EVALUATE, EXPORT, TRAIN
from pipelines.stage import ensure
from tests.smoke import numbers, same_weights, smoke
from tests.test_pipelines import kill_when

pytestmark = pytest.mark.usefixtures("one_pass")
PARD = ("draft.kind=pard", "draft.pard.tokens=4")


@pytest.fixture(scope="module")
def finished(root: Path) -> Path:
    """A finished smoke experiment."""
    launch(DISTILL, smoke(root, *PARD))
    return root / "smoke"


def test_the_plain_drafter_becomes_a_parallel_one(finished: Path, root: Path) -> None:
    judged = read_json(finished / "evaluate" / "summary.json")
    config = read_json(finished / "train" / "draft" / "config.json")
    assert (judged["kind"], config["pard_k"]) == ("pard", 4)
    lines = numbers(finished / "train")
    assert [one for one in lines if one["section"] == "validation"][-1]["acceptance_length"] >= 1
    losses = [one["loss"] for one in lines if "loss" in one]
    assert losses[-1] < losses[0]
    assert judged["acceptance_length"]["mean"] > 1
    before = read_json(next(root.glob("shared/prepare/*/draft/config.json")))
    assert "pard_token" not in before


def test_what_engines_are_told_of_it(finished: Path, root: Path) -> None:
    launch(EXPORT, smoke(root, *PARD))
    folder = finished / "export"
    text = (folder / "launch.md").read_text()
    assert '"parallel_drafting": true' in text
    assert "here one by one" in text
    card = (folder / "hf" / "README.md").read_text()
    assert '"parallel_drafting": true' in card
    assert "pard_token" in read_json(folder / "hf" / "config.json")
    rows = read_json(finished / "evaluate" / "summary.json")["engines"]
    lengths = {row["engine"]: row["acceptance_length"]["mean"] for row in rows}
    assert lengths["vLLM"] != lengths["SGLang"]


@pytest.mark.parametrize("source", ["draft", "block", "mix"])
def test_every_source_trains_it(root: Path, source: str) -> None:
    config = smoke(root, *PARD, f"source={source}", f"name=by_{source}")
    lines = [line for line in numbers(ensure(TRAIN, config)) if "loss" in line]
    assert lines[-1]["step"] == config.optim.max_steps
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_a_killed_training_ends_like_an_uninterrupted_one(root: Path, finished: Path) -> None:
    config = smoke(root, *PARD, "name=killed", "optim.save_steps=3")
    folder = root / "killed" / "train"
    kill_when(lambda: (folder / "checkpoint.safetensors").exists(), TRAIN, config)
    ensure(TRAIN, config)
    whole = ensure(TRAIN, smoke(root, *PARD, "name=whole", "optim.save_steps=3"))
    assert same_weights(first=folder / "draft", second=whole / "draft")


def test_training_goes_on_from_a_parallel_drafter(root: Path, finished: Path) -> None:
    start = finished / "train" / "draft"
    given = (f"draft.path={start}", "name=on", *PARD[:1])
    folder = ensure(TRAIN, smoke(root, *given, "draft.pard.tokens=6"))
    before, after = (read_json(path / "config.json") for path in (start, folder / "draft"))
    assert after["pard_token"] == before["pard_token"]
    assert after["pard_k"] == 6


def test_a_plain_drafter_is_not_judged_as_a_parallel_one(root: Path, finished: Path) -> None:
    plain = next(root.glob("shared/prepare/*/draft"))
    given = (f"draft.path={plain}", "evaluate.draft=given", "name=plain")
    for command in (EVALUATE, EXPORT):
        with pytest.raises(
            ValueError, match=r"^draft\.path .*: a plain drafter .* draft\.kind=plain$"
        ):
            launch(command, smoke(root, *PARD, *given))


def test_more_proposals_than_it_was_trained_for_are_said(
    root: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = finished / "train" / "draft"
    given = (f"draft.path={start}", "evaluate.draft=given")
    launch(EVALUATE, smoke(root, *PARD, *given, "decode.gamma=6", "name=six"))
    assert "trained for 4 proposals a pass: the last of 6 were never" in capsys.readouterr().out
