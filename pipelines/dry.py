"""The dry run: `limit=3` with `distill`, `evaluate`, `generate` or `export`, and in `check`.

The plan runs in place, below `<root>/.dry`: every stage that is to do makes its product of so many
batches of its steps, rollouts or prompts, and of what is complete already. It prints the stage's
own peak of memory, its own seconds, and a projection: the counts that were left out, at the pace of
those that ran. Texts are read as the run will use them. All else has `limit` among its settings, so
that nothing takes it for the whole, and is deleted at the end.
"""

import io
import re
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import accumulate
from math import ceil
from pathlib import Path

from draftkit.artifacts import locked, read_json, remove
from draftkit.data.rollouts import read_records
from draftkit.data.splits import read_splits
from draftkit.distillation.pretrain import WORTH_COMPILING
from draftkit.distillation.progress import duration
from draftkit.distillation.ranks import processes
from draftkit.models.devices import free_bytes, peak_bytes, resolve_device
from draftkit.tracking import FILE_NAME, read_metrics

from .product import Product
from .stage import checked_plan, make
from .weights import gigabytes

FOLDER, RUN = ".dry", "run"
STEPPING = {"prepare": "prepare_draft", "train": "train"}  # stages of steps, named as in metrics
TIMING = "timing.json"  # of `evaluate`
# How the allocators of CPU and CUDA say that there is no more.
NO_MEMORY = re.compile(r"allocate memory|out of memory|not enough memory|bad_alloc", re.IGNORECASE)
REMEDIES = {
    "generate": "lower generate.batch_size or data.max_completion_tokens",
    "contexts": "lower evaluate.batch_size or evaluate.max_new_tokens",
    "train": "halve optim.per_device_train_batch_size and double "
    "optim.gradient_accumulation_steps, or use optim.activation_checkpointing=true",
    "evaluate": "lower evaluate.batch_size or evaluate.max_new_tokens, or evaluate.lossless=off",
}
SMALLER = "use a smaller model, or a lower draft.pretrain.per_device_train_batch_size"


def dry_run(name: str, goal: Product, limit: int) -> None:
    """Print what every stage to do for `goal` takes. Raises ValueError for what does not fit."""
    if processes() > 1:
        raise ValueError("limit: a dry run is one process, and each of a launch takes as much")
    if not (to_do := checked_plan(name, [goal])):
        print(f"{name}: all is complete, there is nothing to do")
        return
    device = resolve_device(goal.config.hardware)
    free, peak, total = free_bytes(device), 0, 0.0
    folder, made = Path(goal.config.root) / FOLDER, dict[Path, Product]()
    with locked(folder):
        remove(folder / RUN)  # of one that was killed
        try:
            for step in to_do:
                if step.name == "texts":
                    make(step)
                    continue
                print(f"{name}: dry run of {step.name}", flush=True)
                few = made[step.folder] = shortened(step, limit, folder / RUN, made)
                started = time.perf_counter()
                try:
                    with redirect_stdout(io.StringIO()):
                        make(few)
                except (MemoryError, RuntimeError) as error:
                    if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
                        raise
                    raise ValueError(
                        f"{few.name} does not fit: it ran out of memory with {gigabytes(free)} "
                        f"free: {REMEDIES.get(few.name, SMALLER)}"
                    ) from None
                seconds = time.perf_counter() - started
                held, (whole, share) = peak_bytes(device), projected(step, few, seconds)
                line = f"  {gigabytes(held)}, {duration(seconds)}"
                print(f"{line} for {share}: {duration(whole)} for all" if share else line)
                peak, total = max(peak, held), total + whole
        finally:
            remove(folder / RUN)
    print(f"fits: {gigabytes(peak)} of {gigabytes(free)}, about {duration(total)}")
    print(f"  projected from {limit} batches of each stage; longer texts take more")


