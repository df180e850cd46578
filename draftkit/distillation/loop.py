"""Training from the first step to the last: batch, step, log, evaluate, save; resumable.

The weights with the highest validation alpha are kept, the starting weights among them, so that a
run that makes the draft worse ends with the draft it began with. Everything that decides what
happens next is in the checkpoint or a function of the step.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from accelerate.utils import broadcast_object_list

from draftkit.distillation.checkpoint import (
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_weights,
)
from draftkit.distillation.sources import Source
from draftkit.distillation.trainer import StepMetrics, Trainer

CHECKPOINT = "checkpoint.safetensors"


@dataclass(frozen=True)
class Progress:
    """What a logged step shows: its metrics and the pace since the last one."""

    steps: int
    tokens: int
    metrics: StepMetrics
    tokens_per_second: float


@dataclass(frozen=True)
class Outcome:
    """Where training ended. `best_step` 0 means that the starting weights were the best.

    `best_alpha` is None where nothing was evaluated, or nothing but NaN came out.
    """

    steps: int
    tokens: int
    best_step: int
    best_alpha: float | None
    last_alpha: float | None


def train(
    trainer: Trainer,
    source: Source,
    folder: Path,
    *,
    evaluate: Callable[[int], float] | None,
    log: Callable[[Progress], None],
) -> Outcome:
    """Train to `optim.max_steps`, resuming from `folder`, and leave the best weights in the draft.

    `evaluate(step)` returns the validation alpha of the draft as it is; without it the last
    weights count as the best.
    """
    optim = trainer.optim
    if evaluate is not None:
        evaluate = agreed(trainer, evaluate)
    notes: dict = {"best_step": 0, "best_alpha": None, "last_alpha": None}
    if (folder / CHECKPOINT).exists():
        notes = load_checkpoint(folder / CHECKPOINT, trainer)
    elif evaluate is not None:
        notes = consider(trainer, folder, notes, evaluate(0))
    clock, counted = time.perf_counter(), trainer.tokens
    while trainer.steps < optim.max_steps:
        logged = due(trainer.steps + 1, optim.logging_steps, optim.max_steps)
        metrics = trainer.step(source.batch(trainer.steps), measure=logged)
        if logged:
            now = time.perf_counter()
            pace = (trainer.tokens - counted) / (now - clock)
            log(Progress(trainer.steps, trainer.tokens, metrics, pace))
            clock, counted = time.perf_counter(), trainer.tokens
        evaluated = evaluate is not None and due(trainer.steps, optim.eval_steps, optim.max_steps)
        if evaluated and evaluate is not None:
            notes = consider(trainer, folder, notes, evaluate(trainer.steps))
        if evaluated or due(trainer.steps, optim.save_steps, optim.max_steps):
            save_checkpoint(folder / CHECKPOINT, trainer, notes)
            if trainer.accelerator.is_main_process:
                forget_others(folder, notes["best_step"])
    trainer.accelerator.wait_for_everyone()  # for files of the first process
    if evaluate is not None:
        load_weights(best_path(folder, notes["best_step"]), trainer)
    return Outcome(trainer.steps, trainer.tokens, **notes)


def agreed(trainer: Trainer, evaluate: Callable[[int], float]) -> Callable[[int], float]:
    """`evaluate`, with what the first of several processes measured as the answer of all.

    What rounds otherwise on one of them must not let it keep other weights.
    """

    def of_the_first(step: int) -> float:
        values = [evaluate(step)]
        if trainer.accelerator.num_processes > 1:
            broadcast_object_list(values)
        return values[0]

    return of_the_first


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every `every` steps, and at the last, happens at `step`."""
    return step % every == 0 or step == last


def best_path(folder: Path, step: int) -> Path:
    """Where the weights of `step` lie while they are the best."""
    return folder / f"best-{step:06d}.safetensors"


def consider(trainer: Trainer, folder: Path, notes: dict, alpha: float) -> dict:
    """Keep the present weights if `alpha` beats the best so far, as NaN never does; the notes.

    The weights that a run starts from are kept whatever their alpha.
    """
    notes, best = {**notes, "last_alpha": alpha}, notes["best_alpha"]
    if trainer.steps > 0 and not alpha > (-math.inf if best is None else best):
        return notes
    # The older file stays until a checkpoint names the newer one: a kill in between loses nothing.
    save_weights(best_path(folder, trainer.steps), trainer)
    best = None if math.isnan(alpha) else alpha
    return {**notes, "best_step": trainer.steps, "best_alpha": best}


def forget_others(folder: Path, best_step: int) -> None:
    """Delete candidates that the checkpoint no longer names."""
    for path in folder.glob("best-*.safetensors"):
        if path != best_path(folder, best_step):
            path.unlink()
