"""Traces: what a round did is read off its tokens, and shown completely, safely, within the width.

Token ids below 256 are bytes, those above are words; END has no text.
"""

from itertools import product

import pytest

from draftkit.decoding.generation import Completion, TraceRound, trace_round
from draftkit.decoding.streaming import REPLACEMENT
from draftkit.decoding.trace import (
    Part,
    answer,
    answers,
    as_rows,
    as_text,
    parts,
)

WORDS = [
    "",
    " the",
    " cat",
    " sat",
    " on",
    " in",
    " mat",
    " <b>&",
    ".\n",
    " 日本語",
    " a\x1b[2Jb\r\u202e",
]
END, THE, CAT, SAT, ON, IN, MAT, TAG, STOP, WIDE, EVIL = range(256, 256 + len(WORDS))


def decode(ids: list[int]) -> str:
    return b"".join(bytes([i]) if i < 256 else WORDS[i - 256].encode() for i in ids).decode(
        errors="replace"
    )


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def trace_of(prompt: list[int], steps: list[TraceRound]) -> Completion:
    return Completion(prompt, steps=steps)


def texts_of(trace: Completion) -> list[list[str]]:
    rounds = as_rows(trace, decode)["rounds"]
    return [[text for _, text in one["parts"]] for one in rounds]


def continuations(traces: list[Completion], *, colour: bool) -> str:
    return as_text(answers(traces, decode, width=40, marks=not colour), width=40, colour=colour)


FIRST = TraceRound([CAT, SAT, IN, MAT], 2, ON, 3)
SECOND = TraceRound([THE, MAT], 2, STOP, 3)
TRACE = trace_of([ord("I"), THE], [FIRST, SECOND])


# What a round did


