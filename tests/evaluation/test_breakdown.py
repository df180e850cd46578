"""Losses of parts sum to 1 - alpha, tokens count where they belong, intervals hold the truth."""

from dataclasses import replace

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.evaluation.breakdown import CATEGORIES, ENTROPIES, OTHERS, breakdown
from tests.evaluation.simulated import rates
from tests.evaluation.test_alpha import VOCAB, BigramModel
from tests.records import record


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


def by_hand(*tokens, domains=()):
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
    parts = breakdown(by_hand(first, [(1.0, 0.0)], domains=["a", "b"]))
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
    assert "category" not in breakdown(by_hand(token, token))
    names = [f"domain {number}" for number in range(CATEGORIES + 2)]
    domains = [*names, *names[:CATEGORIES]]
    rows = breakdown(by_hand(*[token] * len(domains), domains=domains))["category"]
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
        parts = breakdown(by_hand(*tokens, domains=["a" if one else "b" for one in of_a]))
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
