"""A progress bar with loss, alpha, tokens/s and time left; plain lines where no one watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from draftkit.distillation.loop import Progress

QUARTERS = 4


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a logged step of `total`."""
    if not sys.stdout.isatty():
        yield QuarterLines(title, total).show
        return
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


def numbers(step: Progress) -> str:
    """`loss 0.412  alpha 0.71  1,730 tok/s`."""
    alpha = "" if step.metrics.alpha is None else f"  alpha {step.metrics.alpha:.3f}"
    return f"loss {step.metrics.loss:.3f}{alpha}  {step.tokens_per_second:,.0f} tok/s"


class QuarterLines:
    """One line at every quarter of the way, for logs."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._shown = 0

    def show(self, step: Progress) -> None:
        """Print `step` if it is the first logged one of a new quarter."""
        quarter = QUARTERS * step.steps // self._total
        if quarter > self._shown:
            self._shown = quarter
            print(f"{self._title}: step {step.steps}/{self._total}  {numbers(step)}", flush=True)
