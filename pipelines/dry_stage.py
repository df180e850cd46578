"""The process in which the dry run takes one stage: its own function, on few rows and in few steps.

It runs twice. First on rows in the stage's own order, for time: what the stage records (steps in
`metrics.jsonl`, chunks in `timing.json`, the marks of its folder) times the real counts, on a clock
that stands still while code compiles. Then on the longest rows, with answers as long as they get,
for the peak of memory.
"""

import contextlib
import gc
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from draftkit.artifacts import provenance, read_json, write_json
from draftkit.config import Config
from draftkit.data.rollouts import read_records
from draftkit.data.splits import read_splits
from draftkit.decoding.graphs import compile_seconds
from draftkit.distillation.pretrain import compiles
from draftkit.evaluation.walltime import FIRST_LOOK
from draftkit.models.devices import resolve_device
from draftkit.models.memory import keep_freed_memory, peak_bytes, reset_peak
from draftkit.tracking import FILE_NAME, Tracker, read_metrics

from .product import MANIFEST, SUMMARY
from .stage import StageFolder

OWN, LONGEST = "own", "longest"  # orders of rows
READS_LONGEST = ("generate", "contexts", "scores", "train", "evaluate")
FEWEST = 32  # prompts: as many are checked for losslessness
TIMING = "timing.json"  # of `evaluate`
WEIGHTS_OF_STATE = 1 / 3  # of a checkpoint's bytes
# Bytes that training on a CPU takes beyond its first steps: freed memory that stays, and answers
# that are read (0.45 to 0.56 GB in four runs of the embedded pair).
GAPS = {"prepare": 1 << 28, "train": 1 << 29}


@dataclass(frozen=True)
class Run:
    """A stage that has run on few rows.

    config: the settings of the whole stage. folder: what the run was given, has marked and has
    left. started: seconds since 1970. seconds, compiling: of the run without what went into
    compiling, and that.
    """

    config: Config
    folder: StageFolder
    started: float
    seconds: float
    compiling: float

    def until(self, words: str) -> float:
        """Seconds from the start to the first mark that has `words`, without compiling."""
        start = self.folder.marks[0][1]
        return next(at - start for mark, at in self.folder.marks if words in mark)

    def times(self, section: str) -> list[float]:
        """Seconds from the start to each line of that section of the metrics."""
        lines = read_metrics(self.folder.path / FILE_NAME)
        return [line["time"] - self.started for line in lines if line["section"] == section]


def steps_of(name: str, config: Config) -> int:
    """Of the training in a stage."""
    if name == "prepare":
        cut = config.draft.shrink
        return cut.steps if cut.layers or config.draft.is_head else config.draft.pretrain.max_steps
    return config.optim.max_steps


def shortened(name: str, config: Config, limit: int, order: str) -> Config:
    """The configuration with few steps and rows; batches are as large as ever."""
    options, optim, source = config.evaluate, config.optim, config.source
    # Whole periods of what is sampled, a save, and one step more.
    period = source.refresh_steps if source.name not in ("fixed", "target") else 1
    steps, logged, chunks = 1 + period * ceil((2 * limit + 1) / period), 1, 2 * limit
    turns, gamma, code = options.calibration_turns, config.decode.gamma, config.decode.compile
    if order == LONGEST:
        # Compiling took its memory in the stage's own order; rows take theirs without it.
        gamma, code = config.proposals, "captured" if config.decode.compiles else code
        # Freed memory gathers over steps, in the gaps between tensors of ever other sizes.
        logged = optim.logging_steps
        on_cpu = resolve_device(config.hardware).type == "cpu"
        steps, chunks, turns = max(limit, 3 * logged if on_cpu else logged), 1, 1
    whole = steps_of(name, config)
    compiled = compiles(optim, whole) if name == "prepare" else optim.compiles
    few: Any = OmegaConf.structured(config)
    for key, value in {
        "draft.pretrain.max_steps": min(steps, config.draft.pretrain.max_steps),
        "draft.shrink.steps": min(steps, config.draft.shrink.steps),
        "generate.rollouts": min(config.generate.rollouts, config.generate.batch_size),
        "generate.url": None,
        "optim.max_steps": steps,
        "optim.eval_steps": steps,
        "optim.save_steps": max(1, steps - 1),
        "optim.logging_steps": logged,
        "optim.compile": str(compiled).lower(),
        "evaluate.prompts": min(options.prompts, max(FEWEST, options.batch_size)),
        "evaluate.validation_prompts": min(options.validation_prompts, options.batch_size),
        "evaluate.timing_prompts": min(options.timing_prompts, chunks * options.timing_batch_size),
        "evaluate.temperatures": (options.temperatures or [config.sampling.temperature])[:1],
        "evaluate.calibration_turns": turns,
        "decode.gamma": gamma,
        "decode.compile": code,
        "export.push_to_hub": None,
    }.items():
        OmegaConf.update(few, key, value)
    made: Any = OmegaConf.to_object(few)
    return made


