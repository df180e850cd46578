"""Whole completions: the target's greedy text, the same text in every batch, and honest counts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding import decoder as decoder_module
from draftkit.decoding import generation
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import (
    DRAFT_ID,
    Completion,
    TraceRound,
    decode,
    finish,
    make_requests,
)
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.state import Request
from draftkit.models.adapter import CausalAdapter
from tests import tiny
from tests.decoding.driving import decoder_of, request

GREEDY, SAMPLED = SamplingConfig(temperature=0.0), SamplingConfig(temperature=1.0)
LENGTHS = [7, 1, 19, 4]
NEW = 24
Pair = tuple[CausalAdapter, CausalAdapter]
architectures = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)


def generated(
    adapter: CausalAdapter, prompt: Sequence[int], eos: list[int] | None = None
) -> list[int]:
    """The greedy answer by the `generate` of transformers."""
    tokens = torch.tensor([list(prompt)])
    model: Any = adapter.model
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=257,
    )
    return output[0, tokens.shape[1] :].tolist()


def requests_of(
    prompts: list[list[int]], sampling: SamplingConfig = GREEDY, gamma: int = 4, new: int = NEW
) -> list[Request]:
    return list(make_requests(prompts, max_new_tokens=new, sampling=sampling, gamma=gamma, seed=3))


def run(
    pair: Pair,
    requests: list[Request],
    *,
    eos: Sequence[int] = (),
    batch_size: int = 8,
    verification: str = "speculative",
) -> list[Completion]:
    target, draft = pair
    return decode(
        target,
        requests,
        eos_token_ids=eos,
        batch_size=batch_size,
        proposer=DraftModelProposer(draft),
        verification=verification,
    )


def distinct_answer(target: CausalAdapter) -> tuple[list[int], list[int]]:
    """A prompt and its greedy answer whose first 8 tokens differ: each can be an end of text."""
    for seed in range(100):
        (prompt,) = tiny.prompts([6], seed=seed)
        answer = generated(target, prompt)
        if len(set(answer[:8])) == 8:
            return prompt, answer
    raise AssertionError("no prompt has an answer of distinct tokens")


# Greedy


@architectures
def test_greedy_speculative_text_is_what_the_target_generates(architecture: str) -> None:
    pair = tiny.pair(architecture)
    prompts = tiny.prompts(LENGTHS)
    expected = [generated(pair[0], prompt) for prompt in prompts]
    ragged = run(pair, requests_of(prompts))
    assert [answer.output_ids for answer in ragged] == expected
    proposed = sum(answer.tested for answer in ragged)
    assert 0 < sum(answer.accepted for answer in ragged) < proposed
    plain = run(pair, requests_of(prompts, gamma=0))
    assert [answer.output_ids for answer in plain] == expected


@pytest.mark.parametrize("gamma", [0, 3])
def test_several_ends_of_text_end_where_the_target_would(gamma: int) -> None:
    pair = tiny.pair("mistral")
    prompts = tiny.prompts(LENGTHS)
    whole = [generated(pair[0], prompt) for prompt in prompts]
    eos = [whole[0][5], whole[2][11], 257]
    answers = run(pair, requests_of(prompts, gamma=gamma), eos=eos)
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.output_ids == generated(pair[0], prompt, eos)
        assert answer.ended == (answer.output_ids[-1] in eos)
    assert {answer.ended for answer in answers} == {True, False}


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("gamma", [0, 4])
def test_a_text_may_fill_the_context_to_its_last_position(architecture: str, gamma: int) -> None:
    pair = tiny.pair(architecture)
    prompts = tiny.prompts([tiny.MAX_POSITIONS - NEW, tiny.MAX_POSITIONS - NEW - 5])
    answers = run(pair, requests_of(prompts, gamma=gamma))
    assert [answer.output_ids for answer in answers] == [generated(pair[0], p) for p in prompts]


# Sampled


def pair_in_double() -> Pair:
    return tiny.pair("qwen3", dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "verification"), [(2, "block"), (4, "speculative")])
def test_a_row_has_the_same_tokens_alone_and_in_any_batch(gamma: int, verification: str) -> None:
    pair = pair_in_double()
    requests = requests_of(tiny.prompts([9, 2, 17, 5, 1]), SAMPLED, gamma=gamma)
    together = [a.output_ids for a in run(pair, requests, verification=verification)]
    for one, expected in zip(requests, together, strict=True):
        assert run(pair, [one], verification=verification)[0].output_ids == expected
    mixed = [replace(requests[0], gamma=0, row=99), *reversed(requests)]
    answers = run(pair, mixed, batch_size=2, verification=verification)
    assert [a.output_ids for a in answers[:0:-1]] == together


def test_seed_and_row_make_the_text_and_nothing_else_does() -> None:
    pair = pair_in_double()
    one = requests_of(tiny.prompts([6]), SAMPLED)[0]
    wanted = [one, one, replace(one, row=1), replace(one, seed=4)]
    first, again, other_row, other_seed = (answer.output_ids for answer in run(pair, wanted))
    assert first == again
    assert first != other_row
    assert first != other_seed
    assert other_row != other_seed
    torch.manual_seed(1)
    assert run(pair, [one])[0].output_ids == first


# Counts


@pytest.mark.parametrize(
    ("new", "counts", "tested"),
    [(8, [0, 0, 0, 2], 6), (6, [0, 0, 0, 2], 6), (1, [0, 0, 0, 1], 3), (9, [0, 0, 0, 3], 9)],
)
def test_rounds_cut_by_the_length_limit_count_whole(
    new: int, counts: list[int], tested: int
) -> None:
    target = tiny.adapter("qwen2")
    (answer,) = run((target, target), requests_of(tiny.prompts([6]), gamma=3, new=new))
    assert len(answer.output_ids) == new
    assert (answer.accept_counts, answer.tested) == (counts, tested)
    assert (answer.rounds, answer.accepted) == (sum(counts), tested)
    assert answer.acceptance_total == pytest.approx(tested)


@pytest.mark.parametrize(("of_target", "of_draft"), [(16, 16), (16, 24), (24, 16)])
def test_what_lies_beyond_the_context_is_neither_tested_nor_counted(
    of_target: int, of_draft: int
) -> None:
    """A draft like its target has all accepted that is tested, also where the texts end."""
    target, draft = (
        tiny.adapter("qwen2", max_position_embeddings=context) for context in (of_target, of_draft)
    )
    requests = [
        requests_of([prompt], gamma=3, new=16 - len(prompt))[0]
        for prompt in tiny.prompts([8, 7, 6, 5])
    ]
    answers = run((target, draft), requests)
    # Of the last round the tokens before the context's end are left, and the one behind it.
    assert [answer.accept_counts for answer in answers] == [
        [0, 0, 0, 2],
        [0, 1, 0, 2],
        [0, 0, 1, 2],
        [0, 0, 0, 3],
    ]
    for answer in answers:
        assert answer.tested == answer.accepted
        assert answer.acceptance_total == pytest.approx(answer.tested)


@pytest.mark.parametrize(
    ("place", "counts", "tested"),
    # The last round counts with the tokens that it emitted: 1 to 4.
    [
        (4, [1, 0, 0, 1], 3 + 1),
        (5, [0, 1, 0, 1], 3 + 2),
        (6, [0, 0, 1, 1], 3 + 3),
        (7, [0, 0, 0, 2], 3 + 3),
    ],
)
def test_rounds_cut_by_an_end_of_text_count_what_they_emitted(
    place: int, counts: list[int], tested: int
) -> None:
    target = tiny.adapter("qwen2")
    prompt, whole = distinct_answer(target)
    (answer,) = run((target, target), requests_of([prompt], gamma=3), eos=[whole[place]])
    assert (answer.accept_counts, answer.tested) == (counts, tested)
    assert answer.acceptance_total == pytest.approx(tested)
    emitted = sum((accepted + 1) * count for accepted, count in enumerate(counts))
    assert emitted == len(answer.output_ids)  # one more than accepted, per target pass


def test_plain_decoding_counts_one_round_a_token_and_tests_nothing() -> None:
    target = tiny.adapter("qwen2")
    requests = requests_of(tiny.prompts([6]), gamma=0)
    (answer,) = decode(target, requests, eos_token_ids=(), batch_size=1)
    assert answer.accept_counts == [NEW]
    assert (answer.accepted, answer.tested, answer.acceptance_total) == (0, 0, 0.0)


# The loop


def test_answers_come_in_the_order_of_requests_through_few_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = []

    def counted(*args: Any, **options: Any) -> Decoder:
        slots.append(options["slots"])
        return Decoder(*args, **options)

    monkeypatch.setattr(generation, "Decoder", counted)
    pair = tiny.pair("qwen2")
    prompts = tiny.prompts([3, 12, 1, 8, 5])
    lengths = [20, 2, 9, 1, 15]
    requests = [
        requests_of([prompt], new=new)[0] for prompt, new in zip(prompts, lengths, strict=True)
    ]
    answers = run(pair, requests, batch_size=2)
    assert [answer.prompt_ids for answer in answers] == prompts
    assert [len(answer.output_ids) for answer in answers] == lengths
    run(pair, requests, batch_size=9)
    assert slots == [2, 5]
    assert run(pair, []) == []


def test_rows_are_grouped_anew_only_when_one_joins_or_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, real = [], decoder_module.make_group
    monkeypatch.setattr(
        decoder_module, "make_group", lambda *args, **size: made.append(1) or real(*args, **size)
    )
    answers = finish(decoder_of(), [request([1, 2], new=20)] * 3)
    assert answers[0].rounds > 3
    assert len(made) == 1  # equal rows join and end together


def test_requests_are_numbered_and_bounded() -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    made = list(
        make_requests(
            prompts,
            max_new_tokens=6,
            sampling=SAMPLED,
            gamma=2,
            seed=7,
            first_row=10,
            max_length=8,
        )
    )
    assert [request.prompt_ids for request in made] == prompts
    assert [request.row for request in made] == [10, 11, 12]
    assert [request.max_new_tokens for request in made] == [5, 6, 6]
    assert {(r.seed, r.gamma, r.proposer_id) for r in made} == {(7, 2, DRAFT_ID)}
    (plain,) = make_requests([[1]], max_new_tokens=3, sampling=SAMPLED)
    assert (plain.gamma, plain.proposer_id, plain.max_new_tokens) == (0, None, 3)


PLAIN = TraceRound(proposed=[], accepted=0, next_token=6, committed=1)
CUT = TraceRound(proposed=[4, 5, 7], accepted=2, next_token=6, committed=2)  # at the length limit


@pytest.mark.parametrize(
    ("rounds", "proposals", "rejected"),
    [
        ([TraceRound([4, 5], 2, 6, 3)], [4, 5, -1], [False, False, False]),  # a bonus
        ([TraceRound([4, 5, 7], 1, 6, 2)], [4, 5], [False, True]),  # a correction
        ([TraceRound([4, 5, 7], 2, None, 2)], [4, 5], [False, False]),  # an accepted end of text
        ([CUT], [4, 5], [False, False]),
        ([CUT, PLAIN], [4, 5, -1], [False, False, False]),
    ],
)
def test_each_token_knows_what_was_proposed_in_its_place(
    rounds: list[TraceRound], proposals: list[int], rejected: list[bool]
) -> None:
    answer = Completion([], output_ids=[9] * len(proposals), steps=rounds)
    expected = {"output_ids": answer.output_ids, "proposals": proposals, "rejected": rejected}
    assert answer.recorded(proposals=True) == expected
