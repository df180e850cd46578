"""Differences between runs of which the truth is known, one by one and as the best of many.

Runs are drawn by document: a text is easy or hard for all of them, and each has its own luck with
it. Every test of a level has a mutant that must miss it.
"""

import itertools
import math
import operator

import pytest
import torch
from scipy import stats

from draftkit import distill, evaluate, load_pair
from draftkit.config import EvaluateConfig, GenerateConfig, OptimConfig
from draftkit.evaluation.intervals import estimate, gain_p_value, speedup
from draftkit.evaluation.ranking import (
    LEVEL,
    Entry,
    against,
    difference,
    front,
    holm,
    seed_difference,
    speedup_gain,
)
from draftkit.models.loading import save_model
from draftkit.theory.acceptance import Rate
from draftkit.theory.forecast import DEVIATION
from tests import tiny

EASE, LUCK = 0.1, 0.02  # standard deviations of acceptance: of texts, and of a run on a text


def drawn(runs, documents, generator, *, gains=0.0):
    """Runs that were judged on the same documents of 10 to 64 positions, each with its interval."""

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    counts = torch.randint(10, 65, (documents,), generator=generator).double()
    rates = 0.5 + EASE * normal(documents) + LUCK * normal(runs, documents) + gains
    return [entry_of(Rate(one * counts, counts)) for one in rates]


def entry_of(rate, texts="c"):
    """Of weights that all entries share: no seed tells them apart."""
    made = estimate(rate)
    return Entry(made.mean, made.low, made.high, (rate,), texts, weights="w")


def unpaired(entry):
    return entry._replace(texts="", rates=())


def rejected(documents, repetitions, change=lambda entry: entry):
    """How often two equal runs are called different."""
    generator, count = torch.Generator().manual_seed(0), 0
    for _ in range(repetitions):
        one, other = map(change, drawn(2, documents, generator))
        count += difference(one, other).p_value < LEVEL
    return count / repetitions


@pytest.mark.parametrize("documents", [20, 84])
def test_equal_runs_differ_in_five_of_a_hundred_pairs_and_far_less_unpaired(documents):
    """Of 2,000, 5 +- 1.5 %: three standard errors."""
    assert 0.035 <= rejected(documents, 2000) <= 0.065
    assert rejected(documents, 500, unpaired) < 0.035


def test_what_intervals_of_two_runs_hide_their_difference_shows():
    one, other = drawn(2, 84, torch.Generator().manual_seed(0))
    better = entry_of(Rate(one.rates[0].totals + 0.01 * one.rates[0].counts, one.rates[0].counts))
    apart = difference(better, other)
    assert apart.paired
    assert apart.low > 0
    assert apart.p_value < 0.01
    alone = difference(unpaired(better), unpaired(other))
    assert not alone.paired
    assert alone.low < 0 < alone.mean == pytest.approx(apart.mean)
    assert alone.p_value > 0.2


def called_better(repetitions, correct=lambda one, runs: one.p_value):
    """How often the best of 28 equal runs is called better than any other."""
    generator, count = torch.Generator().manual_seed(1), 0
    for _ in range(repetitions):
        entries = drawn(28, 24, generator)
        best = max(range(28), key=lambda run: entries[run].mean)
        others = [one for one in against(entries, best) if one is not None]
        count += any(correct(one, 28) < LEVEL for one in others)
    return count / repetitions


def as_if_the_best_was_named_before(one, runs):
    """The mutant: of the smallest p value, which is multiplied by 27 alone and not by all pairs."""
    return one.p_value * 2 / runs


def test_the_best_of_28_equal_runs_is_not_called_better():
    """5 % are allowed: of 100, 5, of which 10 are two and a half standard errors more."""
    assert called_better(100) <= 0.10
    assert called_better(100, as_if_the_best_was_named_before) > 0.10


@pytest.mark.soak
def test_the_best_of_28_equal_runs_is_called_better_in_at_most_five_of_a_hundred():
    assert called_better(2000) <= 0.05


def test_a_best_run_that_is_better_is_called_so():
    gains = torch.zeros(28, 1)
    gains[7] = 0.04
    entries = drawn(28, 84, torch.Generator().manual_seed(2), gains=gains)
    standing = against(entries, 7)
    assert standing[7] is None
    assert all(one.differs and one.high < 0 for one in standing if one)


