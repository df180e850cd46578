"""Part e: distillation at a vocabulary of 152k: the loss in chunks beside the plain one, and steps.

The loss alone first; then whole steps of a drafter of 0.6 B under a target of 4 B, both of random
weights, on random tokens: forward, backward, update.
"""

import statistics
from dataclasses import asdict, replace
from typing import Any

import torch

from draftkit.config import DivergenceConfig, OptimConfig, SamplingConfig
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.teacher import TargetTeacher
from draftkit.distillation.trainer import Trainer
from pipelines.benchmarks.ceilings import seconds_of
from pipelines.benchmarks.gpu.part import Part
from pipelines.benchmarks.random_models import random_model, random_texts, shape
from pipelines.benchmarks.training import Shape, chunked_costs
from pipelines.run import peak_memory_bytes

DIVERGENCE = "reverse_kl"
WARM_STEPS = 2
STEPS_GUESS = 15.0  # seconds


class Size:
    """Of the loss, and of the steps."""

    loss = Shape()
    repeats = 5
    target = shape(36, 2560, 9728, 32, 1024)
    draft = shape(28, 1024, 3072, 16, 1024)
    rows = 8
    tokens = 512  # of a row
    steps = 6


class Rehearsed(Size):
    loss = Shape(tokens=24, vocab_size=500, target_width=8, draft_width=8)
    repeats = 1
    target = shape(1, 32, 32, 4, 64)
    draft = shape(1, 16, 16, 4, 64)
    rows = 2
    tokens = 8
    steps = 2


def steps(part: Part, size: type[Size]) -> dict[str, Any]:
    """Tokens a second of whole steps, and the most memory that they took."""
    hardware, vocab_size = part.config.hardware, size.loss.vocab_size
    precise = replace(hardware, dtype="float32")
    target = random_model(size.target, hardware, vocab_size=vocab_size, seed=0)
    draft = random_model(size.draft, precise, vocab_size=vocab_size, seed=1)
    draft.model.requires_grad_(True)
    trainer = Trainer(
        draft,
        TargetTeacher(target),
        optim=OptimConfig(learning_rate=1e-5),
        divergence=DivergenceConfig(name=DIVERGENCE),
        sampling=SamplingConfig(),
        autocast=None if target.dtype == torch.float32 else target.dtype,
    )
    rows = random_texts(size.rows, size.tokens, vocab_size=vocab_size, seed=part.config.seed)
    batch = collate([continued(row[:1], row[1:]) for row in rows], device=part.device)
    turns = range(WARM_STEPS + size.steps)
    seconds = [seconds_of(lambda: trainer.step(batch), part.device) for _ in turns]
    step, tokens = statistics.median(seconds[WARM_STEPS:]), trainer.tokens // len(turns)
    return {
        "tokens": tokens,
        "step_seconds": step,
        "tokens_per_second": tokens / step,
        "peak_memory_bytes": peak_memory_bytes(),
        "weight_bytes": {"target": target.weight_bytes, "draft": draft.weight_bytes},
    }


def run(part: Part) -> None:
    """The loss both ways, then steps."""
    size = Rehearsed if part.rehearses else Size
    part.step("shape", lambda: asdict(size.loss))
    part.step(
        "loss",
        lambda: chunked_costs(
            size.loss, divergence=DIVERGENCE, device=part.device, repeats=size.repeats, seed=0
        ),
    )
    part.step("steps", lambda: steps(part, size), guess=STEPS_GUESS)
