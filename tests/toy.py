"""Two toy stages, one feeding the other, for the tests of what all stages share."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from draftkit.artifacts import atomic_path, read_json, remove, sha256_tree, write_json
from draftkit.config import Config, OptimConfig
from draftkit.distillation.ranks import is_first
from draftkit.tracking import read_metrics
from pipelines.product import Stage
from pipelines.stage import StageFolder, is_record

CHECKPOINT = "checkpoint"


def with_steps(config: Config, steps: int) -> Config:
    return replace(config, optim=OptimConfig(max_steps=steps))


def stage(name: str, run: Callable[[Config, StageFolder], Any], **options: Any) -> Stage:
    """A stage of one function, outside of any module."""
    return Stage(name=name, code=SimpleNamespace(**{name: run}), **options)


def raising_at(when: int, error: BaseException) -> Callable[[int], None]:
    """The trouble of a toy that ends in `error` at that step."""

    def trouble(step: int) -> None:
        if step == when:
            raise error

    return trouble


class Toy:
    """A shared `up` and a `down` that trains on it with checkpoints, and how often they ran."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.content = "text"
        self.trouble: Callable[[int], None] = lambda step: None
        self.up = stage("up", self._up, reads=("data.max_length",), shared=True)
        self.down = stage(
            "down", self._down, reads=("seed", "optim"), inputs=(self.up,), everywhere=True
        )

    def _up(self, config: Config, folder: StageFolder) -> dict[str, Any]:
        self.runs.append("up")
        write_json(folder.path / "data.json", self.content)
        return {"rows": 3}

    def _down(self, config: Config, folder: StageFolder) -> dict[str, Any]:
        path, state = folder.path / CHECKPOINT, {"step": 0, "weight": 0.0}
        if path.is_dir():  # of two files: half of it is worth nothing
            state = {name: read_json(path / name) for name in state}
        self.runs.append("resumed down" if state["step"] else "down")
        steps = config.optim.max_steps
        while state["step"] < steps:
            self.trouble(state["step"])
            step = state["step"] + 1
            state = {"step": step, "weight": state["weight"] / 2 + step}
            folder.tracker.log("train", step, {"weight": state["weight"]})
            if step % 2 == 0 and step < steps and is_first():
                with atomic_path(path) as temporary:
                    for name, value in state.items():
                        write_json(temporary / name, value)
        if is_first():
            with atomic_path(folder.path / "model") as temporary:
                temporary.mkdir()
                write_json(temporary / "weights.json", state["weight"])
            remove(path)
        return {"weight": state["weight"], "seconds": 1.0}


def result(path: Path) -> tuple[Any, ...]:
    """All that two equal runs share."""
    lines = [{k: v for k, v in line.items() if k != "time"} for line in metrics(path)]
    manifest = read_json(path / "manifest.json")
    made = {key: manifest[key] for key in ("settings", "inputs", "addresses", "product")}
    names = sorted(child.name for child in path.iterdir())
    content = sha256_tree(path, skip=is_record)
    return lines, read_json(path / "summary.json"), made, content, names


def metrics(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path / "metrics.jsonl")
