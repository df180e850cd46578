"""What a plan takes by the shapes of its models, and the refusal of what a machine cannot hold."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from draftkit.checking.shapes import (
    ANY_LENGTH,
    DEMANDS,
    Case,
    Demand,
    TextLengths,
    lengths_of_splits,
    pair_shapes,
)
from draftkit.config import Config
from draftkit.data.prompts import read_splits
from draftkit.models.devices import resolve_device, resolve_dtype
from draftkit.models.memory import free_bytes

from .plan import Step

# What makes a part of a demand smaller. Names of parts are those of `checking.shapes`.
REMEDIES = {
    "target": "target.dtype=bfloat16 halves it, generate.top_k=64 trains without it",
    "its cache": "lower generate.batch_size or evaluate.batch_size, or data.max_completion_tokens",
    "drafters": "use a smaller drafter",
    "weights, gradients and moments": "use a smaller model, or draft.shrink.layers",
    "drafter, gradients and moments": "draft.lora.rank=16 trains a small part of it",
    "activations of plain training": "lower target.pretrain.per_device_train_batch_size, or "
    "that of draft.pretrain",
    "activations": "halve optim.per_device_train_batch_size and double "
    "optim.gradient_accumulation_steps, or use optim.activation_checkpointing=true",
    "probabilities of a batch": "lower evaluate.batch_size or evaluate.max_new_tokens",
    "caches": "lower evaluate.batch_size, or use evaluate.lossless=off",
}


def gigabytes(count: float) -> str:
    """As text, with two figures or more."""
    size = count / 1e9
    return f"{size:.0f} GB" if size >= 9.95 else f"{size:.1f} GB" if size >= 0.095 else "< 0.1 GB"


def case_of(config: Config, lengths: TextLengths, *, here: bool = True) -> Case:
    """The shapes of an experiment; not `here`: as on an accelerator, in 16 bits."""
    target, draft = pair_shapes(config)
    if not here:
        return Case(config, target, draft, lengths, torch.bfloat16)
    device = resolve_device(config.hardware)
    dtype = resolve_dtype(config.hardware, device)
    return Case(config, target, draft, lengths, dtype, mapped=device.type == "cpu")


def lengths_in(texts: Step) -> TextLengths | None:
    """Of the texts that a step has made; None where it has not."""
    return lengths_of_splits(read_splits(Path(texts.path))) if texts.digest else None


def remedy(memory: Mapping[str, float]) -> str:
    """What makes the largest part smaller."""
    return REMEDIES[max(memory, key=lambda part: memory[part])]


def too_large(name: str, demand: Demand, free: float) -> str:
    """One line about a step that takes more than is `free`."""
    largest = max(demand.memory, key=lambda part: demand.memory[part])
    return (
        f"{name} takes {gigabytes(demand.bytes)} of memory at least ({largest}: "
        f"{gigabytes(demand.memory[largest])}), and {gigabytes(free)} are free: "
        f"{remedy(demand.memory)}"
    )


def refuse_too_large(steps: Iterable[Step]) -> None:
    """Raise ValueError for a step that cannot fit into the free memory, whatever its texts.

    Weights, gradients and moments alone count, so what is refused cannot run. A target that is
    split over processes is not looked at.
    """
    cases: dict[int, Case] = {}
    for step in steps:
        config = step.config
        if step.name not in DEMANDS or not config.check.before or config.hardware.shard_target:
            continue
        if int(os.environ.get("RANK", "0")) > 0:
            continue
        if id(config) not in cases:
            cases[id(config)] = case_of(config, ANY_LENGTH)
        demand = DEMANDS[step.name](cases[id(config)])
        free = free_bytes(resolve_device(config.hardware))
        if demand.bytes > free:
            raise ValueError(f"{too_large(step.name, demand, free)}; check=off begins anyway")
