"""The process in which `check` probes steps, one after the other as a command runs them.

It writes a line for each, so that what was measured stays where a later step takes too much.
"""

import gc
import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from draftkit.artifacts import first_line
from draftkit.checking.probes import PROBES, Probe
from draftkit.config import Config, ModelConfig
from draftkit.data.prompts import read_splits
from draftkit.data.rollouts import read_parts
from draftkit.models.devices import resolve_device
from draftkit.models.memory import (
    KEPT_BYTES,
    free_bytes,
    give_back_freed_memory,
    keep_freed_memory,
    peak_bytes,
    reset_peak,
)

from .check import RESULTS, goal_of
from .configuration import read_config
from .folder import CONFIG
from .plan import Step, ordered
from .texts import answer_tokens, tokenizer_of

# How the allocators of CPU and CUDA say that there is no more.
NO_MEMORY = re.compile(r"allocate memory|out of memory|not enough memory|bad_alloc", re.IGNORECASE)
TRAINING = ("target", "prepare", "train")  # whose many steps leave freed memory between them
MADE_BY = {"target": "target", "draft": "prepare"}


def probe_of(config: Config, folder: Path) -> Probe:
    """The experiment of `config`, with what is given or made of it already."""
    steps = {step.name: step for step in ordered([goal_of(config)])}
    texts, rollouts = Path(steps["texts"].path), steps.get("generate")
    return Probe(
        config=config,
        target=known_model(config, "target", steps),
        start=known_model(config, "draft", steps),
        tokenizer=tokenizer_of(config, texts),
        splits=read_splits(texts),
        answer=answer_tokens(config),
        folder=folder,
        rollouts=read_parts(Path(rollouts.path)) if rollouts and rollouts.digest else None,
    )


def known_model(config: Config, key: str, steps: dict[str, Step]) -> ModelConfig | None:
    """The model of section `key`: as it is given, or as a step has made it; else None."""
    section: ModelConfig = getattr(config, key)
    if section.path is not None:
        return section
    step = steps.get(MADE_BY[key])
    return ModelConfig(path=step.path, dtype=section.dtype) if step and step.digest else None


def main(name: str, names: list[str]) -> None:
    """Probe the steps of those names; the configuration, and the results, are in that folder."""
    started, folder = time.process_time(), Path(name)
    config = read_config(folder / CONFIG)
    device = resolve_device(config.hardware)
    if config.hardware.threads is not None:
        torch.set_num_threads(config.hardware.threads)
    keep_freed_memory()
    reset_peak(device)
    probe = probe_of(config, folder)
    baseline, free = peak_bytes(device), free_bytes(device)
    write(folder, start=started, baseline=baseline, free=free)
    for step in names:
        reset_peak(device)
        try:
            torch.manual_seed(config.seed)
            taken = PROBES[step](probe)
        except ValueError as error:
            write(folder, step=step, refused=first_line(error))
            raise SystemExit(2) from error
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not NO_MEMORY.search(str(error)):
                raise
            write(folder, step=step, failed="it ran out of memory")
            raise SystemExit(3) from error
        peak = peak_bytes(device)
        if step in TRAINING and device.type == "cpu":
            peak += KEPT_BYTES
        write(folder, step=step, peak=peak, wall=taken.wall, processor=taken.processor)
        gc.collect()
        torch.cuda.empty_cache()
        give_back_freed_memory(0)


def write(folder: Path, **values: Any) -> None:
    """Add a line to the results."""
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
