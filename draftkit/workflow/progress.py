"""Training with its progress shown and its metrics logged."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from draftkit.distillation.batch_sources import Source
from draftkit.distillation.loop import Outcome, Progress, train
from draftkit.distillation.trainer import Trainer
from draftkit.tracking import Tracker

QUARTERS = 4


def train_logged(
    trainer: Trainer,
    source: Source,
    folder: Path,
    *,
    title: str,
    section: str,
    tracker: Tracker,
    note: Callable[[str], None],
    evaluate: Callable[[int], float] | None = None,
) -> Outcome:
    """`loop.train`, shown as `title`, its metrics in `section`."""
    with progress(title, trainer.optim.max_steps, note) as show:

        def log(step: Progress) -> None:
            show(step)
            metrics = {key: v for key, v in vars(step.metrics).items() if v is not None}
            metrics |= {"total_tokens": step.tokens, "tokens_per_second": step.tokens_per_second}
            tracker.log(section, step.steps, metrics)

        return train(trainer, source, folder, evaluate=evaluate, log=log)


@contextmanager
def progress(
    title: str, total: int, note: Callable[[str], None]
) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a logged step of `total`: loss, alpha, tokens/s.

    A bar with the time left on a terminal; else a `note` of the first step of every quarter.
    """
    if sys.stdout.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns) as bar:
            task = bar.add_task(title, total=total, numbers="")
            yield lambda step: bar.update(task, completed=step.steps, numbers=numbers(step))
        return
    quarters = 0

    def show(step: Progress) -> None:
        nonlocal quarters
        if QUARTERS * step.steps // total > quarters:
            quarters = QUARTERS * step.steps // total
            note(f"{title}: step {step.steps}/{total}  {numbers(step)}")

    yield show


def training_seconds(lines: Sequence[dict[str, Any]]) -> float:
    """What the steps took that `lines` of one training's metrics speak of, kills left out."""
    counts = pairwise([0, *(line["total_tokens"] for line in lines)])
    paces = (line["tokens_per_second"] for line in lines)
    return sum((b - a) / pace for (a, b), pace in zip(counts, paces, strict=True))


def numbers(step: Progress) -> str:
    """`loss 0.412  alpha 0.71  1,730 tok/s`."""
    alpha = "" if step.metrics.alpha is None else f"  alpha {step.metrics.alpha:.3f}"
    return f"loss {step.metrics.loss:.3f}{alpha}  {step.tokens_per_second:,.0f} tok/s"
