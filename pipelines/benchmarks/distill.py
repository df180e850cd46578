"""`benchmark.subject=distill`: what a step of distillation costs, beside TRL's.

The pair of the experiment from its starting drafter, both trainers on the drafter's own samples;
and the loss in chunks beside one that holds all logits, at a vocabulary of 152k.
"""

from dataclasses import replace
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from draftkit.config import Config
from draftkit.data.prompts import read_splits
from draftkit.models.loading import load_draft, load_target
from pipelines.benchmarks.training import Load, Shape, beside_trl, chunked_costs
from pipelines.plan import StageFolder

GRADIENT_REPEATS = 2  # of half a minute each, on two cores


def measure(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Time both trainers, then the loss both ways."""
    options, optim = config.benchmark, config.optim
    target = load_target(folder.model(config, "target"), config.hardware)
    draft = load_draft(folder.model(config, "draft"), target, dtype=torch.float32)
    examples = read_splits(folder.input("texts")).train[
        : optim.per_device_train_batch_size * options.steps
    ]
    load = Load(
        divergence=config.divergence.name,
        sampling=config.sampling,
        batch_size=optim.per_device_train_batch_size,
        max_new_tokens=config.data.max_length - config.data.prompt_tokens,
        learning_rate=optim.learning_rate or 1e-4,
        seed=config.seed,
        compiled=config.decode.compiles,
    )
    folder.note(f"{options.steps} steps of each trainer, in turns")
    found = beside_trl(
        target,
        draft,
        [example.prompt_ids for example in examples],
        load,
        warm_steps=options.warm_steps,
        steps=options.steps,
    )
    shape = replace(Shape(), tokens=options.loss_tokens, vocab_size=options.loss_vocab_size)
    folder.note(f"the loss on {shape.tokens} tokens of {shape.vocab_size}, both ways")
    costs = chunked_costs(
        shape,
        divergence=config.divergence.name,
        device=draft.device,
        repeats=GRADIENT_REPEATS,
        seed=config.seed,
    )
    return {
        **found,
        **costs,
        "loss_tokens": shape.tokens,
        "loss_vocab_size": shape.vocab_size,
        "batch_size": load.batch_size,
        "max_new_tokens": load.max_new_tokens,
        "divergence": load.divergence,
        "dtype": str(target.adapter.dtype).removeprefix("torch."),
    }


def show(summary: dict[str, Any]) -> None:
    """Print both rates and the costs of the loss."""
    console = Console(width=80, highlight=False)
    console.print(
        f"On-policy {summary['divergence']}, {summary['batch_size']} rows, "
        f"{summary['max_new_tokens']} new tokens, {summary['dtype']}: {summary['steps']} steps in "
        "turns."
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    table.add_column("completion tokens/s", justify="right")
    for name, rate in summary["tokens_per_second"].items():
        low, high = summary["rate_quartiles"][name]
        table.add_row(name, f"{rate:.0f} [{low:.0f}, {high:.0f}]")
    console.print(table)
    low, high = summary["ratio_quartiles"]
    console.print(
        f"{summary['ratio_to_trl']:.2f}x [{low:.2f}, {high:.2f}] the tokens per second of TRL: "
        "median of paired steps, with quartiles."
    )
    console.print(
        f"Loss of {summary['loss_tokens']} tokens, vocabulary {summary['loss_vocab_size']}, in "
        f"chunks: {summary['chunked_peak_fraction']:.0%} of the plain loss's memory, "
        f"{summary['chunked_time_ratio']:.2f}x its time; gradients differ by "
        f"{summary['chunked_gradient_error']:.1e}."
    )
