"""A training state in one safetensors file: weights, the optimizer's state, counters. No pickle.

Written atomically, so a kill at any moment leaves the previous checkpoint. Data order, noise and
learning rate are functions of the step, so this file is all that resuming needs to give the same
tokens, losses and weights as an uninterrupted run.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftkit.artifacts import atomic_path
from draftkit.distillation.trainer import Trainer

# Of each weight. AdamW counts its own steps: fewer than the trainer's where moments began anew.
STATE = {"step", "exp_avg", "exp_avg_sq"}


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
