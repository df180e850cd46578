"""The number of proposals is chosen by what decoding with it would show."""

from dataclasses import replace

import pytest
import torch

from draftkit.config import Config, DecodeConfig, EvaluateConfig, SamplingConfig
from draftkit.decoding.composite import HybridProposer
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.evaluation.alpha import PromptTotals, score_contexts
from draftkit.evaluation.choice import (
    chosen_numbers,
    correct,
    guessed_lengths,
    hybrid_numbers,
    mixed_rounds,
)
from draftkit.theory.acceptance import MODES, by_position, rounds_of_texts
from draftkit.theory.speedup import Costs
from tests.records import records_of
from tests.tabular import random_adapter, relative

COSTS = Costs(0.01, 0.1, 1.1, 0.05, {1: 1.0, 12: 1.2}, {1: 0.1, 12: 1.2})
SERVED, GREEDY = SamplingConfig(), SamplingConfig(temperature=0)


def decoded(target, count, tokens, gamma=0, *, sampling=SERVED, seed=0, proposer=None, first=0):
    rows = range(first, first + count)
    prompts = [[row % 8, (row // 8) % 8, row % 5] for row in rows]
    requests = make_requests(
        prompts, max_new_tokens=tokens, sampling=sampling, gamma=gamma, seed=seed
    )
    proposer = proposer or (PromptLookup() if gamma else None)
    return decode(target, [*requests], eos_token_ids=(), batch_size=64, proposer=proposer)


def test_replayed_guesses_are_the_rounds_of_greedy_decoding():
    """Greedy text is the same whoever proposes, so every pass of the target can be compared."""
    target = random_adapter(8, 0)
    texts = records_of(decoded(target, 24, 30, sampling=GREEDY), GREEDY)
    taus = guessed_lengths(PromptLookup(), texts)
    for gamma in (1, 3, 12):
        answers = decoded(target, 24, 30, gamma, sampling=GREEDY)
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
    # No guess; then 2; 2, 4 and then 5 for 1; 4.
    assert whole == [None, None, None, 1, 0, None, 2, 1, 0]
    assert other[:4] == whole[:4]


class Counted(HybridProposer):
    """Counts its rounds: by guesses, and by the draft."""

    def pick(self, view):
        part, gamma = super().pick(view)
        self.rounds[part is self.guesser] += 1
        return part, gamma


def rounds_of_decoding(target, draft, gamma, draft_gamma, lookup_min):
    """Rounds by guesses and by the draft of 24 greedy texts, text by text."""
    lookup, rounds = PromptLookup(min_ngram=lookup_min), []
    for row in range(24):  # one by one: rows that are decoded together share their number
        hybrid = Counted(lookup, DraftModelProposer(draft), draft_gamma=draft_gamma)
        hybrid.rounds = {True: 0, False: 0}
        decoded(target, 1, 30, gamma, sampling=GREEDY, proposer=hybrid, first=row)
        rounds.append((hybrid.rounds[True], hybrid.rounds[False]))
    return rounds


def greedy_texts():
    target = random_adapter(8, 0)
    draft = relative(target, 1)
    texts = records_of(decoded(target, 24, 30, sampling=GREEDY), GREEDY)
    shares = score_contexts(target, draft, texts, sampling=GREEDY, batch_size=24).shares["alpha"]
    return target, draft, texts, shares


@pytest.mark.parametrize(
    ("guesses", "draft_gamma", "least"), [(3, 3, 2), (5, 1, 1), (8, 2, 2), (2, 1, 3)]
)
def test_the_expected_rounds_of_greedy_texts_are_those_of_a_hybrid(guesses, draft_gamma, least):
    target, draft, texts, shares = greedy_texts()
    runs = [correct(PromptLookup(min_ngram=least), one) for one in texts]
    accepted = [by_position(one, draft_gamma).tolist() for one in shares]
    expected = [
        mixed_rounds(*text, gamma=guesses, draft_gamma=draft_gamma)
        for text in zip(runs, accepted, strict=True)
    ]
    assert expected == rounds_of_decoding(target, draft, guesses, draft_gamma, least)
    assert len({*expected}) > 3


def test_a_hybrid_gets_the_settings_with_which_greedy_decoding_takes_least_time():
    target, draft, texts, shares = greedy_texts()
    chosen = hybrid_numbers(texts, shares, COSTS)

    def seconds(gamma, draft_gamma, lookup_min):
        by_guess, by_draft = map(
            sum,
            zip(*rounds_of_decoding(target, draft, gamma, draft_gamma, lookup_min), strict=True),
        )
        guess = COSTS.verify_at(gamma) + COSTS.overhead_ratio
        return by_guess * guess + by_draft * COSTS.round_at(draft_gamma)

    least = seconds(**chosen)
    tried = {"gamma": (3, 12), "draft_gamma": (1, 2, 3), "lookup_min": (1, 2, 3)}
    others = [chosen | {key: value} for key, values in tried.items() for value in values]
    others += [{"gamma": 6, "draft_gamma": 2, "lookup_min": n} for n in (1, 3)]
    others = [one for one in others if one["draft_gamma"] <= one["gamma"]]
    assert all(seconds(**one) >= least for one in others)
    assert any(seconds(**one) > 1.05 * least for one in others)


def test_without_guesses_the_expected_rounds_are_those_of_the_draft_alone():
    shares = torch.rand(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for one in (shares, shares[:, 0]):
        alone = rounds_of_texts([one], 4).counts
        by_guess, by_draft = mixed_rounds(
            [None] * 40, by_position(one, 4).tolist(), gamma=9, draft_gamma=4
        )
        assert by_guess == 0
        assert by_draft == pytest.approx(float(alone))


def chosen(alpha, costs=COSTS, batch_size=1, **decode):
    target = random_adapter(8, 0)
    texts = records_of(decoded(target, 8, 30), SERVED)
    shares = {mode: [torch.full((30,), alpha)] * 8 for mode in MODES}
    total = {mode: torch.full((8,), 30 * alpha) for mode in shares}
    scored = PromptTotals(total, torch.full((8,), 30.0), shares)
    draft = relative(target, 1)
    ways = {
        "after": DraftModelProposer(draft),
        "hybrid": HybridProposer(PromptLookup(), DraftModelProposer(draft)),
        "prompt_lookup": PromptLookup(),
    }
    evaluate = EvaluateConfig(timing_batch_size=batch_size)
    config = Config(decode=DecodeConfig(gamma="auto", **decode), evaluate=evaluate)
    return chosen_numbers(ways, {"after": costs}, {"after": scored}, texts, config), texts


def test_each_way_has_the_number_that_pays_most_at_its_own_lengths_and_costs():
    for alpha in (0.2, 0.5, 0.8):
        found, texts = chosen(alpha)

        def gain(gamma, alpha=alpha):
            return sum(alpha**i for i in range(gamma + 1)) / COSTS.round_at(gamma)

        best = max(range(1, 13), key=gain)
        assert found["after"] == {"gamma": best}
        free = replace(COSTS, cost_ratio=0.0, draft_units={})
        taus = guessed_lengths(PromptLookup(), texts)
        gains = [tau / free.round_at(gamma) for gamma, tau in enumerate(taus, 1)]
        assert found["prompt_lookup"] == {"gamma": 1 + gains.index(max(gains))}
        assert free.draft_at(7) == 0


def test_a_hybrid_drafts_by_what_drafts_cost_and_guesses_whatever_they_cost():
    dear = replace(COSTS, draft_units={1: 2.0, 12: 24.0})
    cheap, costly = (chosen(0.8, costs)[0]["hybrid"] for costs in (COSTS, dear))
    assert cheap["draft_gamma"] > costly["draft_gamma"] == 1
    assert costly["gamma"] > 1


def test_a_hybrid_has_the_number_of_its_draft_where_rows_share_rounds_and_on_cuda(monkeypatch):
    assert len(chosen(0.5)[0]["hybrid"]) == 3
    found, _ = chosen(0.5, batch_size=4)
    assert found["hybrid"] == found["after"]
    monkeypatch.setattr(HybridProposer, "on_cuda", True)
    assert chosen(0.5)[0]["hybrid"] == found["after"]


def test_a_drafter_of_one_pass_is_given_more_proposals_than_one_of_many():
    """Eight tokens of a parallel drafter cost what one does."""
    parallel = replace(COSTS, draft_units={1: 0.1, 12: 0.1})
    assert chosen(0.6)[0]["after"]["gamma"] < chosen(0.6, parallel)[0]["after"]["gamma"]


def test_a_drafter_that_pays_nowhere_still_has_a_number_to_be_timed_with():
    dear = replace(COSTS, draft_units={1: 2.0, 12: 24.0})
    assert chosen(0.1, dear)[0]["after"] == {"gamma": 1}
