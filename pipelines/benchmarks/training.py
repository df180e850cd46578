"""`python -m pipelines.benchmarks.training`: a step of distillation beside TRL's, and its loss.

Both trainers run in one process, a step of one after a step of the other, from the same weights,
on the same prompts, sampling from their own draft as it learns: what disturbs the machine disturbs
both. Rates count completion tokens and everything a step does: sampling, scores of the target,
loss, gradient, update. The first steps, in which code is compiled, do not count. The loss in chunks
stands beside one that holds all logits, at a vocabulary of 152k.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from draftkit.artifacts import read_json
from draftkit.config import Config, DivergenceConfig
from draftkit.data.lengths import Room
from draftkit.data.splits import read_splits
from draftkit.distillation.assembly import make_trainer
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.chunked import chunked_sum
from draftkit.distillation.losses import FullScores, Objective
from draftkit.distillation.sources import source_sampler
from draftkit.evaluation.walltime import synchronised_clock
from draftkit.models.adapter import Adapter, Head
from draftkit.models.loading import Target, load_draft, load_target

from ..command import main
from ..plan import PAIR_AND_TEXT
from ..prepare import check_pair
from ..product import SUMMARY, Stage
from ..stage import StageFolder

WARM_STEPS, STEPS = 4, 20  # of both trainers: those that do not count, and those that do
LEARNING_RATE = 1e-4  # of both, where none is given
LOSS_TOKENS, LOSS_VOCAB_SIZE, LOSS_WIDTHS = 2048, 152_064, (1024, 512)  # of target and draft
LOSS_REPEATS = 2  # of half a minute each, on two cores
STAGE = Stage(
    name="benchmark",
    code="benchmarks.training",
    reads=(
        *("seed", "data", "sampling", "divergence", "optim.compile"),
        *("optim.learning_rate", "optim.per_device_train_batch_size"),
    ),
    inputs=PAIR_AND_TEXT,
    version=3,
    product=None,
)


def check(config: Config) -> None:
    """Raise ValueError for a pair that does not fit, and for a peer that is missing."""
    check_pair(config)
    if find_spec("trl") is None:
        raise ValueError("trl is not installed: pip install 'draftkit[bench]'")


def benchmark(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Time both trainers, then the loss both ways."""
    rows, divergence = config.optim.per_device_train_batch_size, config.divergence.name
    rate = config.optim.learning_rate or LEARNING_RATE
    constant = {"lr_scheduler_type": "constant", "warmup_steps": 0}
    config = replace(config, optim=replace(config.optim, learning_rate=rate, **constant))
    target = load_target(folder.model(config, "target"), config.hardware)
    draft = load_draft(folder.model(config, "draft"), target, dtype=torch.float32)
    examples = read_splits(folder.inputs["texts"]).train[: rows * STEPS]
    folder.note(f"{STEPS} steps of each trainer, in turns")
    rates = beside_trl(target, draft, [example.prompt_ids for example in examples], config)
    folder.note(f"the loss on {LOSS_TOKENS} tokens of {LOSS_VOCAB_SIZE}, both ways")
    return {
        **rates,
        **chunked_costs(divergence=divergence, device=draft.device, seed=config.seed),
        "batch_size": rows,
        "max_new_tokens": answer_tokens(config),
        "divergence": divergence,
        "dtype": str(target.adapter.dtype).removeprefix("torch."),
    }


def show(config: Config, folder: Path) -> None:
    """Print both rates and the costs of the loss."""
    summary, console = read_json(folder / SUMMARY), Console(width=80, highlight=False)
    console.print(
        f"On-policy {summary['divergence']}, {summary['batch_size']} rows, "
        f"{summary['max_new_tokens']} new tokens, {summary['dtype']}: {summary['steps']} steps in "
        "turns. Completion tokens a second, medians with quartiles:"
    )
    for name, rate in summary["tokens_per_second"].items():
        low, high = summary["rate_quartiles"][name]
        console.print(f"{name:<9} {rate:.0f} [{low:.0f}, {high:.0f}]")
    low, high = summary["ratio_quartiles"]
    console.print(f"{summary['ratio_to_trl']:.2f}x [{low:.2f}, {high:.2f}], of paired steps")
    console.print(
        f"Loss of {LOSS_TOKENS} tokens, vocabulary {LOSS_VOCAB_SIZE}, in chunks: "
        f"{summary['chunked_peak_fraction']:.0%} of the plain loss's memory, "
        f"{summary['chunked_time_ratio']:.2f}x its time; gradients differ by "
        f"{summary['chunked_gradient_error']:.1e}."
    )


