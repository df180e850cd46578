"""Results read late are those read at once, whoever has left or joined in between."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import LIKELIEST, Completion, finish, record
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.results import RoundResult
from draftkit.decoding.state import Request
from tests import tiny
from tests.decoding.driving import (
    DRAFT,
    SAMPLINGS,
    Answer,
    Schedule,
    assert_same,
    decoder_of,
    drive,
    request,
    strict_compiler,
)
from tests.decoding.pretended import pretended_device, put_on_device
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


# Who waits for whom: the host for the round before, the device for nobody


def requests(count: int, *, new: Sequence[int] = (12, 5, 9)) -> list[Request]:
    return [
        request([1 + row % 5, 2], new=new[row % 3], sampling=SAMPLINGS[row % 4], row=row)
        for row in range(count)
    ]


def answers(decoder: Decoder, wanted: Sequence[Request]) -> list[list[int]]:
    """Decode them, as many at once as there are slots, and read all that rounds report."""
    read = finish(decoder, wanted)
    for answer in read:
        assert all(map(math.isfinite, answer.tail_mass))
        assert len(answer.topk_ids) == len(answer.topk_log_probs) == len(answer.output_ids)
    return [answer.output_ids for answer in read]


def test_the_host_waits_for_the_round_before_while_the_next_is_under_way() -> None:
    """From the first prompt to the last answer no value is read but what has been copied."""
    wanted = requests(7)
    expected = answers(decoder_of(slots=3, late=False, top_k=2, eos_token_ids=[7]), wanted)
    decoder = put_on_device(decoder_of(slots=3, late=True, top_k=2, eos_token_ids=[7]))
    with pretended_device() as device:
        assert answers(decoder, wanted) == expected
    assert len(device.waits) > 10
    # As many results as are behind when one is read: those of the next round, of one group.
    behind = [made - number - 1 for number, made in device.waits]
    assert set(behind) == {1}


def test_rounds_of_the_same_rows_are_read_without_a_look_at_the_device() -> None:
    decoder = put_on_device(decoder_of(slots=3, late=True))
    with pretended_device(lists_wait=False) as device:
        slots = decoder.join(requests(3, new=(60, 60, 60)))
        running = {slot: Completion([]) for slot in slots}
        for _ in range(5):
            for result in decoder.round():
                record(running, result)
    assert [number for number, _ in device.waits] == [0, 1, 2, 3]
    assert all(completion.rounds == 4 for completion in running.values())


def test_read_at_once_a_round_is_waited_for_and_no_other() -> None:
    wanted = requests(4)
    decoder = put_on_device(decoder_of(slots=3, late=False, top_k=2, eos_token_ids=[7]))
    with pretended_device() as device:
        answers(decoder, wanted)
    assert all(made == number + 1 for number, made in device.waits)


def test_the_event_is_of_the_stream_of_the_rounds_own_device() -> None:
    decoder = put_on_device(decoder_of(slots=1, late=True, top_k=2, eos_token_ids=[7]))
    with pretended_device() as device:
        answers(decoder, requests(1))
    assert {stream.device for stream in device.streams} == {decoder.target.device}


# The target's likeliest ids


K = 5


@pytest.mark.parametrize("late", [False, True])
def test_ids_log_probabilities_and_tails_are_those_of_a_fresh_pass(late: bool) -> None:
    target, draft = tiny.pair()
    decoder = Decoder(target, slots=4, capacity=64, late=late, top_k=K)
    decoder.attach(DRAFT, DraftModelProposer(draft))
    prompts = tiny.prompts([3, 9, 1, 14])
    requests = [
        request(prompt, new=9 + row, row=row, sampling=SAMPLINGS[row], gamma=2 + row % 2)
        for row, prompt in enumerate(prompts)
    ]
    for prompt, sampling, answer in zip(prompts, SAMPLINGS, finish(decoder, requests), strict=True):
        ids, log_probs, tails = (torch.tensor(getattr(answer, name)) for name in LIKELIEST)
        text = torch.tensor([prompt + answer.output_ids])
        keep = torch.zeros_like(text, dtype=torch.bool)
        keep[:, len(prompt) - 1 : -1] = True
        with torch.no_grad():
            logits = target.score(text, keep).double()
        expected = logits.log_softmax(-1).topk(K)
        assert torch.equal(ids, expected.indices)
        torch.testing.assert_close(log_probs.double(), expected.values, atol=1e-4, rtol=0)
        kept = (logits / (sampling.temperature or 1)).softmax(-1).gather(-1, ids).sum(-1)
        torch.testing.assert_close(tails.double(), 1 - kept, atol=1e-5, rtol=0)
        assert tails.max() > 0.01  # there is something to tell


def play(top_k: int, *, compiled: bool = False) -> list[Tensor]:
    decoder = Decoder(random_adapter(8, 5), slots=1, capacity=32, compiled=compiled, top_k=top_k)
    (answer,) = finish(decoder, [request([1, 2], new=6, gamma=0)])
    return [torch.tensor(getattr(answer, name)) for name in LIKELIEST]


def test_compiled_rounds_name_the_same_ids_and_each_count_is_code_of_its_own() -> None:
    with strict_compiler() as strict:
        for made, top_k in enumerate((3, 2), start=1):
            ours = play(top_k, compiled=True)
            assert strict.made == made
            torch.testing.assert_close(ours, play(top_k), atol=1e-12, rtol=1e-12)
            assert ours[0].shape == (6, top_k)


def test_no_more_ids_are_named_than_leave_a_rest() -> None:
    ids, _, tails = play(99)
    assert ids.shape[1] == 7
    assert (tails > 0).all()


def test_without_asking_none_are_named() -> None:
    assert [len(part) for part in play(0)] == [0, 0, 0]
