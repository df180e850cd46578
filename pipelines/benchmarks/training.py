"""`python -m pipelines.benchmarks.training`: a step of distillation beside TRL's, and its loss.

Both are ways of `evaluate`'s timer, which is handed a batch of prompts for a step: in one process,
in turns, from the same weights, sampling from their own draft as it learns: what disturbs the
machine disturbs both. Rates count completion tokens and everything a step does: sampling, scores of
the target, loss, gradient, update. The first steps, in which code is compiled, do not count. Rates
and their ratio are of totals, with 95 % intervals over steps. The loss in chunks stands beside one
that holds all logits, at a vocabulary of 152k.
"""

import copy
from collections.abc import Callable
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
from draftkit.decoding.generation import Completion
from draftkit.distillation.assembly import make_trainer
from draftkit.distillation.batch import collate, continued
from draftkit.distillation.chunked import chunked_sum
from draftkit.distillation.losses import FullScores, Objective
from draftkit.distillation.sources import source_sampler
from draftkit.evaluation.intervals import estimate, speedup
from draftkit.evaluation.walltime import Chunk, PromptIds, Way, synchronised_clock, time_ways
from draftkit.models.adapter import Adapter, Head
from draftkit.models.loading import Target, load_draft, load_target
from draftkit.templates import interval

from ..command import main
from ..plan import PAIR_AND_TEXT
from ..prepare import check_pair
from ..product import SUMMARY, Stage
from ..stage import StageFolder

WARM_STEPS, STEPS = 4, 20  # of both: those that do not count, and those that do
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
    version=4,
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
        "divergence": divergence,
        "dtype": str(target.adapter.dtype).removeprefix("torch."),
    }


def show(config: Config, folder: Path) -> None:
    """Print both rates and the costs of the loss."""
    summary, console = read_json(folder / SUMMARY), Console(width=80, highlight=False)
    ratio = {"mean": summary["ratio_to_trl"], "ci95": summary["ratio_ci95"]}
    console.print(
        f"On-policy {summary['divergence']}, {summary['batch_size']} rows, "
        f"{summary['max_new_tokens']} new tokens, {summary['dtype']}: {summary['steps']} steps in "
        "turns. Completion tokens a second, with 95 % intervals over steps:"
    )
    for name, rate in summary["tokens_per_second"].items():
        both = {"mean": rate, "ci95": summary["rate_ci95"][name]}
        console.print(f"{name:<9} {interval(both, 0)}")
    console.print(f"{interval(ratio, 2)} times as fast")
    console.print(
        f"Loss of {LOSS_TOKENS} tokens, vocabulary {LOSS_VOCAB_SIZE}, in chunks: "
        f"{summary['chunked_peak_fraction']:.0%} of the plain loss's memory, "
        f"{summary['chunked_time_ratio']:.2f}x its time; gradients differ by "
        f"{summary['chunked_gradient_error']:.1e}."
    )


# Steps


def beside_trl(
    target: Target, draft: Adapter, prompts: PromptIds, config: Config
) -> dict[str, Any]:
    """Rates of both trainers over steps on all of `prompts`, and their ratio."""
    from .training_peers import trl_step

    new = config.data.max_length - config.data.prompt_tokens  # tokens sampled for a prompt
    size = config.optim.per_device_train_batch_size
    model, longest = copy.deepcopy(draft.model), max(map(len, prompts)) + new
    # Ours first: it names its precision, and accelerate keeps the first that is named.
    ways = {"draftkit": our_step(target, draft, config, Room(new, longest))}
    ways["trl"] = trl_step(target, model, config, new_tokens=new)
    time_ways(ways, prompts[: WARM_STEPS * size], (), batch_size=size)
    timed = time_ways(ways, prompts, (), batch_size=size)
    ratio = speedup(timed["draftkit"].answers, timed["trl"].answers)
    rates = {name: estimate(one.answers) for name, one in timed.items()}
    return {
        "ratio_to_trl": ratio.mean,
        "ratio_ci95": ratio.ci95,
        "tokens_per_second": {name: rate.mean for name, rate in rates.items()},
        "rate_ci95": {name: rate.ci95 for name, rate in rates.items()},
        "steps": len(timed["trl"].chunks),
        "max_new_tokens": new,
    }


def our_step(target: Target, draft: Adapter, config: Config, room: Room) -> Way:
    """A step of ours on the prompts of a batch. room: of an answer, and of prompt and answer."""
    trainer = make_trainer(config, draft, target)
    sampler = source_sampler(config, target, draft, room)
    clock = synchronised_clock(draft.device)

    def step(prompts: PromptIds, first: int) -> Chunk:
        started = clock()
        rows = range(first, first + len(prompts))
        records = sampler.sample(prompts, rows=rows, version=f"row {first}")
        texts = [continued(record.prompt_ids, record.output_ids) for record in records]
        trainer.step(collate(texts, device=draft.device))
        made = [Completion(record.prompt_ids, record.output_ids) for record in records]
        return Chunk(0.0, clock() - started, made)

    return Way(step)


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

    errors = [float((a - b).norm() / b.norm()) for a, b in zip(in_chunks(), plain(), strict=True)]
    seconds = {in_chunks: 0.0, plain: 0.0}
    for function in (in_chunks, plain) * LOSS_REPEATS:
        started = clock()
        function()
        seconds[function] += clock() - started
    return {
        "chunked_peak_fraction": peak_of_call(in_chunks, device) / peak_of_call(plain, device),
        "chunked_time_ratio": seconds[in_chunks] / seconds[plain],
        "chunked_gradient_error": max(errors),
    }


def peak_of_call(function: Callable[[], Any], device: torch.device) -> int:
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
