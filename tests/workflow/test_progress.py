"""Progress of a training where no one watches: a line a quarter of the way."""

from types import SimpleNamespace
from typing import Any

from draftkit.workflow.progress import progress


def test_a_log_shows_the_first_step_of_every_quarter_once() -> None:
    lines: list[str] = []
    with progress("training", 20, lines.append) as show:  # tests have no terminal
        for step in range(1, 21):
            metrics = SimpleNamespace(loss=1 / step, alpha=None if step < 10 else 0.7)
            shown: Any = SimpleNamespace(steps=step, metrics=metrics, tokens_per_second=1730.4)
            show(shown)
    assert lines == [
        "training: step 5/20  loss 0.200  1,730 tok/s",
        "training: step 10/20  loss 0.100  alpha 0.700  1,730 tok/s",
        "training: step 15/20  loss 0.067  alpha 0.700  1,730 tok/s",
        "training: step 20/20  loss 0.050  alpha 0.700  1,730 tok/s",
    ]
