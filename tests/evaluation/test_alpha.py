"""Alpha on shared contexts equals what enumeration of the same tables gives."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.evaluation.alpha import (
    score_contexts,
    score_drafts,
    score_stored,
)
from draftkit.theory.truncation import most_likely
from draftkit.theory.warping import SamplingParams, warp
from tests.records import record

VOCAB = 7


class BigramModel:
    """Logits that depend on the last token alone."""

    vocab_size = VOCAB
    max_positions = 100
    parallel, reads = None, ()
    device = torch.device("cpu")

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.table = 2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)

    def score(self, tokens, keep):
        return self.table[tokens[keep]]


def contexts():
    rows = [([1, 2], [3, 4, 5]), ([0], [6, 6]), ([5, 4, 3, 2], [1])]
    return [record(prompt, output, row=i) for i, (prompt, output) in enumerate(rows)]


def by_hand(target, draft, temperature):
    """Per prompt: sums of the three modes over its output positions."""
    sums = []
    for context in contexts():
        text = [*context.prompt_ids, *context.output_ids]
        values = torch.zeros(3, dtype=torch.float64)
        for place, (last, _) in enumerate(pairwise(text)):
            if place + 1 < len(context.prompt_ids):
                continue
            p = (target.table[last] / temperature).softmax(-1)
            q = (draft.table[last] / temperature).softmax(-1)
            values += torch.stack([torch.minimum(p, q).sum(), p[q.argmax()], (p * q).sum()])
        sums.append(values)
    return torch.stack(sums, dim=1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_totals_equal_the_sums_by_hand_whatever_the_batch(temperature, batch_size):
    target, draft = BigramModel(0), BigramModel(1)
    scored = score_contexts(
        target,
        draft,
        contexts(),
        sampling=SamplingConfig(temperature=temperature),
        batch_size=batch_size,
    )
    expected = by_hand(target, draft, temperature)
    torch.testing.assert_close(torch.stack(list(scored.totals.values())), expected)
    assert scored.counts.tolist() == [3, 2, 1]


def test_at_temperature_zero_alpha_is_the_share_of_equal_argmaxes():
    target, draft = BigramModel(0), BigramModel(1)
    scored = score_contexts(
        target, draft, contexts(), sampling=SamplingConfig(temperature=0.0), batch_size=2
    )
    same = (target.table.argmax(-1) == draft.table.argmax(-1)).double()
    lasts = [[2, 3, 4], [0, 6], [2]]
    assert scored.totals["alpha"].tolist() == [float(same[last].sum()) for last in lasts]


def test_a_repetition_penalty_sees_exactly_the_text_before_each_position():
    target, draft = BigramModel(0), BigramModel(1)
    sampling = SamplingConfig(repetition_penalty=1.7)
    scored = score_contexts(target, draft, contexts(), sampling=sampling, batch_size=3)

    def penalised(row, text):
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[list(text)] = True
        return torch.where(seen, torch.where(row > 0, row / 1.7, row * 1.7), row).softmax(-1)

    for prompt, context in enumerate(contexts()):
        total = 0.0
        for i in range(len(context.output_ids)):
            text = [*context.prompt_ids, *context.output_ids[:i]]
            p = penalised(target.table[text[-1]], text)
            q = penalised(draft.table[text[-1]], text)
            total += float(torch.minimum(p, q).sum())
        assert float(scored.totals["alpha"][prompt]) == pytest.approx(total, abs=1e-12)


def test_answers_of_one_document_are_one_observation():
    """Sixteen times the same answer to each of 40 prompts say no more than one."""
    target, draft = BigramModel(0), BigramModel(1)
    alone = [
        replace(one, output_ids=[*one.output_ids, number % VOCAB], document=f"prompt {number}")
        for number, one in enumerate(contexts()[:2] * 20)
    ]
    one, sixteen = (
        score_contexts(target, draft, rows, sampling=SamplingConfig(), batch_size=64).alpha
        for rows in (alone, [row for row in alone for _ in range(16)])
    )
    assert sixteen.high - sixteen.low == pytest.approx(one.high - one.low, rel=0.05)
    assert (sixteen.prompts, sixteen.documents) == (640, 40)


def test_a_penalty_is_refused_where_scores_are_stored():
    sampling = SamplingConfig(repetition_penalty=1.1)
    with pytest.raises(ValueError, match=r"^generate\.top_k: .* repetition penalty"):
        score_stored(BigramModel(1), contexts(), sampling=sampling, batch_size=1)


@pytest.mark.parametrize(
    ("cut", "k", "wide"),
    [
        ({}, 10, 0.2),
        ({"temperature": 0.0}, 10, 0),
        ({"temperature": 1.0}, 10, 0.3),
        ({"top_k": 5}, 10, 0),
        ({"top_k": 30}, 10, 0.2),
        ({"top_p": 0.9}, 10, 0.2),
        ({"top_p": 0.5}, 10, 0.05),
        ({"top_k": 8, "top_p": 0.8}, 10, 0),
        ({"top_k": 20, "top_p": 0.9}, 10, 0.2),
        ({"top_k": 20, "top_p": 0.5}, 10, 0.05),
        ({"top_k": 20, "top_p": 0.95, "temperature": 0.6}, 16, 0.1),
    ],
)
def test_bounds_of_stored_scores_hold_the_alpha_of_the_whole_target(cut, k, wide):
    """At every one of 500 positions of random laws, and they are `wide` apart on average.

    At temperature 0 the tail is that of temperature 1, as servers record it.
    """
    sampling = SamplingConfig(**{"temperature": 0.8, **cut})
    generator = torch.Generator().manual_seed(3)
    target, draft = 2.5 * torch.randn(2, 500, 60, generator=generator, dtype=torch.float64)
    params = SamplingParams.uniform(1, **vars(sampling))
    p, q = (warp(logits[None], params)[0] for logits in (target, draft))
    ids, log_probs, (tail,) = most_likely(target, k, [sampling.temperature or 1.0])
    positions = [
        replace(
            contexts()[0],
            prompt_ids=[0],
            output_ids=[0],
            topk_ids=[ids[i].tolist()],
            topk_log_probs=[log_probs[i].tolist()],
            tail_mass=[float(tail[i])],
        )
        for i in range(len(ids))
    ]

    class Given:
        parallel, reads = None, ()

        device = torch.device("cpu")

        def score(self, tokens, keep):
            return draft

    scored, missing = score_stored(Given(), positions, sampling=sampling, batch_size=len(positions))
    gap = torch.minimum(p, q).sum(-1) - scored.totals["alpha"]
    assert (gap >= -1e-5).all()  # stored in float32
    assert (gap <= missing + 1e-5).all()
    assert float(missing.mean()) <= wide + 1e-6
    if not cut:  # then no more is unknown than the draft has outside
        assert (missing <= 1 - q.gather(-1, ids).sum(-1) + 1e-5).all()


def test_without_a_sampling_each_context_is_scored_under_its_own():
    target, draft = BigramModel(0), BigramModel(1)
    own = [
        SamplingConfig(temperature=0),
        SamplingConfig(temperature=0.5, top_p=0.8),
        SamplingConfig(top_k=2),
    ]
    mixed = [
        replace(context, sampling=dict(vars(own[number % 3])))
        for number, context in enumerate(contexts())
    ]
    found = score_contexts(target, draft, mixed, sampling=None, batch_size=2).totals["alpha"]
    for number, context in enumerate(contexts()):
        options = {"sampling": own[number % 3], "batch_size": 1}
        alone = score_contexts(target, draft, [context], **options).totals["alpha"]
        assert float(found[number]) == pytest.approx(float(alone))


def test_drafts_scored_together_score_as_each_alone_and_the_target_reads_once():
    class Counting(BigramModel):
        rows = 0

        def score(self, tokens, keep):
            self.rows += len(tokens)
            return super().score(tokens, keep)

    target, drafts = Counting(0), {"near": BigramModel(1), "far": BigramModel(2)}
    options = {"sampling": SamplingConfig(temperature=0.7, top_p=0.9), "batch_size": 2}
    together = score_drafts(target, drafts, contexts(), **options)
    assert target.rows == len(contexts())
    for name, draft in drafts.items():
        alone = score_contexts(target, draft, contexts(), **options)
        assert together[name].as_dict() == alone.as_dict()
    assert together["near"].as_dict() != together["far"].as_dict()
