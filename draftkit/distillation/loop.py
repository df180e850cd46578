"""Training from the first step to the last: batch, step, log, evaluate, save; resumable.

The weights with the highest validation alpha are kept, the starting weights among them, so that a
run that makes the draft worse ends with the draft it began with. Everything that decides what
happens next is in the checkpoint or a function of the step.

A checkpoint holds weights and moments, 12 bytes a weight, and there is one of them (two while it is
written); beside it lie the best weights, 4 bytes each, and better ones that it does not name yet.
"""

import math
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from draftkit.distillation.batch import Batch
from draftkit.distillation.checkpoint import (
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_weights,
)
from draftkit.distillation.ranks import agree
from draftkit.distillation.sources import Source
from draftkit.distillation.trainer import Trainer
from draftkit.models.memory import give_back_freed_memory

CHECKPOINT, BEST = "checkpoint.safetensors", "best-*.safetensors"


@dataclass(frozen=True)
class Best:
    """Which weights are the best so far; step 0: those that the run starts from.

    `best_alpha` is None where nothing was evaluated, or nothing but NaN came out.
    """

    best_step: int = 0
    best_alpha: float | None = None
    last_alpha: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome(Best):
    """Where training ended, and with which weights."""

    steps: int
    tokens: int


def train(
    trainer: Trainer,
    source: Source,
    folder: Path,
    *,
    log: Callable[[int, Mapping[str, float]], None],
    evaluate: Callable[[int], float] | None = None,
    show: Callable[[Batch], None] | None = None,
) -> Outcome:
    """Train to `optim.max_steps`, resuming from `folder`, and leave the best weights in the draft.

    `log(step, metrics)` hears what a step did, the tokens up to it, and the pace since the last
    one that was logged. `evaluate(step)` returns the validation alpha of the draft as it is;
    without it the last weights count as the best. `show` is given the very first batch.
    """
    optim = trainer.optim
    # Only where texts are sampled anew: a resumed run samples them with the same weights.
    saved_every = source.refresh_steps * math.ceil(optim.save_steps / source.refresh_steps)
    best, stored = Best(), set[int]()  # steps whose weights the checkpoint names
    if (folder / CHECKPOINT).exists():
        best = Best(**load_checkpoint(folder / CHECKPOINT, trainer))
        stored = {best.best_step}
    elif evaluate is not None:
        best = keep_if_best(trainer, folder, best, evaluate(0))
    clock, counted = time.perf_counter(), trainer.tokens
    while trainer.steps < optim.max_steps:
        logged = due(trainer.steps + 1, optim.logging_steps, optim.max_steps)
        batch = source.batch(trainer.steps)
        if trainer.steps == 0 and show is not None:
            show(batch)
        metrics = trainer.step(batch, measure=logged)
        if logged:
            now = time.perf_counter()
            pace = (trainer.tokens - counted) / (now - clock)
            totals = {"total_tokens": trainer.tokens, "tokens_per_second": pace}
            log(trainer.steps, metrics.known() | totals)
            clock, counted = time.perf_counter(), trainer.tokens
        if due(trainer.steps, optim.eval_steps, optim.max_steps):
            if evaluate is not None:
                best = keep_if_best(trainer, folder, best, evaluate(trainer.steps))
            give_back_freed_memory()
        if due(trainer.steps, saved_every, optim.max_steps):
            save_checkpoint(folder / CHECKPOINT, trainer, vars(best))
            stored = {best.best_step}
        if trainer.accelerator.is_main_process:
            forget_others(folder, {best.best_step, *stored})
    trainer.accelerator.wait_for_everyone()  # for files of the first process
    if evaluate is not None:
        load_weights(best_path(folder, best.best_step), trainer)
    return Outcome(**vars(best), steps=trainer.steps, tokens=trainer.tokens)


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every `every` steps, and at the last, happens at `step`."""
    return step % every == 0 or step == last


def best_path(folder: Path, step: int) -> Path:
    """Where the weights of `step` lie while they are the best."""
    return folder / f"best-{step:06d}.safetensors"


def keep_if_best(trainer: Trainer, folder: Path, best: Best, alpha: float) -> Best:
    """Keep the present weights if `alpha` beats the best so far, as NaN never does.

    The weights that a run starts from are kept whatever their alpha. Of several processes that of
    the first counts: what rounds otherwise on one must not let it keep other weights.
    """
    alpha = agree(alpha)
    known = -math.inf if best.best_alpha is None else best.best_alpha
    if trainer.steps > 0 and not alpha > known:
        return replace(best, last_alpha=alpha)
    # The older file stays until a checkpoint names the newer one: a kill in between loses nothing.
    save_weights(best_path(folder, trainer.steps), trainer)
    return Best(trainer.steps, None if math.isnan(alpha) else alpha, alpha)


def forget_others(folder: Path, steps: Set[int]) -> None:
    """Delete candidates but those of `steps`."""
    kept = {best_path(folder, step) for step in steps}
    for path in folder.glob(BEST):
        if path not in kept:
            path.unlink()


def discard_state(folder: Path) -> None:
    """Delete what only a resumed run needs, of one that is complete and whose weights are saved."""
    for path in (folder / CHECKPOINT, *folder.glob(BEST)):
        path.unlink(missing_ok=True)
