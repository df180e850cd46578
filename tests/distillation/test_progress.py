"""Progress of a long step where no one watches: a line now and then, and the time left."""

from pathlib import Path
from typing import Any

import torch

from draftkit.distillation.batch import TokenSequence, collate
from draftkit.distillation.progress import SHOWN, Countdown, reporting, row_text
from draftkit.tracking import Tracker, read_metrics
from tests import tiny

CPU = torch.device("cpu")


def shown(texts: list[tuple[str, bool]], **options: Any) -> str:
    """What is shown of a row of `texts`, each with whether it is learned, before a longer row."""
    tokenizer = tiny.byte_tokenizer()
    ids = [(tokenizer(text)["input_ids"], learned) for text, learned in texts]
    row = TokenSequence(
        [token for run, _ in ids for token in run], [learned for run, learned in ids for _ in run]
    )
    other = TokenSequence([0] * 9 + [1] * 400, [False] * 9 + [True] * 400)
    return row_text(collate([row, other], device=CPU, **options), tokenizer)


def test_a_row_is_one_line_with_marks_around_what_counts() -> None:
    chat = [("user\n1+1?", False), (f"2\n{tiny.END}", True), ("more", False), ("3", True)]
    assert shown(chat) == r"user\n1+1?⟦2\n<|end|>⟧more⟦3⟧"
    assert shown([*chat, ("behind", False)]) == shown(chat)


def test_no_control_reaches_the_terminal() -> None:
    assert shown([("x\x1b[2J\a", False), ("\x1b]0;", True)]) == "x␛[2J␇⟦␛]0;⟧"


def test_a_long_piece_loses_its_middle() -> None:
    text = shown([("a" * 999 + "b", False), ("c", True)])
    assert text == "a" * SHOWN + " ... " + "a" * (SHOWN - 1) + "b⟦c⟧"


def test_a_log_hears_of_a_step_every_ten_seconds_and_of_the_last_with_what_is_left() -> None:
    lines: list[str] = []
    seconds = iter([0.0, 4.0, 12.0, 15.0, 22.0, 30.0, 31.0])
    countdown = Countdown(20, lines.append, clock=lambda: next(seconds))
    for done in (5, 8, 10, 13, 20, 20):
        countdown(done, f"{done} done")
    assert lines == [
        "8 done, about 18.0 s left",  # 8 in 12 seconds
        "13 done, about 11.8 s left",  # 13 in 22
        "20 done",
    ]


def test_the_end_is_guessed_by_the_last_minute_and_not_before_a_hundredth_is_done() -> None:
    lines: list[str] = []
    now = [0.0]
    countdown = Countdown(1000, lines.append, clock=lambda: now[0])
    for done in (1, 2, *range(12, 130, 10)):  # slow at first, then one in a second
        now[0] += 10.0
        countdown(done, f"{done} done")
    assert lines[:2] == ["1 done", "2 done"]
    assert lines[2].startswith("12 done, about ")
    assert lines[-1] == "122 done, about 14 min 38 s left"


def test_what_a_resumed_run_finds_made_is_not_its_pace() -> None:
    lines: list[str] = []
    seconds = iter([0.0, 0.1, 0.2, 20.0])
    countdown = Countdown(1000, lines.append, clock=lambda: next(seconds))
    for done in (450, 900, 910):
        countdown(done, f"{done} done")
    assert lines == ["910 done, about 3 min 0 s left"]  # 10 in 20 seconds


def test_training_is_told_by_loss_alpha_and_pace(tmp_path: Path) -> None:
    lines: list[str] = []
    log = reporting("train", 20, Tracker(tmp_path), lines.append)
    for step in range(1, 21):
        metrics = {"loss": 1 / step, "tokens_per_second": 1730.4}
        log(step, metrics if step < 10 else metrics | {"alpha": 0.7})
    assert lines == ["train step 20/20  loss 0.050  alpha 0.700  1,730 tok/s"]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 21)]
