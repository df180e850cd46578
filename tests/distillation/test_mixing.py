"""The law of a text whose tokens come from draft or target by a coin, against enumeration."""

import itertools
from collections import Counter

import pytest
import torch
from scipy import stats

from draftkit.config import SamplingConfig
from draftkit.distillation import mixing
from draftkit.distillation.mixing import AHEAD, MixtureSampler, never_greedy
from draftkit.distillation.samplers import AnswerSettings
from draftkit.theory.noise import sample
from draftkit.theory.verification import Verification
from draftkit.theory.warping import SamplingParams, warp
from tests.tabular import random_adapter

VOCAB, END, NEW, ROWS = 3, 2, 4, 6000
PROMPT = [0, 1]
TARGET = random_adapter(VOCAB, 3)
DRAFT = random_adapter(VOCAB, 4)


def settings(sampling, **changes):
    given = {"max_new_tokens": NEW, "max_length": 99, "batch_size": 3000}
    return AnswerSettings(sampling=sampling, eos_token_ids=[END], seed=7, **given | changes)


def texts(fraction, sampling, rows=ROWS, ahead=AHEAD, **limits):
    """Answers to PROMPT in rows 0 .. rows - 1."""
    how = {"fraction": fraction, "settings": settings(sampling, **limits), "gamma": ahead}
    sampler = MixtureSampler(target=TARGET, draft=DRAFT, **how)
    return sampler.sample([PROMPT] * rows, rows=range(rows), version="step 3")


def law(fraction, sampling):
    """Every possible answer with its probability."""
    options = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
    params = SamplingParams.uniform(1, **options)

    def next_law(text):
        target, draft = (
            warp(model.logits(torch.tensor([text]))[:, -1:], params)[0, 0]
            for model in (TARGET, DRAFT)
        )
        return fraction * draft + (1 - fraction) * target

    found = {}
    for answer in itertools.product(range(VOCAB), repeat=NEW):
        if END in answer:
            answer = answer[: answer.index(END) + 1]
        if answer in found:
            continue
        probability = 1.0
        for place, token in enumerate(answer):
            probability *= float(next_law(PROMPT + list(answer[:place]))[token])
        found[answer] = probability
    return found


def surprise(answers, expected):
    """The p-value of a chi-square test; rare answers count together, impossible ones not at all."""
    counts = Counter(tuple(answer.output_ids) for answer in answers)
    assert sum(expected.values()) == pytest.approx(1)
    if any(expected[answer] == 0 for answer in counts):
        return 0.0
    rare = {answer for answer, p in expected.items() if p * len(answers) < 8}
    pairs = [(counts[a], p * len(answers)) for a, p in expected.items() if a not in rare]
    rest = sum(counts[a] for a in rare), sum(expected[a] for a in rare) * len(answers)
    pairs += [rest] if rest[1] > 0 else []
    seen, wanted = zip(*pairs, strict=True)
    return float(stats.chisquare(seen, wanted).pvalue)


@pytest.mark.parametrize(
    ("ahead", "fraction", "sampling"),
    [
        (2, 0.5, SamplingConfig()),
        (4, 0.8, SamplingConfig(temperature=0.7, top_p=0.9)),
        (4, 0.3, SamplingConfig(temperature=0.0)),
    ],
)
def test_every_token_is_the_drafts_by_a_coin_else_the_targets(ahead, fraction, sampling):
    found = texts(fraction, sampling, ahead=ahead)
    assert surprise(found, law(fraction, sampling)) > 1e-3


def test_another_fraction_would_be_noticed():
    assert surprise(texts(0.4, SamplingConfig()), law(0.5, SamplingConfig())) < 1e-6


def test_a_bonus_of_the_target_after_a_run_of_drafted_tokens_would_be_noticed(monkeypatch):
    def with_bonus(fraction):
        def verify(*, target_probs, accept_uniform, next_uniform, **others):
            kept = (accept_uniform < fraction).long().cumprod(1).sum(1)
            probs = target_probs[torch.arange(len(kept)), kept]
            return Verification(kept, sample(probs=probs, uniform=next_uniform))

        return verify

    monkeypatch.setattr(mixing, "coins", with_bonus)
    assert surprise(texts(0.5, SamplingConfig(), ahead=1), law(0.5, SamplingConfig())) < 1e-6


def test_a_row_is_the_same_alone_and_among_others():
    together = texts(0.5, SamplingConfig(), rows=40, max_new_tokens=20)
    sampler = MixtureSampler(
        target=TARGET,
        draft=DRAFT,
        fraction=0.5,
        settings=settings(SamplingConfig(), batch_size=4, max_new_tokens=20),
    )
    rows = [33, 5, 12]
    alone = sampler.sample([PROMPT] * 3, rows=rows, version="step 3")
    assert alone == [together[row] for row in rows]


def test_records_say_that_both_sampled_under_what_is_served():
    greedy = SamplingConfig(temperature=0.0)
    (record,) = texts(0.5, greedy, rows=1)
    assert (record.sampler, record.sampler_version) == ("mix", "step 3")
    assert record.sampling == vars(greedy)
    assert texts(0.5, greedy, rows=0) == []


def test_texts_end_at_their_length():
    assert {len(r.output_ids) for r in texts(0.5, SamplingConfig(), rows=99, max_length=5)} == {
        1,
        2,
        3,
    }


def test_only_greedy_sampling_is_rewritten():
    warm = SamplingConfig(temperature=0.3, top_k=4, repetition_penalty=1.2)
    assert never_greedy(warm) is warm
    cold = never_greedy(SamplingConfig(temperature=0.0, top_p=0.5, repetition_penalty=1.2))
    assert cold == SamplingConfig(temperature=1.0, top_k=1, top_p=1.0, repetition_penalty=1.2)