# Steps


def beside_trl(
    target: Target, draft: Adapter, prompts: Sequence[Sequence[int]], config: Config
) -> dict[str, Any]:
    """Rates of both trainers, and the median of their ratios step by step with its quartiles."""
    from .training_peers import trl_rates

    theirs = copy.deepcopy(draft.model)
    step = our_step(target, draft, prompts, config)
    ours: list[float] = []
    trl = trl_rates(
        target,
        theirs,
        prompts,
        config,
        steps=WARM_STEPS + STEPS,
        new_tokens=answer_tokens(config),
        between=lambda: ours.append(step(len(ours))),
    )
    rates = {"draftkit": ours[WARM_STEPS:], "trl": trl[WARM_STEPS:]}
    ratios = [a / b for a, b in zip(*rates.values(), strict=True)]
    return {
        "ratio_to_trl": statistics.median(ratios),
        "ratio_quartiles": quartiles(ratios),
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "rate_quartiles": {name: quartiles(values) for name, values in rates.items()},
        "steps": STEPS,
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper one."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def answer_tokens(config: Config) -> int:
    """How many tokens a step of either trainer samples for a prompt."""
    return config.data.max_length - config.data.prompt_tokens


def our_step(
    target: Target, draft: Adapter, prompts: Sequence[Sequence[int]], config: Config
) -> Callable[[int], float]:
    """A function that takes the step of a number, and gives its completion tokens a second."""
    size, new = config.optim.per_device_train_batch_size, answer_tokens(config)
    trainer = make_trainer(config, draft, target)
    sampler = source_sampler(config, target, draft, Room(new, max(map(len, prompts)) + new))

    def step(number: int) -> float:
        started = time.perf_counter()
        rows = range(number * size, (number + 1) * size)
        records = sampler.sample(
            [prompts[row % len(prompts)] for row in rows], rows=rows, version=f"step {number}"
        )
        texts = [continued(record.prompt_ids, record.output_ids) for record in records]
        metrics = trainer.step(collate(texts, device=draft.device))
        return metrics.tokens / (time.perf_counter() - started)

    return step


# The loss


def chunked_costs(*, divergence: str, device: torch.device, seed: int) -> dict[str, float]:
    """Memory, time and gradients of the loss in chunks, as shares of those of the plain loss.

    Forward and backward, float32, random states and heads. Memory is the most that the allocator
    gave out beyond the inputs; the gradient's error is relative.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    tokens, target_width, draft_width = LOSS_TOKENS, *LOSS_WIDTHS
    states = random(tokens, draft_width).requires_grad_()
    weight = (0.05 * random(LOSS_VOCAB_SIZE, draft_width)).requires_grad_()
    head, leaves = Head(weight, None), (states, weight)
    target_head = Head(0.05 * random(LOSS_VOCAB_SIZE, target_width), None)
    scores = FullScores(random(tokens, target_width), target_head)
    objective = Objective(DivergenceConfig(name=divergence))
    ids = torch.zeros(tokens, dtype=torch.long, device=device)
    clock = synchronised_clock(device)

    def loss_of(logits: Tensor, rows: slice) -> Tensor:
        return objective.losses(
            scores=scores, draft_logits=logits, token_ids=ids, rows=rows, step=0
        ).sum()

    def plain() -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of(head(states), slice(0, tokens)), leaves)

    def in_chunks() -> tuple[Tensor, ...]:
        return torch.autograd.grad(chunked_sum(loss_of, states=states, head=head), leaves)

    def seconds(function: Callable[[], Any]) -> float:
        started = clock()
        function()
        return clock() - started

    errors = [float((a - b).norm() / b.norm()) for a, b in zip(in_chunks(), plain(), strict=True)]
    ratios = [seconds(in_chunks) / seconds(plain) for _ in range(LOSS_REPEATS)]
    return {
        "chunked_peak_fraction": peak_bytes(in_chunks, device) / peak_bytes(plain, device),
        "chunked_time_ratio": statistics.median(ratios),
        "chunked_gradient_error": max(errors),
    }


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


if __name__ == "__main__":
    main(STAGE)
