"""A progress bar with loss, alpha, tokens/s and time left; plain lines where no one watches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from draftkit.distillation.loop import Progress

QUARTERS = 4


@contextmanager
def progress(
    title: str, total: int, note: Callable[[str], None]
) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a logged step of `total`: a bar on a terminal, else a `note`."""
    if not sys.stdout.isatty():
        yield quarter_lines(title, total, note)
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


def quarter_lines(
    title: str, total: int, note: Callable[[str], None]
) -> Callable[[Progress], None]:
    """A function that notes the first logged step of every quarter of the way, for logs."""
    shown = 0

    def show(step: Progress) -> None:
        nonlocal shown
        quarter = QUARTERS * step.steps // total
        if quarter > shown:
            shown = quarter
            note(f"{title}: step {step.steps}/{total}  {numbers(step)}")

    return show
