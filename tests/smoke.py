"""The smallest experiment, and what two runs of it have in common."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draftkit.config import Config, TargetConfig
from draftkit.data.splits import Splits, read_splits
from draftkit.tracking import read_metrics
from pipelines.configuration import compose_config
from pipelines.plan import TEXTS
from pipelines.stage import ensure
from tests.services import pair_of
from tests.trained import trained_target

TIMES = ("time", "seconds", "tokens_per_second")
TEXT = "The quick brown fox {0} jumps over {1} lazy dogs, and {2} cats look on in wonder."


@cache
def _composed(*words: str) -> Config:
    return compose_config(words)


def composed(*words: str) -> Config:
    """What `compose_config` gives; all but the root of the outputs is composed once."""
    roots = [word for word in words if word.startswith("root=")]
    config = _composed(*(word for word in words if word not in roots))
    return replace(deepcopy(config), root=roots[-1].removeprefix("root="))


def smoke(root: Path, *overrides: str) -> Config:
    """The smallest experiment, in `root`, nothing compiled, for a target that is smaller too."""
    given = ["+experiment=smoke", f"root={root}", "tracker=none", "decode.compile=false"]
    if not any(one.startswith("target.path=") for one in overrides):
        text = [one for one in overrides if one.startswith(("data", "hardware."))]
        given += ["target=local", f"target.path={trained_target(*text)}"]
    return composed(*given, *overrides)


def models(config: Config) -> tuple[TargetConfig, TargetConfig]:
    """Target and starting draft of `config`, made first where they are missing."""
    made = pair_of(config)
    return made.model(config, "target"), made.model(config, "draft")


def splits_of(config: Config) -> Splits:
    """The text of `config`, read first where it has not been."""
    return read_splits(ensure(TEXTS, config))


def numbers(path: Path) -> list[dict[str, Any]]:
    """What a metrics file says, times excluded."""
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_metrics(path / "metrics.jsonl")
    ]


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def same_weights(*, first: Path, second: Path) -> bool:
    a, b = weights(first), weights(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def paths_of(config: Config) -> tuple[Path, Path]:
    """Folders of target and starting draft of `config`, made first where they are missing."""
    target, draft = models(config)
    return Path(str(target.path)), Path(str(draft.path))
