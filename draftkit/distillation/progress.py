"""How far a long step is: its numbers into the metrics, a line now and then, with what is left."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from draftkit.decoding.trace import visible
from draftkit.distillation.batch import Batch
from draftkit.tracking import Tracker

EVERY = 10.0  # seconds between two lines about the same step
LINES = 7  # over which the pace is taken
FINDING = 1.0  # seconds in which a resumed run finds what is made
LEAST = 0.01  # of a step, before its end is guessed
OPENING, CLOSING = "⟦", "⟧"  # around what counts in the loss
SHOWN = 160  # characters of a piece at either end


class Countdown:
    """Tells how far a step of `total` units is: not more often than `EVERY` seconds, and its end.

    The time left is that of the pace over the last minute or so, as parts of a step take turns that
    differ in pace; it stands from a hundredth of the step on. What a resumed run finds made, in its
    first second, does not count.
    """

    def __init__(
        self,
        total: float,
        note: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._note, self._clock = total, note, clock
        self._lines = deque([(clock(), 0.0)], maxlen=LINES)

    def __call__(self, done: float, text: str) -> None:
        """Note `text` where it is time, with what is left for the units that are not `done`."""
        now, (then, before) = self._clock(), self._lines[-1]
        if done >= self._total > before:
            self._note(text)
        elif now - then >= EVERY and before < done < self._total:
            then, before = self._lines[0]
            left = duration((self._total - done) * (now - then) / (done - before))
            self._note(f"{text}, about {left} left" if done >= self._total * LEAST else text)
        else:
            if len(self._lines) == 1 and now - then < FINDING:
                self._lines[0] = (then, done)
            return
        self._lines.append((now, done))


def duration(seconds: float) -> str:
    """As people say it, with two units."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{max(seconds, 0.1):.1f} s"


def reporting(
    section: str, total: int, tracker: Tracker, note: Callable[[str], None]
) -> Callable[[int, Mapping[str, float]], None]:
    """What `loop.train` of `total` steps logs by: metrics in `section`, and lines for people."""
    countdown = Countdown(total, note)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        tracker.log(section, step, metrics)
        alpha = f"  alpha {metrics['alpha']:.3f}" if "alpha" in metrics else ""
        pace = f"{metrics['tokens_per_second']:,.0f} tok/s"
        countdown(step, f"{section} step {step}/{total}  loss {metrics['loss']:.3f}{alpha}  {pace}")

    return log


def row_text(batch: Batch, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first row of `batch` in one line: what the loss is taken on in marks, the rest beside it.

    Special tokens show, and controls that a terminal would obey as signs; long pieces lose their
    middle, and what follows the last mark is left out.
    """
    ids, mask = batch.input_ids[0].tolist(), batch.loss_mask[0].tolist()
    text, at = "", 0
    for learned, run in groupby(mask[: len(mask) - mask[::-1].index(True)] if any(mask) else []):
        size = len([*run])
        piece = tokenizer.decode(ids[at : at + size], clean_up_tokenization_spaces=False)
        piece = visible(str(piece).replace("\n", "\\n"))
        if len(piece) > 2 * SHOWN:
            piece = f"{piece[:SHOWN]} ... {piece[-SHOWN:]}"
        text, at = text + (f"{OPENING}{piece}{CLOSING}" if learned else piece), at + size
    return text