def shortened(step: Product, limit: int, root: Path, made: Mapping[Path, Product]) -> Product:
    """The product of `step` from few batches, each as large as ever, in `root`.

    made: what has been made so, by the folder of the whole; other inputs are read where they lie.
    """
    config, optim = step.config, step.config.optim
    draft, options, generate = config.draft, config.evaluate, config.generate
    compiled = optim.compiles
    if step.name == "prepare":
        compiled = optim.compiles_for(steps_of(step), WORTH_COMPILING)
    elif step.name == "generate":
        compiled = config.compiles_texts
    # One batch more than are counted: it loads and compiles. Steps: whole periods of sampling.
    few = replace(
        config,
        root=str(root),
        limit=limit,
        tracker="none",
        draft=replace(
            draft,
            pretrain=replace(draft.pretrain, max_steps=min(1 + limit, draft.pretrain.max_steps)),
            shrink=replace(draft.shrink, steps=min(1 + limit, draft.shrink.steps)),
        ),
        generate=replace(
            generate, rollouts=min((1 + limit) * generate.batch_size, generate.rollouts)
        ),
        optim=replace(
            optim,
            max_steps=min(1 + limit * config.source.refresh_steps, optim.max_steps),
            logging_steps=1,
            compile=str(compiled),
        ),
        evaluate=replace(
            options,
            prompts=min(limit * options.batch_size, options.prompts),
            timing_prompts=min(limit * options.timing_batch_size, options.timing_prompts),
        ),
        export=replace(config.export, push_to_hub=None),
    )
    inputs = {name: made.get(one.folder, one) for name, one in step.inputs.items()}
    return replace(step, config=few, settings={**step.settings, "limit": limit}, inputs=inputs)


# What a whole stage takes


def projected(step: Product, few: Product, seconds: float) -> tuple[float, str]:
    """Seconds of the whole of `step`, of which `few` took `seconds`, and in words how much that is;
    none where it is all.

    Steps and rows go on at the pace of those behind the first batch, which loads and compiles.
    """
    name, config = step.name, step.config
    if name == "evaluate":
        return judged(step, few, seconds)
    lines = read_metrics(few.folder / FILE_NAME)
    if name in STEPPING:
        ticks = [(one["time"], one["step"]) for one in lines if one["section"] == STEPPING[name]]
    else:
        files = sorted(few.folder.glob("*.parquet"), key=lambda path: path.stat().st_mtime)
        rows = accumulate(len(read_records(path)) for path in files)
        ticks = [(path.stat().st_mtime, count) for path, count in zip(files, rows, strict=True)]
    if not ticks:
        return seconds, ""
    whole, unit = config.generate.rollouts, "texts"
    if name in STEPPING:
        whole, unit = steps_of(step), "steps"
    elif name != "generate":
        counts = read_splits(step.inputs["texts"].path).counts
        if name == "contexts":
            whole = min(config.evaluate.prompts, counts["test"])
        elif "generate" not in step.inputs:  # scores of the data's own texts
            whole = counts["train"]
        whole += min(config.evaluate.validation_prompts, counts["validation"])
    (begun, first), (ended, last) = ticks[0], ticks[-1]
    if whole > last > first:
        seconds += (whole - last) * (ended - begun) / (last - first)
    if name == "train":
        checked = [one["time"] for one in lines if one["section"] == "validation"]
        checks, had = (
            ceil(one.optim.max_steps / one.optim.eval_steps) for one in (config, few.config)
        )
        seconds += (checks - had) * (checked[-1] - ended)
    return seconds, f"{last:,} of {whole:,} {unit}"


def steps_of(step: Product) -> int:
    """Of the training in a stage."""
    draft, optim = step.config.draft, step.config.optim
    if step.name == "prepare":
        return draft.shrink.steps if draft.shrink.layers else draft.pretrain.max_steps
    return optim.max_steps


def judged(step: Product, few: Product, seconds: float) -> tuple[float, str]:
    """As `projected`, of `evaluate`: by its prompts, and by the batches of them that are timed."""
    options = step.config.evaluate
    prompts = read_splits(step.inputs["texts"].path).counts["test"]
    whole, some = (min(one.evaluate.prompts, prompts) for one in (step.config, few.config))
    timing = read_json(few.folder / TIMING)
    ways = [way for at_temperature in timing.values() for way in at_temperature.values()]
    took = sum(sum(one["seconds"]) + sum(one["prefill_seconds"]) for one in ways)
    timed = len(ways[0]["seconds"])
    batches = max(timed, ceil(min(options.timing_prompts, whole) / options.timing_batch_size))
    seconds = seconds * whole / some + took * (batches / timed - 1)
    return seconds, f"{some} of {whole} prompts, {timed} of {batches} timed batches"
