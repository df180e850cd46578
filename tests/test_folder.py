"""Whose folder it is: a stage clears what it has made, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pipelines.stage
from draftkit.artifacts import read_json, write_json
from draftkit.config import Config
from pipelines.command import launch
from pipelines.product import plan
from tests.toy import Toy


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(root=str(tmp_path / "outputs"), name="toy", tracker="none")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setattr(pipelines.stage, "provenance", lambda: {"git_commit": None})
    return Toy()


FOREIGN = {
    "of an app": {"name": "my app", "icons": []},
    "of another stage": {"stage": "up", "settings": {"seed": 0}, "inputs": {}},
    "of settings alone": {"settings": {"seed": 0}, "inputs": {}},
    "being cleared by another stage": {"stage": "up", "cleared": True},
    "a list": ["down"],
}


@pytest.mark.parametrize("manifest", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_the_manifest_of_somebody_else_is_not_emptied(
    toy: Toy, config: Config, manifest: Any, overwrite: bool
) -> None:
    path = plan(toy.down, config).folder
    (path / "src").mkdir(parents=True)
    write_json(path / "manifest.json", manifest)
    (path / "src" / "code.py").write_text("precious")
    with pytest.raises(ValueError, match=r"manifest\.json, \.\.\.\): move them away, or use name="):
        launch(toy.down, replace(config, overwrite=overwrite))
    assert (path / "src" / "code.py").read_text() == "precious"
    assert read_json(path / "manifest.json") == manifest
    assert "down" not in toy.runs


def test_names_with_a_dot_are_somebody_elses_too(toy: Toy, config: Config) -> None:
    path = plan(toy.down, config).folder
    (path / ".git").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"\.git, \.\.\."):
        launch(toy.down, config)
    assert (path / ".git").is_dir()


def test_a_folder_that_was_being_cleared_is_gone_on_with(toy: Toy, config: Config) -> None:
    path = plan(toy.down, config).folder
    path.mkdir(parents=True)
    write_json(path / "manifest.json", {"stage": "down", "cleared": True})
    (path / "stray").write_text("of the product before")
    launch(toy.down, config)
    assert not (path / "stray").exists()