def decoded(
    draft: list[int], target: list[int], *, end: int, remaining: int
) -> tuple[list[int], int, int, int]:
    """One round by its rules: candidates, accepted proposals up to an end, emitted, committed."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == target[accepted]:
        accepted += 1
    candidates = target[: accepted + 1]
    emitted = candidates[: candidates.index(end) + 1] if end in candidates else candidates
    padding = [end] * (len(draft) + 1 - len(candidates))  # unread: whatever verification left
    return (
        candidates + padding,
        min(accepted, len(emitted)),
        len(emitted),
        min(len(emitted), remaining),
    )


def test_a_round_is_read_as_it_was_decoded_whatever_it_proposed_accepted_and_ended() -> None:
    seen = set()
    for gamma in range(4):
        for draft in product(range(3), repeat=gamma):
            for target in product(range(3), repeat=gamma + 1):
                for remaining in (1, 2, 9):
                    tokens, accepted, emitted, committed = decoded(
                        list(draft), list(target), end=0, remaining=remaining
                    )
                    unreal = [0, 1, 2]  # behind the proposals of this row
                    step = trace_round(tokens, [*draft, *unreal], emitted, committed, gamma)
                    assert step.proposed == list(draft)
                    assert step.accepted == accepted
                    assert step.emitted == tokens[:emitted]
                    assert step.committed == committed
                    assert (step.next_token is None) == (accepted == emitted)
                    assert len(step.fates) == emitted
                    seen.add((step.next_token is None, accepted == gamma, committed < emitted))
    assert len(seen) == 8


# Parts


@pytest.mark.parametrize(
    ("step", "kinds"),
    [
        (TraceRound([], 0, CAT, 1), "bonus"),
        (TraceRound([CAT, SAT], 2, ON, 1), "accepted unused unused"),
        (TraceRound([CAT, SAT], 1, ON, 1), "accepted rejected unused"),
        (TraceRound([CAT, END, SAT], 2, None, 2), "accepted accepted unused"),
        (TraceRound([CAT, END, SAT], 2, None, 1), "accepted unused unused"),
    ],
    ids=["plain", "length before the bonus", "length before the correction", "end of text", "both"],
)
def test_what_a_limit_or_an_end_of_text_cuts_off_is_unused(step: TraceRound, kinds: str) -> None:
    shown = parts(step, [THE], decode)
    assert " ".join(part.fate for part in shown) == kinds
    committed = [i for part in shown if part.fate in ("accepted", "bonus") for i in part.ids]
    assert committed == step.emitted[: step.committed]


def test_a_character_that_two_rounds_share_is_whole_in_the_second_and_in_the_answer() -> None:
    smile = ids_of("😀")
    trace = trace_of(
        [THE], [TraceRound(smile[:2], 2, smile[2], 3), TraceRound([CAT], 0, smile[3], 1)]
    )
    assert texts_of(trace) == [[REPLACEMENT, REPLACEMENT], [REPLACEMENT + " cat", "😀"]]
    assert list(answer(trace, decode)) == [Part("correction", smile, "😀")]


def test_tokens_that_were_not_committed_are_no_part_of_the_text() -> None:
    smile = ids_of("😀")
    cut = TraceRound([CAT, smile[0], SAT], 3, ON, 2)
    trace = trace_of([THE], [cut, TraceRound(smile[1:], 3, IN, 4)])
    assert texts_of(trace)[1] == ["😀", " in"]
    assert [(part.fate, part.text) for part in answer(trace, decode)] == [
        ("accepted", " cat"),
        ("accepted", "😀"),
        ("bonus", " in"),
    ]


def dropping(ids: list[int]) -> str:
    return decode(ids).removeprefix(" ")


SMILE = ids_of("😀")
SPELT = {
    "tokens that share a character are one part": (
        TraceRound([CAT, *SMILE, SAT], 6, ON, 7),
        [" cat", "😀", " sat", " on"],
    ),
    "each behind those that it was proposed behind": (
        TraceRound([*SMILE[:3], SMILE[0]], 3, SMILE[3], 4),
        [REPLACEMENT, 2 * REPLACEMENT, "😀"],
    ),
    "a rejected part of a character": (
        TraceRound(SMILE, 0, CAT, 1),
        [REPLACEMENT, " cat", "😀"],
    ),
    "no text at all": (TraceRound([CAT, END], 2, None, 2), [" cat", f"⟨{END}⟩"]),
    "a space that a decoder drops at the beginning": (
        FIRST,
        [" cat", " sat", " in", " on", " mat"],
    ),
}


@pytest.mark.parametrize("name", SPELT)
def test_every_token_is_spelt_in_its_place(name: str) -> None:
    step, texts = SPELT[name]
    own = dropping if "drops" in name else decode
    assert [part.text for part in parts(step, [THE], own)] == texts


# Rows


def test_rows_hold_every_round_and_the_counts_of_all() -> None:
    assert as_rows(TRACE, decode) == {
        "counts": "6 tokens in 2 rounds, 4 of 6 accepted",
        "prompt": "I the",
        "rounds": [
            {
                "accepted": 2,
                "proposed": 4,
                "parts": [
                    ["accepted", " cat"],
                    ["accepted", " sat"],
                    ["rejected", " in"],
                    ["correction", " on"],
                    ["unused", " mat"],
                ],
            },
            {
                "accepted": 2,
                "proposed": 2,
                "parts": [["accepted", " the"], ["accepted", " mat"], ["bonus", ".↵"]],
            },
        ],
    }
    cut = as_rows(trace_of([THE], [TraceRound([CAT, SAT], 2, ON, 1)]), decode)
    assert cut["counts"] == "1 tokens in 1 rounds, 2 of 2 accepted"
    assert as_rows(trace_of([THE], []), decode)["rounds"] == []


def test_rows_show_the_end_of_a_long_prompt_and_no_control_characters() -> None:
    evil = TraceRound([EVIL, CAT], 1, EVIL, 2)
    rows = as_rows(trace_of([STOP] * 50 + [EVIL] * 50, [evil]), decode)
    assert rows["prompt"].startswith("….↵")
    assert rows["prompt"].count("2J") == 50
    texts = [rows["prompt"], *(text for _, text in rows["rounds"][0]["parts"])]
    assert "".join(texts).isprintable()
    assert texts[1] == f" a␛[2Jb␍{REPLACEMENT}"


# As it reads


def test_continuations_read_as_text_and_tell_whose_token_is_whose() -> None:
    code = trace_of(ids_of("def f(x):\n    return"), [TraceRound(ids_of(" x+1"), 2, ord("*"), 3)])
    rule = 40 * "─"
    assert continuations([TRACE, code], colour=False).splitlines() == [
        "prompt  accepted  {+the target's own",
        "token+}",
        rule,
        "I the cat sat{+ on+} the mat{+.",
        "+}",
        rule,
        "def f(x):",
        "    return x{+*+}",
    ]
    coloured = continuations([code], colour=True)
    assert "\x1b[32m x\x1b[0m\x1b[1;94m*\x1b[0m" in coloured
    assert "{+" not in coloured


def test_a_continuation_sends_nothing_to_the_terminal_that_controls_it() -> None:
    evil = trace_of([EVIL], [TraceRound([EVIL], 1, EVIL, 2)])
    shown = continuations([evil], colour=False)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
