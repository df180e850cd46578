"""Results read late are those read at once, whoever has left or joined in between."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.decoding import decoder as decoder_module
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.results import Launched, Outcome, RoundResult, read
from draftkit.decoding.state import DecodeState, Request, Slot, make_group
from tests.decoding.driving import (
    DRAFT,
    SAMPLINGS,
    Answer,
    Schedule,
    assert_same,
    drive,
    request,
)
from tests.tabular import random_adapter, relative

LATE = pytest.mark.parametrize("late", [False, True])


# Reading

GAMMA = 2


def launched(
    *, slots: list[int], rows: int, report: list[list[int]]
) -> tuple[Launched, dict[int, Slot]]:
    """A round of `slots` among `rows` slots, and what these hold; row n of every tensor holds n."""
    state = DecodeState.empty(rows, 16, torch.device("cpu"))
    for slot in slots:
        state.admit(slot, request([1]))
    size = len(report)
    group = make_group(state, slots, GAMMA, DRAFT, size=size)

    def numbered(width: int) -> Tensor:
        return torch.arange(size)[:, None].expand(size, width)

    tokens, drafts = numbered(GAMMA + 1), numbered(GAMMA)
    wide = tokens.float()
    outcome = Outcome(torch.tensor(report), tokens, drafts, drafts.float(), wide, wide, wide)
    held = state.slots
    return Launched(group, [*held.values()], "v1", [], outcome, None), held


def numbers(result: RoundResult) -> list[list[int]]:
    """The rows that each tensor of `result` holds."""
    tensors = (
        result.tokens,
        result.draft_tokens,
        result.acceptance,
        result.target_log_probs,
        result.log_sum_exp,
        result.served_log_sum_exp,
    )
    return [tensor[:, 0].tolist() for tensor in tensors]


@pytest.mark.parametrize(
    ("gone", "kept"),
    [
        ({}, [1, 5]),  # slot 2 did not move
        ({5: None}, [1]),  # slot 5 is free
        ({5: [1]}, [1]),  # slot 5 is another's, though it asks for the same
        ({1: None, 5: None}, []),
    ],
)
def test_rows_of_fillers_of_others_and_of_those_that_stood_still_are_dropped(
    gone: dict[int, list[int] | None], kept: list[int]
) -> None:
    moved, still = [2, 2, 0, 0, 2], [0] * 5
    # Slots 0 and 3 fill the batch up.
    report = [still, moved, still, still, moved]
    round_, held = launched(slots=[1, 2, 5], rows=6, report=report)
    assert round_.group.index.tolist() == [0, 1, 2, 3, 5]
    for slot, prompt in gone.items():
        old = held.pop(slot)
        if prompt is not None:
            held[slot] = replace(old, request=request(prompt))
    result = read(round_, held)
    assert result.slots == kept
    places = {1: 1, 5: 4}
    assert numbers(result) == [[places[slot] for slot in kept]] * 6
    assert len(result.emitted) == len(kept)


def test_only_rows_whose_every_proposal_could_pass_teach_acceptance() -> None:
    report = [[3, 3, 0, 0, 2], [1, 1, 1, 1, 2], [2, 2, 0, 0, 1], [1, 1, 0, 0, 2], [3, 1, 0, 1, 2]]
    result = read(*launched(slots=[*range(5)], rows=5, report=report))
    # Not the row that met its end of text, nor the one with a proposal less.
    assert result.full_tests == [2, 0, 2]


# A round late


def decoder_of(
    *,
    late: bool,
    slots: int = 3,
    eos: Sequence[int] = (7,),
    policy: Schedule | None = None,
    **options: Any,
) -> Decoder:
    target = random_adapter(8, 1)
    decoder = Decoder(target, slots=slots, capacity=80, eos_token_ids=eos, late=late, **options)
    decoder.gamma_policy = policy
    decoder.attach(DRAFT, DraftModelProposer(relative(target, 2), version="v1"))
    return decoder


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
    decoder = decoder_of(late=True, eos=())
    (slot,) = decoder.join([request([1, 2], new=20)])
    assert decoder.round() == []
    (first,) = decoder.round()
    assert first.slots == [slot]
    twin = decoder_of(late=False, eos=())
    twin.join([request([1, 2], new=20)])
    assert torch.equal(first.tokens, twin.round()[0].tokens)


@pytest.mark.parametrize(("slots", "verification"), [(1, "match"), (3, "block"), (20, "block")])
def test_late_completions_are_the_same(verification: str, slots: int) -> None:
    found = [
        drive(decoder_of(late=late, slots=slots, verification=verification), requests_of(20))
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
    whole = drive(decoder_of(late=False), requests)
    for late in (False, True):
        assert_prefixes(drive(decoder_of(late=late), requests, stays=STAYS), whole)


def test_were_slots_known_by_number_the_next_request_would_get_the_last_ones_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trusting(launched: Launched, slots: dict[int, Slot]) -> RoundResult:
        held = dict(zip(launched.group.members, launched.held, strict=True))
        return read(launched, {number: held[number] for number in slots if number in held})

    whole = drive(decoder_of(late=False), requests_of(20))
    monkeypatch.setattr(decoder_module, "read", trusting)
    with pytest.raises(AssertionError):
        assert_prefixes(drive(decoder_of(late=True), requests_of(20), stays=STAYS), whole)


def test_a_round_keeps_the_version_that_it_was_proposed_with() -> None:
    decoder = decoder_of(late=True, eos=())
    decoder.join([request([1, 2], new=30)])
    decoder.round()
    weights = relative(random_adapter(8, 1), 9).state_dict()
    decoder.swap(DRAFT, weights, "v2")
    assert [decoder.round()[0].proposer_version for _ in range(2)] == ["v1", "v2"]


def test_results_of_rows_that_have_all_left_are_no_results() -> None:
    decoder = decoder_of(late=True, eos=())
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
    decoder = decoder_of(late=late, eos=(), policy=policy)
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
            drive(decoder_of(late=late, eos=(), policy=Schedule([4, 0, 0, 2, 1, 0])), [one])
            for late in (False, True)
        ]
        assert_same(found[1], found[0], atol=0)


@LATE
def test_a_policy_is_told_what_became_of_its_rounds(late: bool) -> None:
    policy = Schedule([2, 1])
    decoder = decoder_of(late=late, eos=(), policy=policy)
    (answer,) = drive(decoder, [replace(request([1, 2], new=12, gamma=2), adapts=True)])
    told = [(gamma, accepted[0]) for gamma, accepted in policy.told if accepted]
    assert told == [(fact[0][0], fact[0][2] - 1) for fact in answer.facts]
