"""A fitting on a tiny pair: no command, no stage folder."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from draftkit.config import (
    Config,
    DraftConfig,
    EvaluateConfig,
    HardwareConfig,
    OptimConfig,
    SourceConfig,
    TargetConfig,
)
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.distillation.assembly import load_learner
from draftkit.distillation.fit import Fitted, fit
from draftkit.distillation.samplers import target_sampler
from draftkit.distillation.sources import TrainingTexts
from draftkit.models.loading import load_target
from draftkit.tracking import Tracker
from tests import tiny

OPTIM = OptimConfig(
    learning_rate=3e-4,
    max_steps=8,
    per_device_train_batch_size=4,
    warmup_steps=2,
    eval_steps=4,
    save_steps=4,
    logging_steps=1,
    compile="false",
)
CONFIG = Config(
    name="tiny",
    source=SourceConfig(name="target"),
    optim=OPTIM,
    evaluate=EvaluateConfig(),
    hardware=HardwareConfig(device="cpu", dtype="float32"),
)


def config_of(**optim: Any) -> Config:
    """`CONFIG` with other settings of `optim`."""
    return replace(CONFIG, optim=replace(OPTIM, **optim))


@cache
def _known(pair: Path) -> Any:
    target = load_target(TargetConfig(path=str(pair / "target")), CONFIG.hardware)
    sampler = target_sampler(target, CONFIG.sampling, Room(12, 128), seed=0, batch_size=32)
    prompts = tiny.prompts([4, 6, 5] * 10)
    records = sampler.sample(prompts, rows=range(len(prompts)), version="")
    examples = [Example(prompt, [False] * len(prompt), "", "") for prompt in prompts]
    return target, examples, records


def fitted(pair: Path, folder: Path, config: Config = CONFIG, **changes: Any) -> Fitted:
    """The drafter that `config` asks for on the pair below `pair`, made in `folder`."""
    target, examples, records = _known(pair)
    target = changes.pop("target", target)
    folder.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {
        "draft": load_learner(DraftConfig(path=str(pair / "draft")), target),
        "texts": TrainingTexts(examples[:20], Room(1018, 1024), records[:20]),
        "validation": records[20:],
        "tracker": Tracker(folder),
        "note": lambda line: None,
    }
    return fit(config, target=target, folder=folder, **given | changes)
