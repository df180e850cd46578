"""Training from the first step to the last: batch, step, log, evaluate, save; resumable.

A training state is one safetensors file: weights, the optimizer's state, counters; no pickle. It is
written atomically, so a kill at any moment leaves the previous one. Data order, noise and learning
rate are functions of the step, so it is all that resuming needs to give the same tokens, losses and
weights as an uninterrupted run.

The weights with the highest validation alpha are kept, the starting weights among them, so that a
run that makes the draft worse ends with the draft it began with.

A checkpoint holds weights and moments, 12 bytes a weight, and there is one of them (two while it is
written); so it is with the best weights, 4 bytes each.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftkit.artifacts import atomic_path
from draftkit.distillation.batch import Batch
from draftkit.distillation.ranks import agree
from draftkit.distillation.sources import Source
from draftkit.distillation.trainer import Trainer

CHECKPOINT, BEST = "checkpoint.safetensors", "best.safetensors"
# Of each weight. AdamW counts its own steps: fewer than the trainer's where moments began anew.
STATE = {"step", "exp_avg", "exp_avg_sq"}


@dataclass(frozen=True)
class Outcome:
    """Where training ended, and with which weights; step 0: those that the run starts from.

    `best_alpha` is None where nothing was evaluated, or nothing but NaN came out.
    """

    steps: int
    tokens: int
    best_step: int
    best_alpha: float | None


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
    best: dict[str, Any] = {"best_step": 0, "best_alpha": None}
    if (folder / CHECKPOINT).exists():
        best |= load_checkpoint(folder / CHECKPOINT, trainer)
        if evaluate is not None:  # these may be of a step behind the checkpoint, and come again
            best |= read_notes(folder / BEST)
    elif evaluate is not None:
        keep_if_best(trainer, folder, best, evaluate(0))
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
            known = {name: value for name, value in vars(metrics).items() if value is not None}
            log(trainer.steps, known | totals)
            clock, counted = time.perf_counter(), trainer.tokens
        if due(trainer.steps, optim.eval_steps, optim.max_steps) and evaluate is not None:
            keep_if_best(trainer, folder, best, evaluate(trainer.steps))
        if due(trainer.steps, saved_every, optim.max_steps):
            save_checkpoint(folder / CHECKPOINT, trainer, best)
    trainer.accelerator.wait_for_everyone()  # for files of the first process
    if evaluate is not None:
        load_weights(folder / BEST, trainer)
    return Outcome(trainer.steps, trainer.tokens, best["best_step"], best["best_alpha"])


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every `every` steps, and at the last, happens at `step`."""
    return step % every == 0 or step == last


def keep_if_best(trainer: Trainer, folder: Path, best: dict[str, Any], alpha: float) -> None:
    """Keep the present weights if `alpha` beats the best so far, as NaN never does.

    The weights that a run starts from are kept whatever their alpha. Of several processes that of
    the first counts: what rounds otherwise on one must not let it keep other weights.
    """
    alpha = agree(alpha)
    known = -math.inf if best["best_alpha"] is None else best["best_alpha"]
    if trainer.steps == 0 or alpha > known:
        now = {"best_step": trainer.steps, "best_alpha": None if math.isnan(alpha) else alpha}
        best |= now
        save_weights(folder / BEST, trainer, now)


# Files


def save_checkpoint(path: Path, trainer: Trainer, notes: dict[str, Any]) -> None:
    """Write the state of `trainer` to `path`, with `notes` (JSON) beside its counters.

    Of several processes that train together the first one does, as all have the same.
    """
    if not trainer.accelerator.is_main_process:
        return
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.trained():
        tensors[f"weight.{name}"] = parameter.detach().cpu().contiguous()
        for part, state in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"{part}.{name}"] = state.cpu().contiguous()
    record = {"steps": trainer.steps, "tokens": trainer.tokens, "notes": notes}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"training": json.dumps(record)})


def load_checkpoint(path: Path, trainer: Trainer) -> dict[str, Any]:
    """Restore `trainer` from `path` and return the notes.

    Raises ValueError for a damaged file or one of another model.
    """
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads(file.metadata()["training"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError, OSError) as error:
        raise ValueError(
            f"{path}: not a readable checkpoint ({error}): delete it to train from the start"
        ) from error
    trainer.optimizer.state.clear()
    with torch.no_grad():
        for name, parameter in trainer.trained():
            weight = tensors.get(f"weight.{name}")
            parts = {part for part in STATE if f"{part}.{name}" in tensors}
            known = parts in (set(), STATE)
            if weight is None or weight.shape != parameter.shape or not known:
                raise ValueError(
                    f"{path}: {name} does not fit this model: delete it to train from the start"
                )
            parameter.copy_(weight)
            if parts:
                trainer.optimizer.state[parameter] = {
                    part: tensors[f"{part}.{name}"].to(parameter.device) for part in parts
                }
    trainer.draft.renew()
    trainer.steps, trainer.tokens = record["steps"], record["tokens"]
    return record["notes"]


def save_weights(path: Path, trainer: Trainer, notes: dict[str, Any]) -> None:
    """Write the weights alone, with `notes` (JSON). As above, the first process does."""
    if not trainer.accelerator.is_main_process:
        return
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in trainer.trained()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={"notes": json.dumps(notes)})


def read_notes(path: Path) -> dict[str, Any]:
    """The notes beside the weights in `path`."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["notes"])


def load_weights(path: Path, trainer: Trainer) -> None:
    """Put weights of `save_weights` into the draft."""
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name, parameter in trainer.trained():
            parameter.copy_(file.get_tensor(name))
    trainer.draft.renew()
