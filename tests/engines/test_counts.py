"""Our decoder counted as engines count: passes, accepted proposals, where answers end."""

import pytest
import torch

from draftkit.decoding.generation import Completion, TraceRound
from draftkit.decoding.proposers import DraftModelProposer
from tests.engines.counts import (
    Answer,
    Counting,
    OurDecoder,
    accepted_at,
    accepted_by_pass,
    answer_of,
    cut_at_end,
    summed,
    tokens_a_pass,
)
from tests.tabular import random_adapter, relative

GAMMA, LIMIT, END = 3, 12, 5
VOCAB = 6


def traced(*rounds: tuple[list[int], int, int]) -> Completion:
    """A completion of rounds: proposals, how many were accepted, the token behind them."""
    steps = [TraceRound(proposed, n, token, n + 1) for proposed, n, token in rounds]
    return Completion([1], steps=steps)


ROUNDS = traced(([1, 2, 3], 3, 4), ([1, END, 2], 2, 0), ([1, 1, 1], 3, 2), ([0, 0, 0], 1, 1))


@pytest.mark.parametrize(
    ("limit", "ends", "capped", "expected"),
    [
        (20, (), False, [3, 2, 3, 1]),
        (20, (END,), False, [3, 2]),  # the pass with the end counts whole, none behind it
        (9, (), False, [3, 2, 3]),  # the last began at token 7
        (9, (), True, [3, 2, 1]),  # and had room for one proposal and its own token
        (7, (), True, [3, 2]),
        (8, (), True, [3, 2, 0]),  # room for no proposal
    ],
)
def test_passes_are_counted_as_the_engine_counts_them(
    limit: int, ends: tuple[int, ...], capped: bool, expected: list[int]
) -> None:
    assert accepted_by_pass(ROUNDS, limit=limit, ends=ends, capped=capped) == expected


def test_counts_become_shares() -> None:
    one = answer_of([3, 0, 2], [1] * 8, GAMMA)
    assert (one.passes, one.accepted, one.by_position) == (3, 5, [2, 2, 1])
    two = answer_of([1], [1] * 2, GAMMA)
    assert tokens_a_pass([one, two]).mean == (3 + 5 + 1 + 1) / 4
    assert accepted_at([one, two]) == [3 / 4, 2 / 4, 1 / 4]
    assert accepted_at([one, Answer(ids=[], passes=2, accepted=1)]) is None
    both = summed([[one, two], [two, one]])
    assert [answer.passes for answer in both] == [4, 4]
    assert both[0].by_position == [3, 2, 1]
    assert both[0].ids == one.ids


def test_an_answer_ends_with_its_end() -> None:
    assert cut_at_end([1, 2, END, 3], (END,)) == [1, 2, END]
    assert cut_at_end([1, 2], (END,)) == [1, 2]


@pytest.mark.parametrize("first_alone", [True, False])
@pytest.mark.parametrize("capped", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_make_up_the_answer(first_alone: bool, capped: bool, temperature: float) -> None:
    target = random_adapter(VOCAB, seed=0)
    decoder = OurDecoder(
        target=target,
        proposer=DraftModelProposer(relative(target, seed=1)),
        ends=(END,),
        gamma=GAMMA,
        counting=Counting(first_alone=first_alone, capped=capped),
        batch_size=3,
    )
    prompts = [[number % VOCAB, 1] for number in range(24)]
    answers = decoder.answers(prompts, temperature=temperature, limit=LIMIT, seed=3)
    ended = [one for one in answers if END in one.ids]
    assert 0 < len(ended) < len(answers)
    for one in answers:
        emitted = one.passes + one.accepted + first_alone
        assert one.by_position is not None
        assert sum(one.by_position) == one.accepted
        if END in one.ids:
            assert one.ids.index(END) == len(one.ids) - 1
            assert len(one.ids) <= emitted <= len(one.ids) + GAMMA
        elif capped:
            assert emitted == len(one.ids) == LIMIT
        else:
            assert LIMIT <= emitted <= LIMIT + GAMMA
    again = decoder.answers(prompts, temperature=temperature, limit=LIMIT, seed=4)
    assert ([one.ids for one in again] == [one.ids for one in answers]) == (temperature == 0)


def test_a_first_token_of_its_own_is_the_targets() -> None:
    """Whether it comes alone or in a round, a greedy answer is the same."""
    target = random_adapter(VOCAB, seed=0)
    greedy = [
        OurDecoder(
            target=target,
            proposer=DraftModelProposer(relative(target, seed=1)),
            ends=(),
            gamma=GAMMA,
            counting=Counting(first_alone=alone, capped=True),
            batch_size=2,
        ).answers([[1], [2], [3]], temperature=0, limit=LIMIT, seed=0)
        for alone in (True, False)
    ]
    assert [one.ids for one in greedy[0]] == [one.ids for one in greedy[1]]


def test_the_length_of_a_pass_is_the_mean_over_all_of_them() -> None:
    counts = torch.tensor([[2.0, 1.0], [4.0, 2.0]])
    answers = [Answer(ids=[], passes=int(p), accepted=int(a)) for p, a in counts]
    assert tokens_a_pass(answers).mean == 1 + 3 / 6
