"""Alpha on shared contexts is what enumeration of the tables gives; its parts sum to it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.evaluation.alpha import (
    CATEGORIES,
    ENTROPIES,
    OTHERS,
    PromptTotals,
    breakdown,
    score_contexts,
    score_drafts,
    score_stored,
)
from draftkit.theory.truncation import most_likely
from draftkit.theory.warping import SamplingParams, warp
from tests.evaluation.simulated import rates
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
        parallel, reads, vocab_size = None, (), 60

        device = torch.device("cpu")

        def score(self, tokens, keep):
            return draft

    scored, missing = score_stored(Given(), positions, sampling=sampling, batch_size=len(positions))
    gap = torch.minimum(p, q).sum(-1) - scored.totals["alpha"]
    assert (gap >= -1e-5).all()  # stored in float32
    assert (gap <= missing + 1e-5).all()
    assert float(missing.mean()) <= wide + 1e-6
    # Where the ids alone are known, the mass outside them is bounded too.
    loose, more = score_stored(
        Given(), positions, sampling=sampling, batch_size=len(positions), tails_known=False
    )
    gap = torch.minimum(p, q).sum(-1) - loose.totals["alpha"]
    assert (gap >= -1e-5).all()
    assert (gap <= more + 1e-5).all()
    assert (loose.totals["alpha"] <= scored.totals["alpha"] + 1e-5).all()
    if sampling.temperature in (0, 1) or 0 < sampling.top_k <= k:  # all of it is known there
        torch.testing.assert_close(more, missing, atol=1e-5, rtol=0)
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


# Where alpha is lost


def texts(count=30):
    generator = torch.Generator().manual_seed(0)
    for row in range(count):
        ids = torch.randint(0, VOCAB, (2 + int(row % 40),), generator=generator).tolist()
        yield replace(record(ids[:1], ids[1:], row=row), domain=("code", "prose")[row % 2])


def scored(temperature=1.0, **changes):
    models = BigramModel(0), BigramModel(1)
    sampling = SamplingConfig(temperature=temperature, **changes)
    answers = list(texts())
    (totals,) = score_drafts(
        models[0], {"draft": models[1]}, answers, sampling=sampling, batch_size=7
    ).values()
    return totals, answers, models[0]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [0, 3])
def test_the_losses_of_parts_sum_to_one_minus_alpha(temperature, top_k):
    totals, *_ = scored(temperature, top_k=top_k)
    parts = breakdown(totals)
    assert list(parts) == ["entropy", "position", "category"]
    for rows in parts.values():
        assert sum(row["tokens"] for row in rows) == pytest.approx(1, abs=1e-12)
        lost = sum(row["lost"]["mean"] for row in rows)
        assert lost == pytest.approx(1 - totals.alpha.mean, abs=1e-12)
        for row in rows:
            here = row["tokens"] * (1 - row["alpha"]["mean"])
            assert row["lost"]["mean"] == pytest.approx(here, abs=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_entropy_is_of_the_targets_own_law_however_it_is_served(temperature):
    totals, answers, target = scored(temperature)
    law = target.table.softmax(-1)
    entropies = -(law * law.log()).sum(-1)
    for one, found in zip(answers, totals.entropies, strict=True):
        before = torch.tensor([*one.prompt_ids, *one.output_ids][:-1])
        torch.testing.assert_close(found, entropies[before])


def totals_of(*tokens, domains=()):
    """Totals of texts of which each token is (what is accepted, the target's entropy)."""
    columns = [torch.tensor(text, dtype=torch.float64).T for text in tokens]
    accepted, entropies = ([one[which] for one in columns] for which in (0, 1))
    counts = torch.tensor([len(text) for text in tokens], dtype=torch.float64)
    totals = {"alpha": torch.stack([one.sum() for one in accepted])}
    named = list(domains or [""] * len(tokens))
    return PromptTotals(totals, counts, accepted=accepted, entropies=entropies, domains=named)


def means(rows):
    return {row["part"]: (row["tokens"], row["alpha"]["mean"]) for row in rows}


def test_each_token_counts_in_the_part_that_it_belongs_to():
    first = [(1.0, 0.49), (0.5, 0.5), (0.0, 3.0), *[(0.25, 2.9)] * 6]  # nine tokens
    parts = breakdown(totals_of(first, [(1.0, 0.0)], domains=["a", "b"]))
    assert means(parts["entropy"]) == {
        "under 0.5": (0.2, 1.0),
        "0.5 to 1": (0.1, 0.5),
        "2 to 3": (0.6, 0.25),
        "3 and more": (0.1, 0.0),
    }
    assert set(means(parts["entropy"])) < set(ENTROPIES.values())
    assert means(parts["position"]) == {
        "1 to 8": (0.9, pytest.approx((1.5 + 1.25 + 1) / 9)),
        "9 to 32": (0.1, 0.25),
    }
    assert means(parts["category"]) == {"a": (0.9, pytest.approx(3 / 9)), "b": (0.1, 1.0)}


def test_texts_of_one_category_have_no_part_of_it_and_rare_ones_share_one():
    token = [(0.5, 1.0)]
    assert "category" not in breakdown(totals_of(token, token))
    names = [f"domain {number}" for number in range(CATEGORIES + 2)]
    domains = [*names, *names[:CATEGORIES]]
    rows = breakdown(totals_of(*[token] * len(domains), domains=domains))["category"]
    assert [row["part"] for row in rows] == [*names[:CATEGORIES], OTHERS]
    assert rows[-1]["tokens"] == pytest.approx(2 / len(domains))


def coverage(documents, share, repetitions):
    """How often the intervals of a category with that share of the documents hold the truth.

    Evaluations with fewer than 20 documents of it have no interval, and do not count.
    """
    generator = torch.Generator().manual_seed(0)
    alphas, held = {"a": 0.7, "b": 0.4}, {"alpha": [], "lost": [], "early": []}
    early = sum(min(size, 8) for size in range(4, 41)) / sum(range(4, 41))
    mean = share * alphas["a"] + (1 - share) * alphas["b"]
    for _ in range(repetitions):
        of_a = torch.rand(documents, generator=generator) < share
        accept = torch.where(of_a, *(rates(one, documents, generator) for one in alphas.values()))
        lengths = torch.randint(4, 41, (documents,), generator=generator).tolist()
        tokens = [
            [(float(one), 1.0) for one in torch.bernoulli(rate.expand(size), generator=generator)]
            for rate, size in zip(accept, lengths, strict=True)
        ]
        parts = breakdown(totals_of(*tokens, domains=["a" if one else "b" for one in of_a]))
        printed = [("early", parts["position"][0]["lost"], (1 - mean) * early)]
        for row in parts["category"]:
            if row["part"] == "a":
                lost = (1 - alphas["a"]) * share
                printed += [("alpha", row["alpha"], alphas["a"]), ("lost", row["lost"], lost)]
                few = int(of_a.sum()) < 20
                assert few == (row["alpha"]["ci95"] is None) == (row["lost"]["ci95"] is None)
        for name, one, true in printed:
            if ends := one["ci95"]:
                held[name].append(ends[0] <= true <= ends[1])
    assert min(map(len, held.values())) > repetitions / 2
    return {name: sum(one) / len(one) for name, one in held.items()}


def test_intervals_hold_the_truth_and_few_documents_have_none():
    """93 to 97 % and two and a half standard errors of that, down to 20 documents."""
    assert all(0.90 <= one <= 0.99 for one in coverage(46, 0.5, 200).values())


@pytest.mark.soak
@pytest.mark.parametrize(("documents", "share"), [(60, 0.5), (100, 0.25), (190, 0.15)])
def test_intervals_hold_the_truth_of_parts_that_barely_have_one(documents, share):
    assert all(0.93 <= one <= 0.97 for one in coverage(documents, share, 5000).values())
