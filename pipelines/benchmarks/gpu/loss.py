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

from ...run import peak_memory_bytes
from ..ceilings import seconds_of
from ..random_models import TINY, random_model, random_texts, shape
from ..training import Shape, chunked_costs
from .part import Part

DIVERGENCE = "reverse_kl"
WARM_STEPS = 2
STEPS_GUESS = 15.0  # seconds


def steps(part: Part, vocab_size: int) -> dict[str, Any]:
    """Tokens a second of whole steps, and the most memory that they took."""
    hardware, count = part.config.hardware, part.size(6, 2)
    rows, tokens = part.size(8, 2), part.size(512, 8)  # tokens of a row
    precise = replace(hardware, dtype="float32")
    target_shape = part.size(shape(36, 2560, 9728, 32, 1024), TINY)
    draft_shape = part.size(shape(28, 1024, 3072, 16, 1024), TINY)
    target = random_model(target_shape, hardware, vocab_size=vocab_size, seed=0)
    draft = random_model(draft_shape, precise, vocab_size=vocab_size, seed=1)
    draft.model.requires_grad_(True)
    trainer = Trainer(
        draft,
        TargetTeacher(target),
        optim=OptimConfig(learning_rate=1e-5),
        divergence=DivergenceConfig(name=DIVERGENCE),
        sampling=SamplingConfig(),
        autocast=None if target.dtype == torch.float32 else target.dtype,
    )
    texts = random_texts(rows, tokens, vocab_size=vocab_size, seed=part.config.seed)
    batch = collate([continued(text[:1], text[1:]) for text in texts], device=part.device)
    turns = range(WARM_STEPS + count)
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
    tiny = Shape(tokens=24, vocab_size=500, target_width=8, draft_width=8)
    loss, repeats = part.size(Shape(), tiny), part.size(5, 1)
    part.step("shape", lambda: asdict(loss))
    part.step(
        "loss",
        lambda: chunked_costs(
            loss, divergence=DIVERGENCE, device=part.device, repeats=repeats, seed=0
        ),
    )
    part.step("steps", lambda: steps(part, loss.vocab_size), guess=STEPS_GUESS)
