"""Results read late are those read at once, whoever has left or joined in between."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftkit.decoding.results import RoundResult
from draftkit.decoding.state import Request
from tests.decoding.driving import (
    DRAFT,
    SAMPLINGS,
    Answer,
    Schedule,
    assert_same,
    decoder_of,
    drive,
    request,
)
from tests.tabular import random_adapter, relative

LATE = pytest.mark.parametrize("late", [False, True])


def test_only_rows_whose_every_proposal_could_pass_teach_acceptance() -> None:
    none = torch.empty(5, 0)
    result = RoundResult(
        slots=[*range(5)],
        gamma=2,
        proposer_version="",
        emitted=[3, 1, 2, 1, 3],
        committed=[3, 1, 2, 1, 1],
        ended=[False, True, False, False, False],
        done=[False, True, False, False, True],
        lengths=[2, 2, 1, 2, 2],
        tokens=none,
        draft_tokens=none,
        acceptance=none,
        target_log_probs=none,
        log_sum_exp=none,
        served_log_sum_exp=none,
    )
    # Not the row that met its end of text, nor the one with a proposal less.
    assert result.full_tests == [2, 0, 2]


# A round late


def requests_of(count: int, **others: Any) -> list[Request]:
    return [
        request(
            [(3 * i + row) % 7 for i in range(1 + row % 5)],
            new=1 + 7 * row % 23,
            gamma=(2, 0, 3)[row % 3],
            sampling=SAMPLINGS[row % 4],
            row=row,
            **others,
        )
        for row in range(count)
    ]


def test_a_result_comes_with_the_round_after_it() -> None:
    decoder = decoder_of(late=True)
    (slot,) = decoder.join([request([1, 2], new=20)])
    assert decoder.round() == []
    (first,) = decoder.round()
    assert first.slots == [slot]
    twin = decoder_of(late=False)
    twin.join([request([1, 2], new=20)])
    assert torch.equal(first.tokens, twin.round()[0].tokens)


@pytest.mark.parametrize(("slots", "verification"), [(1, "match"), (3, "block"), (20, "block")])
def test_late_completions_are_the_same(verification: str, slots: int) -> None:
    options: dict[str, Any] = {"verification": verification, "eos_token_ids": [7]}
    found = [
        drive(decoder_of(late=late, slots=slots, **options), requests_of(20))
        for late in (False, True)
    ]
    assert_same(found[1], found[0], atol=0)
    ended = [answer.facts[-1][0][4] for answer in found[0]]
    assert {True, False} == set(ended)  # by an end of text, or by the limit
    assert any(facts[0][3] > 1 for answer in found[0] for facts in answer.facts)


STAYS = {0: 1, 2: 2, 3: 1, 6: 3, 7: 2, 8: 4, 11: 1, 12: 5}


def assert_prefixes(found: list[Answer], expected: list[Answer]) -> None:
    """Those who left early got the beginning of their answer, the others all of it."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert len(one.facts) == len(other.facts) or number in STAYS
        cut = len(one.facts)
        shortened = Answer(
            other.text[: len(one.text)] if number in STAYS else other.text,
            other.facts[:cut],
            other.numbers[:cut],
        )
        assert_same([one], [shortened], atol=0)


def test_slots_of_those_who_leave_unread_are_used_at_once() -> None:
    requests = requests_of(20)
    whole = drive(decoder_of(late=False, eos_token_ids=[7]), requests)
    for late in (False, True):
        assert_prefixes(
            drive(decoder_of(late=late, eos_token_ids=[7]), requests, stays=STAYS), whole
        )


def test_a_round_keeps_the_version_that_it_was_proposed_with() -> None:
    decoder = decoder_of(late=True)
    decoder.join([request([1, 2], new=30)])
    decoder.round()
    weights = relative(random_adapter(8, 1), 9).state_dict()
    decoder.swap(DRAFT, weights, "v2")
    assert [decoder.round()[0].proposer_version for _ in range(2)] == ["v1", "v2"]


def test_a_finished_row_stands_still_in_a_round_begun_before_that_was_known() -> None:
    decoder = decoder_of(late=True)
    short, long = decoder.join([request([1, 2], new=1), request([3, 4], new=40, row=1)])
    assert decoder.round() == []
    seen = [result.slots for _ in range(3) for result in decoder.round()]
    assert seen == [[short, long], [long], [long]]
    assert decoder.state.length[short] == 3


def test_results_of_rows_that_have_all_left_are_no_results() -> None:
    decoder = decoder_of(late=True)
    slots = decoder.join(requests_of(3))
    decoder.round()
    decoder.leave(slots)
    assert decoder.round() == []
    assert decoder.free_slots == 3
    assert not decoder._pending


# Adaptive gamma


@LATE
def test_a_policy_decides_for_those_who_adapt_and_for_nobody_else(late: bool) -> None:
    policy = Schedule([3, 0, 1])
    decoder = decoder_of(late=late, policy=policy)
    adapts = [
        replace(request([1, 2], new=18, gamma=2), adapts=True),
        request([3], new=18, gamma=2, row=1),
    ]
    one, other = drive(decoder, adapts)
    gammas = [fact[0][0] for fact in one.facts]
    assert gammas == [(2, 0, 1)[i % 3] for i in range(len(gammas))]
    assert {fact[0][0] for fact in other.facts} == {2}


def test_a_schedule_gives_the_same_tokens_late() -> None:
    """One row, so that as many rounds are begun; each has the gamma of its place."""
    for sampling in SAMPLINGS:
        one = replace(request([1, 2], new=40, gamma=4, sampling=sampling), adapts=True)
        found = [
            drive(decoder_of(late=late, policy=Schedule([4, 0, 0, 2, 1, 0])), [one])
            for late in (False, True)
        ]
        assert_same(found[1], found[0], atol=0)


@LATE
def test_a_policy_is_told_what_became_of_its_rounds(late: bool) -> None:
    policy = Schedule([2, 1])
    decoder = decoder_of(late=late, policy=policy)
    (answer,) = drive(decoder, [replace(request([1, 2], new=12, gamma=2), adapts=True)])
    told = [(gamma, accepted[0]) for gamma, accepted in policy.told if accepted]
    assert told == [(fact[0][0], fact[0][2] - 1) for fact in answer.facts]
