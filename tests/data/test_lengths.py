"""How long rows may be in a context, and which share of the prompts may be cut."""

import re
from collections import Counter
from typing import Any

import pytest

from draftkit.config import DataConfig
from draftkit.data.lengths import (
    MOST_CUT,
    Lengths,
    Room,
    capped_line,
    check_prompts_cut,
    lengths_within,
    most_prompt,
    reading_lines,
    shared_line,
    shares_cut,
    ways_out,
)

CHATS = Counter(rows=9)


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
    line = capped_line(CHATS, lengths, given, context)
    assert bool(line) == (expected != (prompt, completion))


def test_what_the_context_has_lowered_is_told() -> None:
    given = data()
    assert capped_line(CHATS, lengths_within(1500, given), given, 1500) == (
        "the smaller context of both models has 1500 tokens: data.max_prompt_tokens is 750 instead "
        "of 1024, data.max_completion_tokens is 750 instead of 1024"
    )
    windows = Counter(windows=9)
    assert capped_line(windows, lengths_within(1500, given), given, 1500) == ""
    assert capped_line(windows, lengths_within(900, given), given, 900) == (
        "the smaller context of both models has 900 tokens: data.max_length is 900 instead of 1024"
    )


def test_a_context_no_longer_than_the_prompt_of_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^data\.prompt_tokens=32 leaves nothing .* of 32 tokens"):
        lengths_within(32, data())


def test_answers_to_texts_and_to_chats_have_their_own_room() -> None:
    lengths, given = Lengths(100, 50, 128), data(prompt_tokens=32)
    assert lengths.room(given, texts=True, chats=False) == Room(96, 128)
    assert lengths.room(given, texts=False, chats=True) == Room(50, 150)
    assert lengths.room(given, texts=True, chats=True) == Room(96, 150)


def refusal(tokens: dict[int, int], context: int, given: DataConfig) -> str:
    """The one line that a person sees; empty where nothing is refused."""
    line = ""
    try:
        check_prompts_cut(Counter(tokens), lengths_within(context, given), context, given)
    except ValueError as error:
        line = str(error)
    assert "\n" not in line
    return line


def test_up_to_a_twentieth_of_the_prompts_may_be_cut() -> None:
    assert MOST_CUT == 0.05
    assert refusal({10: 95, 2000: 5}, 8192, data()) == ""
    assert refusal({10: 94, 2000: 6}, 8192, data()) == (
        "data.path rows.jsonl: 6% of the prompts are longer than data.max_prompt_tokens=1024: "
        "data.max_prompt_tokens=2048 holds 100% of them, data.overlong=drop leaves such rows out"
    )
    assert refusal({10: 94, 2000: 6}, 8192, data(overlong="drop")) == ""
    assert refusal({}, 8192, data()) == ""


def test_single_long_prompts_do_not_decide_what_is_advised() -> None:
    message = refusal({10: 800, 1300: 195, 7000: 5}, 8192, data())
    assert "data.max_prompt_tokens=1344 holds 100% of them" in message  # 99.5 %


@pytest.mark.parametrize("context", [1024, 2048, 3000, 8192])
@pytest.mark.parametrize("longest", [900, 1500, 2100, 9000])
def test_what_is_advised_is_not_refused_again(context: int, longest: int) -> None:
    tokens = {n: 1 for n in range(longest // 2, longest, 7)}
    message = refusal(tokens, context, data())
    if advised := re.search(r"data\.max_prompt_tokens=(\d+) holds", message):
        assert int(advised[1]) <= most_prompt(context, data())
        assert refusal(tokens, context, data(prompt=int(advised[1]))) == ""
    elif message:
        assert f"the models' context of {context} leaves" in message
        some_fit = min(tokens) <= lengths_within(context, data()).prompt
        assert ("data.overlong=drop leaves" in message) == some_fit
        assert ("use shorter prompts" in message) == (min(tokens) >= context)
        assert refusal(tokens, context, data(overlong="drop")) == ""


def ways(tokens: dict[int, int], context: int, given: DataConfig) -> list[str]:
    return [*ways_out(Counter(tokens), lengths_within(context, given), context, given)]


def test_rows_that_no_setting_would_hold_need_another_model() -> None:
    other = "use shorter rows, or models of a longer context than 512 tokens"
    assert ways({2000: 9}, 512, data(overlong="drop")) == [other]
    # What is too long then is the answer.
    assert ways({10: 9}, 512, data(overlong="drop")) == [other, "use data.overlong=cut"]
    assert ways({2000: 9}, 512, data()) == [other]
    lowered = data(prompt=100, completion=50)
    assert ways({200: 9}, 512, lowered) == [
        "raise data.max_prompt_tokens and data.max_completion_tokens"
    ]
    assert ways({200: 9}, 512, data(completion=50)) == ["raise data.max_completion_tokens"]
    assert ways({9000: 9}, 8192, data())[0].startswith("raise data.max_prompt_tokens and ")
    assert ways({9000: 9}, 2048, data())[0].startswith("use shorter rows")


def test_lines_for_the_person_who_gave_the_rows() -> None:
    counts = Counter(rows=2000, completions=1000, prompts_cut=3, completions_cut=20, rows_dropped=0)
    first, *others = reading_lines(counts, Lengths(1024, 512, 128))
    assert first == (
        "2,000 prompts of at most 1,024 tokens, 0.1% cut; 1,000 answers of at most 512, 2.0% cut; "
        "0.0% of the rows dropped"
    )
    assert others == []
    assert shares_cut(counts)["completions_cut_share"] == 0.02
    more = reading_lines(counts | Counter(rows_naming_special=7), Lengths(1024, 512, 128))
    assert more[1].startswith("7 rows hold names of special tokens, which are text there")
    assert reading_lines(Counter(windows=9), Lengths(1, 1, 1)) == []
    assert shared_line(Counter(test=9)) == ""
    assert shared_line(Counter(test=9, prompts_shared=2)) == (
        "2 examples are left out of training and validation, since their prompts are held out; "
        "0 of 9 test prompts repeat another"
    )