def run(config: Config, few: Config, folder: StageFolder) -> Run:
    """Run the stage of `folder` under `few`; what it leaves is what later stages read."""
    torch.manual_seed(config.seed)
    started, compiled = time.time(), compile_seconds()
    stage = getattr(import_module(f".{folder.stage}", __package__), folder.stage)
    folder.mark("begun")
    with Path(os.devnull).open("w") as silent, contextlib.redirect_stdout(silent):
        summary = dict(stage(few, folder))
    folder.mark("ended")
    folder.tracker.finish(0)
    write_json(folder.path / MANIFEST, {"provenance": provenance()})
    (_, first), (_, last) = folder.marks[0], folder.marks[-1]
    write_json(folder.path / SUMMARY, summary | {"seconds": last - first})
    return Run(config, folder, started, last - first, compile_seconds() - compiled)


# What a whole stage takes, from one run of few steps and rows


def pretraining_seconds(run: Run) -> float:
    """Of `prepare`: loading and saving, and what a step takes times their number."""
    lines = run.times("prepare_draft")
    if len(lines) < 4:
        return run.seconds
    a_step = (lines[-1] - lines[1]) / (len(lines) - 2)
    return run.seconds + a_step * (steps_of(run.folder.stage, run.config) - len(lines))


def answering_seconds(run: Run) -> float:
    """Of `generate`, `contexts` and `scores`: loading, and what rows take times their number."""
    done = sum(len(read_records(path)) for path in run.folder.path.glob("*.parquet"))
    options, rows = run.config.evaluate, run.config.generate.rollouts
    if run.folder.stage != "generate":
        counts = read_splits(run.folder.inputs["texts"]).counts  # of all texts, also of a few
        if run.folder.stage == "contexts":
            rows = min(options.prompts, counts["test"])
        elif run.config.source.name != "target":
            rows = counts["train"]
        rows += min(options.validation_prompts, counts["validation"])
    loaded = run.until("loaded")
    return loaded + (run.seconds - loaded) * max(1.0, rows / done) + run.compiling


def training_seconds(run: Run) -> float:
    """Loading and the first step; steps, validations and checkpoints."""
    optim, steps = run.config.optim, run.times("train")
    _, last = run.times("validation")
    answers = run.folder.inputs["scores" if "scores" in run.folder.inputs else "contexts"]
    rows = len(read_records(answers / "validation.parquet"))
    share = max(1.0, run.config.evaluate.validation_prompts / rows)
    a_step, validation = (steps[-2] - steps[0]) / (len(steps) - 2), last - steps[-1]
    save = max(0.0, steps[-1] - steps[-2] - a_step)
    checks, saves = ceil(optim.max_steps / optim.eval_steps), optim.max_steps / optim.save_steps
    whole = run.seconds + run.compiling + a_step * (optim.max_steps - len(steps))
    whole += validation * (share * (checks + 1) - 2)  # of few rows there were two
    return whole + save * (saves + checks * WEIGHTS_OF_STATE - 1)


def judging_seconds(run: Run) -> float:
    """The identity check; scoring, compiling and timed decoding, each times its own count."""
    options = run.config.evaluate
    records = read_records(run.folder.inputs["contexts"] / "test.parquet")
    lossless = run.until("alpha on") - run.until("loaded")
    chosen = "choosing the number" if run.config.decode.gamma == "auto" else "proposals a round"
    scored = run.until(chosen) - run.until("alpha on")
    scored *= max(1.0, options.prompts / len(records))
    timed = run.until("timed") - run.until(chosen)
    chunks: Mapping[str, Any] = next(iter(read_json(run.folder.path / TIMING).values()))
    ways = [one for name, one in chunks.items() if "," not in name]
    decoded = sum(sum(one["seconds"]) + sum(one["prefill_seconds"]) for one in ways)
    tokens, count = sum(ways[0]["tokens"]), len(ways[0]["tokens"])
    size = options.timing_batch_size
    mean = size * sum(len(record.output_ids) for record in records) / len(records)
    real = ceil(min(options.timing_prompts, FIRST_LOOK) / size)
    timed += decoded / tokens * mean * max(0, real - count)
    rest = run.until("loaded") + run.seconds - run.until("timed")
    each = scored + timed + run.compiling  # of a temperature: its code is its own
    return rest + lossless + each * len(options.temperatures or [0])


SECONDS = dict.fromkeys(("prepare",), pretraining_seconds)
SECONDS |= dict.fromkeys(("generate", "contexts", "scores"), answering_seconds)
SECONDS |= {"train": training_seconds, "evaluate": judging_seconds}


def run_dry(
    name: str,
    config: Config,
    limit: int,
    folder: Path,
    inputs: Mapping[str, Mapping[str, Path]],
    digests: Mapping[str, str],
) -> dict[str, float]:
    """Seconds of the whole stage, and the peak of memory in bytes.

    folder: of what is made, one of each order. inputs: where they lie, by order and name.
    """
    device = resolve_device(config.hardware)
    if config.hardware.threads is not None:
        torch.set_num_threads(config.hardware.threads)
    keep_freed_memory()
    reset_peak(device)

    def in_order(order: str) -> Run:
        given = {"stage": name, "inputs": inputs[order], "digests": digests}
        few = shortened(name, config, limit, order)
        return run(config, few, StageFolder(folder / order, Tracker(folder / order), **given))

    whole = in_order(OWN)
    seconds = SECONDS.get(name, lambda run: run.seconds)(whole)
    gc.collect()
    if name in READS_LONGEST:
        in_order(LONGEST)
    peak = peak_bytes(device)
    if name in GAPS and device.type == "cpu":
        peak += GAPS[name]
    return {"seconds": seconds, "peak": peak}
