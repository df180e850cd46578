"""The process in which the dry run takes one stage: its own function, on few rows and in few steps.

It runs twice. First on rows in the stage's own order, for time: what the stage records (steps in
`metrics.jsonl`, chunks in `timing.json`, the marks of its folder) times the real counts, on a clock
that stands still while code compiles. Then on the longest rows, with answers as long as they get,
for the peak of memory.
"""

import contextlib
import gc
import os
import re
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import cycle, islice
from math import ceil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from draftkit.artifacts import provenance, read_json, write_json
from draftkit.config import Config, OptimConfig, PretrainConfig, has_compiler
from draftkit.data.prompts import Example, read_splits
from draftkit.data.rollouts import OPTIONAL, Record, read_records, write_records
from draftkit.decoding.graphs import compile_seconds
from draftkit.distillation.fit import TRIAL_SHARE
from draftkit.distillation.pretrain import WORTH_COMPILING
from draftkit.evaluation.walltime import FIRST_LOOK, now
from draftkit.models.devices import resolve_device
from draftkit.models.memory import KEPT_BYTES, keep_freed_memory, peak_bytes, reset_peak
from draftkit.tracking import FILE_NAME, Tracker, read_metrics

from .errors import user_line
from .lengths import answer_tokens
from .plan import at_temperatures
from .product import MANIFEST, SUMMARY
from .stage import StageFolder

Pretrain = TypeVar("Pretrain", bound=PretrainConfig)

