"""How far a long step is, with the time left; training with its metrics logged."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from transformers import PreTrainedTokenizerBase

from draftkit.decoding.trace import visible
from draftkit.distillation.batch import Batch
from draftkit.distillation.loop import Outcome, Progress, train
from draftkit.distillation.sources import Source
from draftkit.distillation.trainer import Trainer
from draftkit.tracking import Tracker

EVERY = 10.0  # seconds between two lines about the same step
OPENING, CLOSING = "⟦", "⟧"  # around what counts in the loss
SHOWN = 160  # characters of a piece at either end


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
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Outcome:
    """`loop.train`, shown as `title`, its metrics in `section`.

    tokenizer: makes text of the first row, which `note` then hears.
    """

    def show_row(batch: Batch) -> None:
        if tokenizer is not None:
            note(f"the first row, {OPENING}what counts in the loss{CLOSING}:")
            note(row_text(batch, tokenizer))

    with progress(title, trainer.optim.max_steps, note) as show:

        def log(step: Progress) -> None:
            show(step)
            metrics = {key: v for key, v in vars(step.metrics).items() if v is not None}
            metrics |= {"total_tokens": step.tokens, "tokens_per_second": step.tokens_per_second}
            tracker.log(section, step.steps, metrics)

        return train(trainer, source, folder, evaluate=evaluate, log=log, show=show_row)


def row_text(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first row of `batch` in one line: what the loss is taken on in marks, the rest beside it.

    Special tokens show, and controls that a terminal would obey as signs; long pieces lose their
    middle, and what follows the last mark is left out.
    """
    ids, mask = batch.input_ids[0].tolist(), batch.loss_mask[0].tolist()
    if batch.segments is not None:  # the first text that is packed there
        mask = mask[: batch.segments[0].tolist().count(1)]
    text, at = "", 0
    for learned, run in groupby(mask[: len(mask) - mask[::-1].index(True)] if any(mask) else []):
        size = len([*run])
        piece = tokenizer.decode(ids[at : at + size], clean_up_tokenization_spaces=False)
        piece = visible(str(piece).replace("\n", "\\n"))
        if len(piece) > 2 * SHOWN:
            piece = f"{piece[:SHOWN]} ... {piece[-SHOWN:]}"
        text, at = text + (f"{OPENING}{piece}{CLOSING}" if learned else piece), at + size
    return text


class Countdown:
    """Tells how far a step of `total` units is: not more often than `every` seconds, and its end.

    The time left is that of the pace since the line before, so that what a resumed run finds made
    counts once at most.
    """

    def __init__(
        self,
        total: float,
        note: Callable[[str], None],
        *,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._note, self._every, self._clock = total, note, every, clock
        self._last = (clock(), 0.0)

    def __call__(self, done: float, text: str) -> None:
        """Note `text` where it is time, with what is left for the units that are not `done`."""
        now, (then, before) = self._clock(), self._last
        if done >= self._total > before:
            self._note(text)
        elif now - then >= self._every and before < done < self._total:
            left = (self._total - done) * (now - then) / (done - before)
            self._note(f"{text}, about {duration(left)} left")
        else:
            return
        self._last = (now, done)


def duration(seconds: float) -> str:
    """As people say it, with two units."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{max(seconds, 0.1):.1f} s"


@contextmanager
def progress(
    title: str, total: int, note: Callable[[str], None]
) -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows a logged step of `total`: loss, alpha, tokens/s, time left.

    A bar on a terminal; else a `note` now and then, and of the last step.
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
    countdown = Countdown(total, note)
    yield lambda step: countdown(step.steps, f"{title}: step {step.steps}/{total}  {numbers(step)}")


def training_seconds(lines: Sequence[dict[str, Any]]) -> float:
    """What the steps took that `lines` of one training's metrics speak of, kills left out."""
    counts = pairwise([0, *(line["total_tokens"] for line in lines)])
    paces = (line["tokens_per_second"] for line in lines)
    return sum((b - a) / pace for (a, b), pace in zip(counts, paces, strict=True))


def numbers(step: Progress) -> str:
    """`loss 0.412  alpha 0.71  1,730 tok/s`."""
    alpha = "" if step.metrics.alpha is None else f"  alpha {step.metrics.alpha:.3f}"
    return f"loss {step.metrics.loss:.3f}{alpha}  {step.tokens_per_second:,.0f} tok/s"
