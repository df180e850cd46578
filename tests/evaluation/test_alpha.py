"""Alpha on shared contexts equals what enumeration of the same tables gives."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.evaluation.alpha import (
    estimates,
    gains,
    score_contexts,
    score_drafts,
    score_stored,
)
from draftkit.theory.truncation import most_likely

VOCAB = 7


class BigramModel:
    """Logits that depend on the last token alone."""

    vocab_size = VOCAB
    max_positions = 100
    device = torch.device("cpu")

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.table = 2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)

    def score(self, tokens, keep):
        return self.table[tokens[keep]]


def contexts():
    rows = [([1, 2], [3, 4, 5]), ([0], [6, 6]), ([5, 4, 3, 2], [1])]
    return [
        Record(
            prompt_ids=prompt,
            output_ids=output,
            sampler="target",
            sampler_version="",
            sampling={},
            seed=0,
            row=i,
        )
        for i, (prompt, output) in enumerate(rows)
    ]


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


def test_a_draft_equal_to_its_target_has_alpha_one():
    target = BigramModel(0)
    scored = score_contexts(target, target, contexts(), sampling=SamplingConfig(), batch_size=2)
    assert estimates(scored, seed=0, resamples=100)["alpha"].mean == pytest.approx(1, abs=1e-12)


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


def test_a_gain_is_paired_and_zero_for_the_same_draft():
    target, draft = BigramModel(0), BigramModel(1)
    scored = score_contexts(target, draft, contexts(), sampling=SamplingConfig(), batch_size=3)
    gain = gains(after=scored, before=scored, seed=0, resamples=200)["alpha"]
    assert (gain.mean, gain.low, gain.high) == (0, 0, 0)


def stored(target, sampling, k):
    """Contexts with the target's scores."""
    found = []
    for context in contexts():
        text = [*context.prompt_ids, *context.output_ids]
        lasts = text[len(context.prompt_ids) - 1 : -1]
        ids, log_probs, (tail,) = most_likely(target.table[lasts], k, [sampling.temperature or 1.0])
        found.append(
            replace(
                context,
                topk_ids=ids.tolist(),
                topk_log_probs=log_probs.tolist(),
                tail_mass=tail.tolist(),
            )
        )
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.6, top_p=0.9),
        SamplingConfig(temperature=1.4, top_k=3),
        SamplingConfig(temperature=0),
    ],
)
@pytest.mark.parametrize("k", [2, 4, VOCAB - 1])
def test_alpha_of_stored_scores_is_at_most_as_far_off_as_it_says(sampling, k):
    target, draft = BigramModel(0), BigramModel(1)
    whole = score_contexts(target, draft, contexts(), sampling=sampling, batch_size=2)
    scored, missing = score_stored(
        draft, stored(target, sampling, k), sampling=sampling, batch_size=2
    )
    gap = whole.totals["alpha"] - scored.totals["alpha"]
    assert (gap >= -1e-5).all()  # stored in float32
    assert (gap <= missing + 1e-5).all()
    assert torch.equal(scored.counts, whole.counts)


def test_a_penalty_is_refused_where_scores_are_stored():
    with pytest.raises(ValueError, match=r"^generate\.top_k: .* repetition penalty"):
        score_stored(
            BigramModel(1), [], sampling=SamplingConfig(repetition_penalty=1.1), batch_size=1
        )


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