TIMING = "timing.json"  # of `evaluate`
READS_LONGEST = ("generate", "contexts", "scores", "train", "evaluate")
TRAINING = ("target", "prepare", "train")  # whose many steps leave freed memory between them
FILES = 3  # of answers whose lengths are changed
WEIGHTS_OF_STATE = 1 / 3  # of a checkpoint's bytes
# How the allocators of CPU and CUDA say that there is no more.
NO_MEMORY = re.compile(r"allocate memory|out of memory|not enough memory|bad_alloc", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """A stage to rehearse.

    folder: of its products, one of each order. texts: all that the run will read. own, longest:
    inputs in the stage's own order, and the longest ones.
    """

    name: str
    config: Config
    limit: int
    folder: Path
    texts: Path
    own: Mapping[str, Path]
    longest: Mapping[str, Path]
    digests: Mapping[str, str]


def lengthened(record: Record, prompt: Sequence[int], new: int) -> Record:
    """`record` behind `prompt`, its answer (and what is stored for its tokens) of `new` tokens."""
    names = [n for n in ("output_ids", *OPTIONAL) if getattr(record, n) is not None]
    values: Any = {name: list(islice(cycle(getattr(record, name)), new)) for name in names}
    return replace(record, prompt_ids=list(prompt), **values)


def lengthen(
    source: Path, folder: Path, examples: Mapping[str, Sequence[Example]], new: int
) -> None:
    """Leave the records of `source` in `folder` behind the prompts of `examples` by split."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.parquet"))[:FILES]:
        rows = [*examples.get(path.stem, examples["train"])]
        pairs = zip(read_records(path), cycle(rows), strict=False)
        longest = [lengthened(record, row.prompt_ids, new) for record, row in pairs]
        write_records(folder / path.name, longest)


def few_steps(config: Config, limit: int) -> int:
    """Steps of training: whole periods of what is sampled, a save, and one step more."""
    period = config.source.refresh_steps if config.source.name not in ("fixed", "target") else 1
    return 1 + period * ceil((2 * limit + 1) / period)


def shortened(job: Job, *, longest: bool) -> Config:
    """The configuration with few steps and rows; batches are as large as ever."""
    config, limit, options = job.config, job.limit, job.config.evaluate
    # Freed memory gathers over steps, in the gaps between tensors of ever other sizes.
    logged = config.optim.logging_steps if longest else 1
    steps = max(limit, logged) if longest else few_steps(config, limit)
    chunks = 1 if longest else 2 * limit
    served = config.sampling.temperature
    judged = replace(
        options,
        prompts=min(options.prompts, max(32, options.batch_size)),
        validation_prompts=min(options.validation_prompts, options.batch_size),
        lossless_prompts=min(options.lossless_prompts, options.batch_size),
        timing_prompts=min(options.timing_prompts, chunks * options.timing_batch_size),
        temperatures=(options.temperatures or [served])[:1],
        calibration_turns=1 if longest else options.calibration_turns,
    )
    compiled = config.optim.compiles
    if job.name in ("target", "prepare"):
        real = pretraining_steps(job)
        long = config.optim.compile == "auto" and real >= WORTH_COMPILING
        compiled = config.optim.compile == "true" or (long and has_compiler())
    optim: OptimConfig = replace(
        config.optim,
        max_steps=steps,
        eval_steps=steps,
        save_steps=max(1, steps - 1),
        logging_steps=logged,
        warmup_steps=min(config.optim.warmup_steps, steps),
        rate_factors=[],
        compile=str(compiled).lower(),
    )

    def fewer(pretrain: Pretrain) -> Pretrain:
        return replace(pretrain, max_steps=min(steps, pretrain.max_steps))

    shrink = replace(config.draft.shrink, steps=min(steps, config.draft.shrink.steps))
    rollouts = min(config.generate.rollouts, config.generate.batch_size)
    return replace(
        config,
        optim=optim,
        evaluate=judged,
        target=replace(config.target, pretrain=fewer(config.target.pretrain)),
        draft=replace(config.draft, pretrain=fewer(config.draft.pretrain), shrink=shrink),
        generate=replace(config.generate, rollouts=rollouts, engine="decoder"),
        export=replace(config.export, push_to_hub=None),
    )


def pretraining_steps(job: Job) -> int:
    """Of the stage that makes a model."""
    if job.name == "target":
        return job.config.target.pretrain.max_steps
    cut = job.config.draft.shrink
    return cut.steps if cut.layers else job.config.draft.pretrain.max_steps


@dataclass(frozen=True)
class Taken:
    """One run of a stage: its folder and summary, the start in seconds since 1970, and seconds
    to each mark and to its end by a clock that stands still while code compiles."""

    folder: Path
    summary: dict[str, Any]
    started: float
    marks: Mapping[str, float]
    seconds: float
    compiling: float

    def until(self, words: str) -> float:
        """Seconds to the first mark that has `words`."""
        return next(seconds for mark, seconds in self.marks.items() if words in mark)

    def times(self, section: str) -> list[float]:
        """Seconds to each line of that section of the metrics."""
        lines = read_metrics(self.folder / FILE_NAME)
        return [line["time"] - self.started for line in lines if line["section"] == section]


def take(job: Job, *, longest: bool) -> Taken:
    """Run the stage in one of the two orders."""
    folder = job.folder / ("longest" if longest else "own")
    folder.mkdir(parents=True)
    given = StageFolder(
        folder,
        Tracker(folder),
        stage=job.name,
        inputs=job.longest if longest else job.own,
        digests=job.digests,
    )
    torch.manual_seed(job.config.seed)
    started, begun, compiled = time.time(), now(), compile_seconds()
    stage = getattr(import_module(f".{job.name}", __package__), job.name)
    with Path(os.devnull).open("w") as silent, contextlib.redirect_stdout(silent):
        summary = dict(stage(shortened(job, longest=longest), given))
    given.tracker.finish(0)
    ended = now()
    write_json(folder / MANIFEST, {"provenance": provenance()})
    write_json(folder / SUMMARY, summary)
    marks = {mark: at - begun for mark, at in given.marks}
    return Taken(folder, summary, started, marks, ended - begun, compile_seconds() - compiled)


# What a whole stage takes, from one run of few steps and rows


def pretraining_seconds(job: Job, taken: Taken) -> float:
    lines = taken.times(f"prepare_{'target' if job.name == 'target' else 'draft'}")
    if len(lines) < 4:
        return taken.seconds
    a_step = (lines[-1] - lines[1]) / (len(lines) - 2)
    return taken.seconds + a_step * (pretraining_steps(job) - len(lines))


def answering_seconds(job: Job, taken: Taken) -> float:
    """Of `generate`, `contexts` and `scores`: loading, and what rows take times their number."""
    options, generated = job.config.evaluate, job.config.generate
    real = options.prompts + options.validation_prompts
    if job.name == "generate":
        done, real = taken.summary["rollouts"], generated.rollouts
    elif job.name == "contexts":
        done = sum(taken.summary[split]["prompts"] for split in ("validation", "test"))
        splits = read_splits(job.texts)
        real = min(options.prompts, len(splits.test))
        real += min(options.validation_prompts, len(splits.validation))
    else:
        held_out = read_records(taken.folder / "validation.parquet")
        done = taken.summary["texts"] + len(held_out)
        splits = read_splits(job.texts)
        texts = generated.rollouts if job.config.source.name == "target" else len(splits.train)
        real = texts + options.validation_prompts
    loaded = taken.until("loaded")
    return loaded + (taken.seconds - loaded) * max(1.0, real / done) + taken.compiling


def training_seconds(job: Job, taken: Taken) -> float:
    """Loading and the first step; steps, validations and checkpoints; trials of the rate."""
    optim, steps = job.config.optim, taken.times("train")
    _, last = taken.times("validation")
    folder = job.own["scores" if "scores" in job.own else "contexts"]
    rows = len(read_records(folder / "validation.parquet"))
    share = max(1.0, job.config.evaluate.validation_prompts / rows)
    a_step = (steps[-2] - steps[0]) / (len(steps) - 2)
    save = max(0.0, steps[-1] - steps[-2] - a_step)
    check = (last - steps[-1]) * share + save * WEIGHTS_OF_STATE
    begun = steps[0] + (share - 1) * (last - steps[-1])
    checks, saves = ceil(optim.max_steps / optim.eval_steps), optim.max_steps / optim.save_steps
    ended = max(0.0, taken.seconds + taken.compiling - last)
    whole = begun + a_step * (optim.max_steps - 1) + check * checks + save * saves + ended
    trial = begun + a_step * optim.max_steps / TRIAL_SHARE + check + save
    return whole + trial * len(optim.rate_factors)


def judging_seconds(job: Job, taken: Taken) -> float:
    """The identity check, scoring and timed decoding, each times its own count."""
    options, folder = job.config.evaluate, job.own[answers_of(job)]
    records = read_records(folder / "test.parquet")
    size, rows = options.timing_batch_size, min(options.prompts, max(len(records), 1))
    lossless = taken.until("alpha on") - taken.until("loaded")
    few = min(options.lossless_prompts, options.batch_size)
    lossless *= ceil(options.lossless_prompts / options.batch_size) / ceil(few / options.batch_size)
    chosen = "choosing the number" if job.config.decode.gamma == "auto" else "proposals a round"
    scored = taken.until(chosen) - taken.until("alpha on")
    chunks = next(iter(read_json(taken.folder / TIMING).values()))
    ways = {name: one for name, one in chunks.items() if "," not in name}
    decoded = sum(sum(one["seconds"]) + sum(one["prefill_seconds"]) for one in ways.values())
    tokens, count = next((sum(one["tokens"]), len(one["tokens"])) for one in ways.values())
    lengths = [len(record.output_ids) for record in records]
    mean = size * sum(lengths) / len(lengths)
    real = ceil(min(options.timing_prompts, FIRST_LOOK) / size)
    more = decoded / tokens * mean * max(0, real - count)
    block = taken.until("timed") - taken.until("alpha on")
    block += scored * (max(1.0, options.prompts / rows) - 1) + more
    rest = taken.until("loaded") + taken.seconds - taken.until("timed") + taken.compiling
    return rest + lossless + block * len(options.temperatures or [0])


def answers_of(job: Job) -> str:
    """The input of `evaluate` that is judged first."""
    temperatures = [one.sampling.temperature for one in at_temperatures(job.config)]
    first = temperatures.index((job.config.evaluate.temperatures or temperatures)[0])
    return f"contexts {first + 1}" if first else "contexts"


SECONDS = dict.fromkeys(("target", "prepare"), pretraining_seconds)
SECONDS |= dict.fromkeys(("generate", "contexts", "scores"), answering_seconds)
SECONDS |= {"train": training_seconds, "evaluate": judging_seconds}


def rehearse(job: Job) -> dict[str, float]:
    """Seconds of the whole stage, and the peak of memory in bytes."""
    hardware, device = job.config.hardware, resolve_device(job.config.hardware)
    if hardware.threads is not None:
        torch.set_num_threads(hardware.threads)
    keep_freed_memory()
    reset_peak(device)
    taken = take(job, longest=False)
    seconds = SECONDS.get(job.name, lambda job, taken: taken.seconds)(job, taken)
    gc.collect()
    if job.name in READS_LONGEST:
        splits = read_splits(job.longest["texts"])
        folder = take(job, longest=True).folder
        if job.name in ("generate", "contexts"):
            new = splits.room.new if job.name == "generate" else answer_tokens(job.config)
            lengthen(folder, folder, vars(splits), new)
    kept = KEPT_BYTES if job.name in TRAINING and device.type == "cpu" else 0
    return {"seconds": seconds, "peak": peak_bytes(device) + kept}


def main(job: Job, answer: Connection) -> None:
    """Send what `rehearse` gives, else `refused` or `failed` with the reason, or a `bug`."""
    try:
        result: dict[str, Any] = rehearse(job)
    except Exception as error:
        if isinstance(error, MemoryError) or NO_MEMORY.search(str(error)):
            result = {"failed": "it ran out of memory"}
        else:
            line = user_line(error)
            result = {"refused": line} if line else {"bug": traceback.format_exc()}
    answer.send(result)
