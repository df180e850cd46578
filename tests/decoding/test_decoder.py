"""The decoder's face: what a round reports, who may join, leave, attach, detach and swap.

That its tokens have the target's law is `test_exactness.py`'s business.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from draftkit.decoding.decoder import Decoder, RoundResult, RoundSeconds, tokens_needed
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.state import Request
from tests.decoding.checks import served
from tests.decoding.driving import SAMPLINGS, TEXTS, request
from tests.tabular import random_adapter, relative

request_of = partial(request, new=8)


def tabular_decoder(
    *, slots: int = 4, capacity: int = 64, context: int = 1 << 20, draft_context: int = 1 << 20
) -> Decoder:
    target = random_adapter(8, 1, max_positions=context)
    draft = relative(target, 2)
    draft.max_positions = draft_context
    decoder = Decoder(target, slots=slots, capacity=capacity)
    decoder.attach("draft", DraftModelProposer(draft, version="v1"))
    return decoder


# What a round reports


TARGET = random_adapter(8, 1)
DRAFT_MODEL = relative(TARGET, 2)
Played = list[tuple[RoundResult, list[list[int]]]]  # with the texts before each round


@pytest.fixture(scope="module")
def rounds() -> Played:
    """Rounds of gamma 3 over rows of every sampling."""
    decoder = Decoder(TARGET, slots=4, capacity=64)
    decoder.attach("draft", DraftModelProposer(DRAFT_MODEL, version="v7"))
    texts = [[*text] for text in TEXTS]
    decoder.join(
        [
            request_of(text, new=18, gamma=3, sampling=SAMPLINGS[row], row=row)
            for row, text in enumerate(TEXTS)
        ]
    )
    played = []
    while results := decoder.round():
        (result,) = results
        assert (result.gamma, result.proposer_version) == (3, "v7")
        played.append((result, [list(texts[slot]) for slot in result.slots]))
        for row, slot in enumerate(result.slots):
            texts[slot] += result.tokens[row, : result.committed[row]].tolist()
    return played


def test_reported_log_probs_are_the_raw_targets(rounds: Played) -> None:
    for result, texts in rounds:
        for row, slot in enumerate(result.slots):
            count = result.emitted[row]
            tokens = result.tokens[row, :count].tolist()
            logits = TARGET.logits(torch.tensor([texts[row] + tokens[:-1]]))[0, -count:]
            expected = logits.log_softmax(-1)[torch.arange(count), tokens]
            temperature = SAMPLINGS[slot].temperature or 1.0
            for found, own in (
                (result.target_log_probs, expected),
                (result.log_sum_exp, logits.logsumexp(-1)),
                (result.served_log_sum_exp, (logits / temperature).logsumexp(-1)),
            ):
                torch.testing.assert_close(found[row, :count], own, atol=1e-10, rtol=0)


def test_reported_acceptance_is_the_overlap_of_the_served_laws(rounds: Played) -> None:
    for result, texts in rounds:
        for row, slot in enumerate(result.slots):
            proposals = result.draft_tokens[row].tolist()
            for i in range(3):
                before = torch.tensor([texts[row] + proposals[:i]])
                p, q = (served(model, before, SAMPLINGS[slot]) for model in (TARGET, DRAFT_MODEL))
                overlap = torch.minimum(p, q).sum()
                torch.testing.assert_close(result.acceptance[row, i], overlap, atol=1e-10, rtol=0)


def test_acceptance_of_one_hot_proposals_is_the_targets_probability_of_them() -> None:
    target = random_adapter(8, 1)
    decoder = Decoder(target, slots=1, capacity=32)
    decoder.attach("draft", DraftModelProposer(relative(target, 2), tokens="argmax"))
    decoder.join([request_of([3, 1], gamma=2)])
    (result,) = decoder.round()
    text = torch.tensor([[3, 1, *result.draft_tokens[0].tolist()]])
    law = target.logits(text)[0, 1:3].softmax(-1)
    own = law.gather(1, result.draft_tokens[0][:, None])[:, 0]
    torch.testing.assert_close(result.acceptance[0], own)


def test_a_clock_tells_where_the_time_of_a_round_went() -> None:
    ticks = iter([0.0, 2.0, 5.0, 9.0])
    target = random_adapter(8, 1)
    decoder = Decoder(target, slots=1, capacity=32)
    decoder.clock = lambda: next(ticks)
    decoder.join([request_of([1], gamma=0)])
    (result,) = decoder.round()
    assert result.seconds == RoundSeconds(propose=2.0, verify=3.0, rest=4.0)
    assert result.proposer_version == ""
    decoder.clock = None
    assert decoder.round()[0].seconds == RoundSeconds(0.0, 0.0, 0.0)


# Groups


def test_rows_run_by_gamma_and_proposer() -> None:
    decoder = tabular_decoder(slots=6)
    decoder.attach("other", DraftModelProposer(relative(random_adapter(8, 1), 3), version="w"))
    decoder.join(
        [
            request_of([1], gamma=2),
            request_of([2], gamma=0),
            request_of([3], gamma=2, proposer_id="other"),
            request_of([4], gamma=1),
            request_of([5], gamma=2),
        ]
    )
    results = decoder.round()
    found = {(r.gamma, r.proposer_version): r.slots for r in results}
    assert found == {(2, "v1"): [0, 4], (0, ""): [1], (2, "w"): [2], (1, "v1"): [3]}
    assert [r.tokens.shape for r in results] == [(len(r.slots), r.gamma + 1) for r in results]


def test_finished_rows_stand_still_until_they_leave() -> None:
    decoder = tabular_decoder(slots=2)
    short, long = decoder.join([request_of([1, 2], new=1), request_of([3], new=40)])
    (result,) = decoder.round()
    assert result.done == [True, False]
    assert all(result.slots == [long] for result in decoder.round())
    assert decoder.free_slots == 0
    decoder.leave([short])
    assert decoder.free_slots == 1
    assert decoder.join([request_of([4])]) == [short]
    assert decoder.round()[0].slots == [short, long]


def test_a_decoder_without_rows_does_nothing() -> None:
    decoder = tabular_decoder()
    assert decoder.round() == []
    assert decoder.prefill() is False
    assert decoder.join([]) == []


# Who may join


def test_requests_that_just_fit_may_join() -> None:
    assert tokens_needed(request_of([1] * 6, new=8)) == 20  # 14 tokens and twice gamma + 1
    tabular_decoder(capacity=20).join([request_of([1] * 6, new=8)])
    decoder = tabular_decoder(context=12, draft_context=10)
    decoder.join([request_of([1] * 2)])
    decoder.join([request_of([1] * 4, gamma=0)])  # the draft is not asked


REFUSED: dict[str, tuple[dict[str, int], list[Request]]] = {
    "needs 21 cache slots, the decoder has 20": ({"capacity": 20}, [request_of([1] * 6, new=9)]),
    "3 requests, 2 free slots": ({"slots": 2}, [request_of([1])] * 3),
    "no proposer 'nobody' is attached": ({}, [request_of([1], proposer_id="nobody")]),
    "5 prompt tokens and 8 new ones exceed the context of 12 ": (
        {"context": 12},
        [request_of([1] * 4), request_of([1] * 5)],
    ),
    "context of 10 ": ({"context": 12, "draft_context": 10}, [request_of([1] * 3)]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_requests_that_do_not_fit_are_refused_before_any_has_joined(message: str) -> None:
    options, requests = REFUSED[message]
    decoder = tabular_decoder(**options)
    slots = decoder.free_slots
    with pytest.raises(ValueError, match=message):
        decoder.join(requests)
    assert decoder.free_slots == slots
    assert decoder.round() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "at least one token"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"proposer_id": None}, "gamma=2 needs a proposer"),
    ],
)
def test_requests_without_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(request_of([1]), **changes)


# Proposers


def test_a_proposer_in_use_cannot_be_replaced() -> None:
    decoder = tabular_decoder()
    (slot,) = decoder.join([request_of([1])])
    with pytest.raises(ValueError, match="proposer draft still serves rows"):
        decoder.attach("draft", DraftModelProposer(random_adapter(8, 9)))
    decoder.round()
    decoder.leave([slot])
    decoder.attach("draft", DraftModelProposer(random_adapter(8, 9), version="new"))
    decoder.join([request_of([1])])
    assert decoder.round()[0].proposer_version == "new"


def proposals(decoder: Decoder) -> list[list[int]]:
    """Proposals of many equal first rounds that differ in their noise alone."""
    slots = decoder.join([request_of([1, 2], row=row) for row in range(decoder.free_slots)])
    (result,) = decoder.round()
    decoder.leave(slots)
    return result.draft_tokens.tolist()


def test_swapped_weights_change_proposals_and_version_and_swapping_back_restores_them() -> None:
    decoder = tabular_decoder(slots=16)
    old = {k: v.clone() for k, v in relative(random_adapter(8, 1), 2).state_dict().items()}
    first = proposals(decoder)
    decoder.swap("draft", relative(random_adapter(8, 1), 5).state_dict(), "v2")
    second = proposals(decoder)
    assert second != first
    assert decoder.join([request_of([1])]) == [0]
    assert decoder.round()[0].proposer_version == "v2"
    decoder.leave([0])
    decoder.swap("draft", old, "v1")
    assert proposals(decoder) == first
