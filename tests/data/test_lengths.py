"""How long rows may be in a context, and what a person is told of what is cut."""

from collections import Counter
from typing import Any

import pytest

from draftkit.config import DataConfig
from draftkit.data.lengths import (
    Lengths,
    Room,
    cut_line,
    lengths_within,
    reading_notes,
    shares_cut,
)


def data(prompt: int = 1024, completion: int = 1024, **options: Any) -> DataConfig:
    lengths = {"max_prompt_tokens": prompt, "max_completion_tokens": completion}
    return DataConfig(**{"name": "local", "path": "rows.jsonl", **lengths, **options})


@pytest.mark.parametrize(
    ("context", "prompt", "completion", "expected"),
    [
        (40_960, 1024, 1024, (1024, 1024)),
        (2048, 1024, 1024, (1024, 1024)),
        (1024, 1024, 1024, (512, 512)),
        (1024, 256, 1024, (256, 768)),
        (1024, 1024, 256, (768, 256)),
        (1024, 2000, 2000, (512, 512)),
        (2, 1024, 1024, (1, 1)),
    ],
)
def test_prompt_and_answer_fit_the_context(
    context: int, prompt: int, completion: int, expected: tuple[int, int]
) -> None:
    given = data(prompt, completion, prompt_tokens=1)
    lengths = lengths_within(context, given)
    assert (lengths.prompt, lengths.completion) == expected
    assert lengths.prompt + lengths.completion <= context
    assert lengths.window == min(1024, context)


def test_a_context_no_longer_than_the_prompt_of_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^data\.prompt_tokens=32 leaves nothing .* of 32 tokens"):
        lengths_within(32, data())


def test_answers_to_texts_and_to_chats_have_their_own_room() -> None:
    lengths, given = Lengths(100, 50, 128), data(prompt_tokens=32)
    assert lengths.room(given, texts=True, chats=False) == Room(96, 128)
    assert lengths.room(given, texts=False, chats=True) == Room(50, 150)
    assert lengths.room(given, texts=True, chats=True) == Room(96, 150)


def test_lines_for_the_person_who_gave_the_rows() -> None:
    counts = Counter(rows=2000, completions=1000, prompts_cut=3, completions_cut=20, windows=9)
    assert cut_line(counts, Lengths(1024, 512, 128)) == (
        "2,000 prompts of at most 1,024 tokens, 0.1% cut; 1,000 answers of at most 512, 2.0% cut; "
        "0.0% of the rows dropped"
    )
    assert shares_cut(counts)["completions_cut_share"] == 0.02
    assert reading_notes(counts) == []
    naming, shared = reading_notes(counts | Counter(rows_naming_special=7, prompts_shared=2000))
    assert naming.startswith("7 rows hold names of special tokens, which are text there")
    assert shared.startswith("2,000 examples are left out of training and validation")