def test_a_difference_of_runs_is_the_gain_of_one_over_the_other():
    one, other = drawn(2, 30, torch.Generator().manual_seed(3))
    made, gain = difference(one, other), estimate(*one.rates, *other.rates, compare=operator.sub)
    assert made[:3] == pytest.approx((gain.mean, gain.low, gain.high))
    back = difference(other, one)
    assert back.mean == pytest.approx(-made.mean)
    assert back.p_value == pytest.approx(made.p_value)
    up, down = gain_p_value(*one.rates, *other.rates), gain_p_value(*other.rates, *one.rates)
    assert made.p_value == pytest.approx(2 * min(up, down))


def test_equal_runs_and_few_documents_show_no_difference():
    one, _ = drawn(2, 30, torch.Generator().manual_seed(4))
    assert difference(one, one) == (0, 0, 0, 1, True)
    few, others = drawn(2, 19, torch.Generator().manual_seed(4), gains=torch.tensor([[0.0], [1.0]]))
    made = difference(few, others)
    assert made.mean == pytest.approx(-1, abs=0.05)
    assert made[1:] == (-math.inf, math.inf, 1, True)
    alone = difference(Entry(0.5), Entry(0.9, 0.8, 1.0))
    assert alone.p_value == 1
    assert not alone.differs


def timed(generator, *, gain=1.2, busy=1.0, count=84):
    """A run that was timed on the first texts, in turns with plain decoding, on a busy machine."""
    shared = torch.Generator().manual_seed(5)
    tokens = 64 * torch.ones(count, dtype=torch.float64)
    ease = 0.2 * torch.randn(84, generator=shared, dtype=torch.float64)[:count]
    noise = 0.05 * torch.randn(2, count, generator=generator, dtype=torch.float64)
    plain = busy * (ease + noise[0]).exp()
    drafted = busy * (ease + noise[1] + 0.1 * ease.flip(0)).exp() / gain
    rates = tuple(Rate(tokens, seconds) for seconds in (drafted, plain))
    made = speedup(*rates)
    return Entry(made.mean, made.low, made.high, rates, "c", weights="w")


@pytest.mark.parametrize("change", [lambda entry: entry, unpaired])
def test_the_error_of_runs_that_were_trained_apart_holds_the_deviation_of_both(change):
    one, other = map(change, drawn(2, 84, torch.Generator().manual_seed(3)))
    alone, apart = (
        difference(one._replace(weights=weights, deviation=0.03), other._replace(deviation=0.04))
        for weights in ("w", "v")
    )
    assert apart.mean == alone.mean
    width, wide = ((gap.high - gap.low) / 2 for gap in (alone, apart))
    assert math.sqrt(wide**2 - width**2) == pytest.approx(1.97 * 0.05, rel=0.02)
    t = stats.t.isf(apart.p_value / 2, 83)
    assert t == pytest.approx(abs(apart.mean) / (wide / 1.97), rel=0.05, abs=0.01)
    unknown = difference(one._replace(weights=""), other._replace(weights=""))
    assert unknown.high - unknown.low > alone.high - alone.low


def seeded(repetitions, deviation, weights):
    """How often two trainings of one setting are called different, which deviate by so much."""
    generator, count = torch.Generator().manual_seed(9), 0
    for _ in range(repetitions):
        luck = deviation * torch.randn(2, 1, generator=generator, dtype=torch.float64)
        one, other = drawn(2, 84, generator, gains=luck)
        count += difference(one._replace(weights=weights), other).differs
    return count / repetitions


def test_runs_that_differ_in_their_seed_alone_differ_in_five_of_a_hundred_pairs():
    """Of 400, 5 % and two and a half standard errors; the mutant takes them for one training."""
    assert seeded(400, DEVIATION, "other") <= 0.08
    assert seeded(400, DEVIATION, "w") > 0.16


