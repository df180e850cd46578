"""The number of proposals is chosen by what decoding with it would show."""

from dataclasses import replace

import pytest
import torch

from draftkit.config import Config, DecodeConfig, SamplingConfig
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.alpha import PromptTotals
from draftkit.evaluation.choice import chosen_numbers, correct, guessed_lengths
from draftkit.theory.acceptance import MODES
from draftkit.theory.speedup import Costs
from tests.records import records_of
from tests.tabular import random_adapter, relative

COSTS = Costs(0.01, 0.1, 1.1, 0.05, {1: 1.0, 12: 1.2}, {1: 0.1, 12: 1.2})
SERVED = SamplingConfig()


def decoded(target, count, tokens, gamma=0, *, sampling=SERVED, seed=0):
    prompts = [[row % 8, (row // 8) % 8, row % 5] for row in range(count)]
    requests = make_requests(
        prompts, max_new_tokens=tokens, sampling=sampling, gamma=gamma, seed=seed
    )
    proposer = PromptLookup() if gamma else None
    return decode(target, [*requests], eos_token_ids=(), batch_size=64, proposer=proposer)


def test_replayed_guesses_are_the_rounds_of_greedy_decoding():
    """Greedy text is the same whoever proposes, so every pass of the target can be compared."""
    target, greedy = random_adapter(8, 0), SamplingConfig(temperature=0)
    texts = records_of(decoded(target, 24, 30, sampling=greedy), greedy)
    taus = guessed_lengths(PromptLookup(), texts)
    for gamma in (1, 3, 12):
        answers = decoded(target, 24, 30, gamma, sampling=greedy)
        assert [one.output_ids for one in answers] == [one.output_ids for one in texts]
        passes = sum(one.rounds for one in answers)
        assert taus[gamma - 1] == pytest.approx(24 * 30 / passes)
    assert taus[11] > taus[0] > 1


def test_guesses_see_nothing_of_what_follows():
    """Whatever stands behind a token, what is guessed before it stays the same."""
    text = [1, 2, 3, 1, 2, 4, 1, 2, 4, 5]
    (one,) = records_of(decoded(random_adapter(8, 0), 1, 3), SERVED)
    whole = correct(PromptLookup(), replace(one, prompt_ids=[1], output_ids=text[1:]))
    other = correct(PromptLookup(), replace(one, prompt_ids=[1], output_ids=[*text[1:5], 7, 7, 7]))
    assert whole == [0, 0, 0, 1, 0, 0, 2, 1, 0]  # 2; 2, 4 and then 5 for 1; 4
    assert other[:4] == whole[:4]


def chosen(alpha, costs=COSTS, **decode):
    shares = {mode: [torch.full((64,), alpha)] for mode in MODES}
    total = {mode: torch.tensor([64 * alpha]) for mode in shares}
    scored = PromptTotals(total, torch.tensor([64.0]), shares)
    target = random_adapter(8, 0)
    ways = {
        "after": lambda: DraftModelProposer(relative(target, 1)),
        "hybrid": lambda: DraftModelProposer(relative(target, 1)),
        "prompt_lookup": PromptLookup,
    }
    texts = records_of(decoded(target, 8, 30), SERVED)
    config = Config(decode=DecodeConfig(gamma="auto", **decode))
    return chosen_numbers(ways, {"after": costs}, {"after": scored}, texts, config), texts


def test_each_way_has_the_number_that_pays_most_at_its_own_lengths_and_costs():
    for alpha in (0.2, 0.5, 0.8):
        found, texts = chosen(alpha)

        def gain(gamma, alpha=alpha):
            return sum(alpha**i for i in range(gamma + 1)) / COSTS.round_at(gamma)

        assert found["after"] == found["hybrid"] == max(range(1, 13), key=gain)
        free = replace(COSTS, cost_ratio=0.0, draft_units={})
        taus = guessed_lengths(PromptLookup(), texts)
        gains = [tau / free.round_at(gamma) for gamma, tau in enumerate(taus, 1)]
        assert found["prompt_lookup"] == 1 + gains.index(max(gains))
        assert free.draft_at(7) == 0


def test_a_drafter_of_one_pass_is_given_more_proposals_than_one_of_many():
    """Eight tokens of a parallel drafter cost what one does."""
    parallel = replace(COSTS, draft_units={1: 0.1, 12: 0.1})
    assert chosen(0.6)[0]["after"] < chosen(0.6, parallel)[0]["after"]


def test_a_drafter_that_pays_nowhere_still_has_a_number_to_be_timed_with():
    dear = replace(COSTS, draft_units={1: 2.0, 12: 24.0})
    assert chosen(0.1, dear)[0]["after"] == 1
