"""What a step of distillation costs: beside TRL's, and beside a loss that holds all logits.

Both trainers run in one process, a step of one after a step of the other, from the same weights,
on the same prompts, sampling from their own draft as it learns: what disturbs the machine disturbs
both. Rates count completion tokens and everything a step does: sampling, scores of the target,
loss, gradient, update. The first steps, in which code is compiled, do not count.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftkit.config import DivergenceConfig, OptimConfig, SamplingConfig
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.chunked import chunked_sum
from draftkit.distillation.losses import Objective
from draftkit.distillation.samplers import AnswerSettings, DecoderSampler
from draftkit.distillation.teacher import FullScores, TargetTeacher
from draftkit.distillation.trainer import Trainer
from draftkit.models.adapter import CausalAdapter, Head
from draftkit.models.loading import Target
from pipelines.benchmarks.decoder import spread
from pipelines.benchmarks.training_peers import trl_steps

Steps = list[tuple[int, float]]  # completion tokens and seconds of each


@dataclass(frozen=True)
class Load:
    """What one step is asked to do."""

    divergence: str
    sampling: SamplingConfig
    batch_size: int
    max_new_tokens: int
    learning_rate: float
    seed: int
    compiled: bool


def beside_trl(
    target: Target,
    draft: CausalAdapter,
    prompts: Sequence[Sequence[int]],
    load: Load,
    *,
    warm_steps: int,
    steps: int,
) -> dict[str, Any]:
    """Rates of both trainers, and the median of their ratios step by step with its quartiles."""
    theirs = copy.deepcopy(draft.model)
    step = our_step(target, draft, prompts, load)
    ours: Steps = []
    trl = trl_steps(
        target=target.adapter.model,
        draft=theirs,
        tokenizer=target.tokenizer,
        prompts=prompts,
        divergence=load.divergence,
        batch_size=load.batch_size,
        max_new_tokens=load.max_new_tokens,
        steps=warm_steps + steps,
        learning_rate=load.learning_rate,
        low_precision=target.adapter.dtype == torch.bfloat16,
        between=lambda: ours.append(step(len(ours))),
    )
    rates = {
        "draftkit": [tokens / seconds for tokens, seconds in ours[warm_steps:]],
        "trl": [step.tokens / step.seconds for step in trl[warm_steps:]],
    }
    ratios = [a / b for a, b in zip(rates["draftkit"], rates["trl"], strict=True)]
    return {
        "ratio_to_trl": statistics.median(ratios),
        "ratio_quartiles": spread(ratios)["quartiles"],
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "rate_quartiles": {name: spread(values)["quartiles"] for name, values in rates.items()},
        "steps": steps,
    }


def our_step(
    target: Target, draft: CausalAdapter, prompts: Sequence[Sequence[int]], load: Load
) -> Callable[[int], tuple[int, float]]:
    """A function that takes the step of a number, and tells its completion tokens and seconds."""
    low = target.adapter.dtype != torch.float32
    trainer = Trainer(
        draft,
        TargetTeacher(target.adapter),
        optim=OptimConfig(
            learning_rate=load.learning_rate, lr_scheduler_type="constant", warmup_steps=0
        ),
        divergence=DivergenceConfig(name=load.divergence),
        sampling=load.sampling,
        autocast=target.adapter.dtype if low else None,
        compiled=load.compiled,
    )
    length = max(map(len, prompts)) + load.max_new_tokens
    sampler = DecoderSampler(
        model=draft,
        name="draft",
        settings=AnswerSettings(
            sampling=load.sampling,
            eos_token_ids=target.eos_token_ids,
            max_new_tokens=load.max_new_tokens,
            max_length=length,
            batch_size=load.batch_size,
            seed=load.seed,
        ),
        compiled=load.compiled,
    )

    def step(number: int) -> tuple[int, float]:
        started = time.perf_counter()
        rows = range(number * load.batch_size, (number + 1) * load.batch_size)
        asked = [prompts[row % len(prompts)] for row in rows]
        records = sampler.sample(asked, rows=rows, version=f"step {number}")
        texts = [continued(record.prompt_ids, record.output_ids) for record in records]
        metrics = trainer.step(collate(texts, device=draft.device))
        return metrics.tokens, time.perf_counter() - started

    return step


# The loss in pieces


@dataclass(frozen=True)
class Shape:
    """Tokens of a loss, and the models whose heads it sees."""

    tokens: int = 2048
    vocab_size: int = 152_064
    target_width: int = 1024
    draft_width: int = 512


def chunked_costs(
    shape: Shape, *, divergence: str, device: torch.device, repeats: int, seed: int
) -> dict[str, float]:
    """Peak memory, time and gradients of the loss in chunks, as shares of those of the plain loss.

    Memory and tokens a second of both, too, forward and backward. Float32, random states and heads.
    Memory is what the allocator gave out beyond the inputs.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    states, target_states = (
        random(shape.tokens, shape.draft_width),
        random(shape.tokens, shape.target_width),
    )
    weight = (0.05 * random(shape.vocab_size, shape.draft_width)).requires_grad_()
    target_head = Head(0.05 * random(shape.vocab_size, shape.target_width), None)
    scores, leaves = FullScores(target_states, target_head), (states.requires_grad_(), weight)
    objective = Objective(DivergenceConfig(name=divergence), SamplingConfig(), 1.0)
    ids = torch.zeros(shape.tokens, dtype=torch.long, device=device)

    def loss_of(logits: Tensor, rows: slice) -> Tensor:
        return objective.losses(
            scores=scores, draft_logits=logits, token_ids=ids, rows=rows, step=0
        ).sum()

    def plain() -> tuple[Tensor, ...]:
        value = loss_of(Head(weight, None)(states), slice(0, shape.tokens))
        return torch.autograd.grad(value, leaves)

    def in_chunks() -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            chunked_sum(loss_of, states=states, head=Head(weight, None)), leaves
        )

    errors = [float((a - b).norm() / b.norm()) for a, b in zip(in_chunks(), plain(), strict=True)]
    turns = [(seconds_of(in_chunks, device), seconds_of(plain, device)) for _ in range(repeats)]
    peak, plain_peak = peak_bytes(in_chunks, device), peak_bytes(plain, device)
    own, other = (statistics.median(column) for column in zip(*turns, strict=True))
    return {
        "chunked_peak_fraction": peak / plain_peak,
        "chunked_time_ratio": statistics.median(a / b for a, b in turns),
        "chunked_gradient_error": max(errors),
        "chunked_peak_bytes": peak,
        "plain_peak_bytes": plain_peak,
        "chunked_tokens_per_second": shape.tokens / own,
        "plain_tokens_per_second": shape.tokens / other,
    }


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """How long one call takes, to its end on the device."""
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """The most that PyTorch's allocator had given out at once during a call, beyond what it had."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    inner: Any = profiler.profiler
    events = [event for event in inner.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