@pytest.mark.soak
def test_trainings_that_differ_in_their_seed_alone_get_few_stars(tmp_path):
    """Of 40 pairs of trainings, no training in two of them: 5, three standard errors above 5 %."""
    target, tokenizer = tiny.model(), tiny.byte_tokenizer()
    save_model(target, tokenizer, tmp_path / "target")
    save_model(tiny.related(target, noise=0.3), tokenizer, tmp_path / "draft")
    pair = load_pair(tmp_path / "target", tmp_path / "draft", dtype="float32")
    train, test = tiny.prompts([6] * 128, seed=1), tiny.prompts([6] * 96, seed=2)
    optim = OptimConfig(per_device_train_batch_size=8, learning_rate=1e-3)
    entries = []
    for seed in range(80):
        fitted = distill(
            pair,
            train,
            divergence="tvd",
            steps=40,
            max_length=32,
            seed=seed,
            generate=GenerateConfig(rollouts=128),
            optim=optim,
            evaluate=EvaluateConfig(max_new_tokens=16),
        )
        judged = evaluate(
            pair.with_draft(fitted), test, evaluate=EvaluateConfig(max_new_tokens=32), seed=0
        )
        entries.append(entry_of(judged.totals.rate("alpha"))._replace(weights=str(seed)))
    stars = [
        one
        for pair in zip(entries[::2], entries[1::2], strict=True)
        if (one := difference(*pair)).differs
    ]
    assert len(stars) <= 5


def test_speed_ups_are_paired_each_over_its_own_plain_decoding():
    """What slows a run as a whole cancels; one that was timed further is cut to what both have."""
    generator = torch.Generator().manual_seed(6)
    fast = timed(generator, gain=1.3, busy=3.0)
    slow = timed(generator, gain=1.2, count=40)
    made = difference(fast, slow, speedup_gain)
    assert made.low < 0.1 < made.high
    assert made.p_value < 0.001


def cells(count, seeds, generator, *, gain=0.0):
    """Cells that were trained with the same seeds: what a seed gives to all, and each its own."""
    shared = 0.05 * torch.randn(seeds, generator=generator, dtype=torch.float64)
    values = 0.5 + shared + 0.01 * torch.randn(count, seeds, generator=generator).double()
    values[0] += gain
    return values


def of_seeds(values):
    return [Entry(sum(row) / len(row), by_seed=tuple(row)) for row in values.tolist()]


def test_two_of_five_cells_of_three_seeds_differ_in_five_of_a_hundred():
    generator, count = torch.Generator().manual_seed(6), 0
    for _ in range(2000):
        values = cells(5, 3, generator)
        one = against(of_seeds(values), 0)[1]
        count += one.low > 0 or one.high < 0
    assert 0.035 <= count / 2000 <= 0.065


def test_seeds_of_a_cell_are_blocks_and_their_error_is_that_of_a_two_way_table():
    values = torch.tensor([[1.0, 2.0, 4.0], [2.0, 2.0, 5.0]], dtype=torch.float64)
    one = seed_difference(values, 0, 1)
    gains = values[0] - values[1]  # of two cells: the paired t test
    error = float(gains.std()) / 3**0.5
    assert one.mean == pytest.approx(float(gains.mean()))
    assert one.p_value == pytest.approx(2 * stats.t.sf(abs(one.mean) / error, 2))
    assert one.high - one.mean == pytest.approx(stats.t.isf(0.025, 2) * error)
    assert against(of_seeds(values), 1) == [one, None]
    same = seed_difference(values[:1].repeat(2, 1), 0, 1)
    assert same == (0, 0, 0, 1, True)
    gained = cells(4, 3, torch.Generator().manual_seed(7), gain=0.1)
    assert [one is None or one.differs for one in against(of_seeds(gained), 0)] == [True] * 4


def test_holm_multiplies_the_smallest_by_all_of_the_family_and_never_falls():
    assert holm([0.03, 0.01, 0.02], 3) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.01, 0.001], 10) == pytest.approx([0.09, 0.01])
    assert holm([0.5, 0.9], 2) == [1.0, 1.0]
    assert holm([], 0) == []


def test_the_front_is_what_no_point_beats():
    generator = torch.Generator().manual_seed(8)
    for _ in range(50):
        points = [*map(tuple, torch.randint(0, 5, (7, 2), generator=generator).tolist())]

        def beats(one, other):
            return one != other and one[0] >= other[0] and one[1] <= other[1]

        free = {p for p in points if not any(beats(q, p) for q in points)}
        kept = [points[number] for number in front(points)]
        assert set(kept) == free
        assert len(kept) == len(free)
        assert all(a[1] < b[1] for a, b in itertools.pairwise(kept))
