"""Acceptance in its three modes, counted quantities by hand, intervals by simulated coverage."""

import json
import math
import operator

import pytest
import torch
from scipy import stats
from torch import Tensor

from draftkit.theory import acceptance, noise
from draftkit.theory.acceptance import (
    Estimate,
    Rate,
    bootstrap,
    exact_match_acceptance,
    exact_match_share,
    gain_p_value,
    greedy_draft_acceptance,
    greedy_draft_share,
    rounds_of_texts,
    sampled_acceptance,
    sampled_share,
    student_t_tail,
    tail_bound,
)
from draftkit.theory.speedup import expected_tokens
from draftkit.theory.verification import VERIFIERS
from tests.theory.laws import measure_round

# The three modes


def test_the_three_modes_of_a_small_pair_are_computed_by_hand() -> None:
    pair = {
        "target_probs": torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.9, 0.0]]),
        "draft_probs": torch.tensor([[0.2, 0.7, 0.1], [0.0, 1.0, 0.0]]),
    }
    torch.testing.assert_close(sampled_acceptance(**pair), torch.tensor([0.6, 0.9]))
    torch.testing.assert_close(greedy_draft_acceptance(**pair), torch.tensor([0.3, 0.9]))
    torch.testing.assert_close(exact_match_acceptance(**pair), torch.tensor([0.33, 0.9]))


def test_a_pair_that_overlaps_by_seventy_percent_pays_seventeen_to_a_greedy_draft() -> None:
    pair = {
        "target_probs": torch.tensor([0.17, 0.50, 0.33]),
        "draft_probs": torch.tensor([0.47, 0.30, 0.23]),
    }
    assert sampled_acceptance(**pair).item() == pytest.approx(0.70)
    assert greedy_draft_acceptance(**pair).item() == pytest.approx(0.17)
    assert exact_match_acceptance(**pair).item() == pytest.approx(0.3058)


def test_the_modes_bound_one_another() -> None:
    generator = torch.Generator().manual_seed(1)
    target_probs, draft_probs = (
        (2 * torch.randn(500, 20, generator=generator)).softmax(-1) for _ in range(2)
    )
    pair = {"target_probs": target_probs, "draft_probs": draft_probs}
    assert (exact_match_acceptance(**pair) <= sampled_acceptance(**pair) + 1e-6).all()
    best = target_probs.argmax(-1, keepdim=True)
    one_hot = torch.zeros_like(draft_probs).scatter(-1, best, 1.0)
    same_argmax = greedy_draft_acceptance(target_probs=target_probs, draft_probs=one_hot)
    assert torch.equal(same_argmax, target_probs.amax(-1))


@pytest.mark.parametrize(
    "mode", [sampled_acceptance, greedy_draft_acceptance, exact_match_acceptance]
)
def test_modes_compute_in_float32_at_least(mode: object) -> None:
    assert callable(mode)
    probs = torch.rand(3, 9, generator=torch.Generator().manual_seed(0))
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        pair = {"target_probs": probs.to(dtype), "draft_probs": probs.flip(-1).to(dtype)}
        assert mode(**pair).dtype == expected


# Rounds by text

VOCAB, LENGTH = 3, 5
SHARES = {"sampled": sampled_share, "argmax": greedy_draft_share, "match": exact_match_share}


def tables(seed: int) -> tuple[Tensor, Tensor]:
    """p and q [V, V] after each last token."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    target, draft = logits.softmax(-1)
    return target, draft


def rounds_by_enumeration(mode: str, gamma: int, stops_below: float = 0.0) -> float:
    """Expected rounds for LENGTH tokens after token 0, over all that draft and target may do."""
    target, draft = tables(1)

    def begin(last: int, missing: int) -> float:
        return 1 + test(last, missing, gamma) if missing else 0.0

    def test(last: int, missing: int, left: int) -> float:
        """Rounds after the one under way, of which `left` proposals are still to be tested."""
        if not missing:
            return 0.0
        p, q = target[last].tolist(), draft[last].tolist()
        total = 0.0
        for x in range(VOCAB):
            accepted = 0.0
            if left:
                is_best = q[x] == max(q)
                both = {"sampled": min(p[x], q[x]), "argmax": p[x] * is_best, "match": p[x] * q[x]}
                accepted = both[mode]
            behind = 0 if q[x] < stops_below else left - 1
            total += accepted * test(x, missing - 1, behind)
            total += (p[x] - accepted) * begin(x, missing - 1)
        return total

    return begin(0, LENGTH)


@pytest.mark.parametrize("stops_below", [0.0, 0.4])
@pytest.mark.parametrize("gamma", [1, 2, 4])
@pytest.mark.parametrize("mode", SHARES)
def test_texts_of_the_target_tell_how_many_rounds_decoding_takes(
    mode: str, gamma: int, stops_below: float
) -> None:
    target, draft = tables(1)
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    before = torch.cat([torch.zeros(len(texts), 1, dtype=torch.long), texts[:, :-1]], dim=1)
    likelihood = target[before, texts].prod(-1)
    both = {"target_probs": target[before], "draft_probs": draft[before], "tokens": texts}
    last = exact_match_share(**both) < stops_below
    found = rounds_of_texts([*SHARES[mode](**both)], gamma, last=[*last])
    expected = rounds_by_enumeration(mode, gamma, stops_below)
    assert float(found.counts @ likelihood) == pytest.approx(expected, rel=1e-12)


def test_shares_that_are_alphas_would_be_wrong() -> None:
    """Tokens that are accepted have another distribution than those of the target."""
    target, draft = tables(1)
    texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)
    before = torch.cat([torch.zeros(len(texts), 1, dtype=torch.long), texts[:, :-1]], dim=1)
    both = {"target_probs": target[before], "draft_probs": draft[before]}
    found = rounds_of_texts([*sampled_acceptance(**both)], 2).counts @ target[before, texts].prod(
        -1
    )
    assert abs(float(found) - rounds_by_enumeration("sampled", 2)) > 1e-3


def test_ragged_texts_count_as_if_alone_and_cut_ones_go_on_with_the_average() -> None:
    shares = [torch.tensor([0.9, 0.2, 0.7, 0.5]), torch.tensor([0.3]), torch.tensor([0.6, 1.0])]
    together = rounds_of_texts(shares, 3, cut=torch.tensor([False] * 3))
    assert together.totals.tolist() == [4, 1, 2]
    for row, share in enumerate(shares):
        alone = rounds_of_texts([share], 3, cut=torch.tensor([False]))
        assert float(alone.counts) == pytest.approx(float(together.counts[row]))
    constant = rounds_of_texts([torch.full((6,), 0.8)], 3)
    assert float(constant.totals / constant.counts) > 6 / float(constant.counts)
    long = rounds_of_texts([torch.full((4000,), 0.8)], 3)
    assert float(long.totals / long.counts) == pytest.approx(expected_tokens(0.8, 3), rel=1e-4)


# Estimates


def correlated_prompts(generator: torch.Generator, prompts: int = 80) -> tuple[Tensor, Tensor]:
    """Accepted and tested positions by prompt: easy prompts are long, hard ones short."""
    is_easy = torch.rand(prompts, generator=generator) < 0.5
    spread = torch.rand(prompts, generator=generator)
    rate = torch.where(is_easy, 0.7 + 0.25 * spread, 0.3 + 0.3 * spread)
    counts = torch.where(is_easy, 50.0, 10.0)
    return torch.binomial(counts, rate, generator=generator), counts


TRUE_RATIO = (50 * 0.825 + 10 * 0.45) / 60


def test_the_interval_covers_the_truth_at_its_level_where_positions_of_a_prompt_agree() -> None:
    generator = torch.Generator().manual_seed(3)
    repetitions, covered, covered_by_positions = 1000, 0, 0
    for repetition in range(repetitions):
        totals, counts = correlated_prompts(generator)
        estimate = bootstrap(Rate(totals, counts), seed=repetition, resamples=400)
        covered += not estimate.excludes(TRUE_RATIO)
        # An interval that takes positions for independent is too narrow: the reason for prompts.
        error = math.sqrt(estimate.mean * (1 - estimate.mean) / estimate.n)
        covered_by_positions += abs(estimate.mean - TRUE_RATIO) < 1.96 * error
    assert 0.92 <= covered / repetitions <= 0.97
    assert covered_by_positions / repetitions < 0.85


def test_an_estimate_is_a_ratio_of_totals_not_a_mean_of_ratios() -> None:
    estimate = bootstrap(Rate(torch.tensor([1, 90]), torch.tensor([10, 100])))
    assert estimate.mean == pytest.approx(91 / 110)
    assert (estimate.n, estimate.prompts) == (110, 2)
    assert estimate.low == pytest.approx(0.1)
    assert estimate.high == pytest.approx(0.9)


def test_the_same_data_and_seed_give_the_same_interval_whatever_the_global_state() -> None:
    totals, counts = correlated_prompts(torch.Generator().manual_seed(4))
    torch.manual_seed(1)
    first = bootstrap(Rate(totals, counts))
    torch.manual_seed(2)
    assert bootstrap(Rate(totals, counts)) == first
    assert bootstrap(Rate(totals, counts), seed=1).low != first.low


def test_a_resample_is_the_same_whichever_block_of_resamples_it_falls_into() -> None:
    totals, counts = correlated_prompts(torch.Generator().manual_seed(4), prompts=700)
    table = torch.stack([totals, counts], dim=-1).double()
    sums = acceptance._resampled_sums(table, seed=0, resamples=2000)
    assert sums.shape == (2000, 2)
    for resample in (0, 1400, 1497, 1498, 1999):  # 2^20 // 700 = 1497 resamples fill a block
        key = {"seed": 0, "row": resample, "length": 0}
        keys = {name: torch.tensor([value]) for name, value in key.items()}
        drawn = noise.uniform(**keys, count=700, purpose=noise.RESAMPLE)[0]
        assert torch.equal(sums[resample], table[(drawn * 700).long()].sum(0))


def test_a_paired_gain_has_a_narrower_interval_than_the_unpaired_difference() -> None:
    generator = torch.Generator().manual_seed(5)
    baseline, counts = correlated_prompts(generator)
    totals = baseline + torch.binomial(counts - baseline, torch.full_like(counts, 0.2))
    rates = Rate(totals, counts), Rate(baseline, counts)
    gain = bootstrap(*rates, compare=operator.sub)
    after, before = map(bootstrap, rates)
    assert gain.mean == pytest.approx(after.mean - before.mean)
    unpaired = math.hypot(after.high - after.low, before.high - before.low)
    assert gain.high - gain.low < 0.6 * unpaired
    assert gain.excludes(0.0)
    assert after.low < before.high  # the paired interval sees what these two do not


def test_a_drafter_compared_with_itself_gains_exactly_nothing() -> None:
    rate = Rate(*correlated_prompts(torch.Generator().manual_seed(6)))
    positions = int(rate.counts.sum())
    gain, quotient = (
        bootstrap(rate, rate, compare=one) for one in (operator.sub, operator.truediv)
    )
    assert gain == Estimate(0.0, 0.0, 0.0, positions, 80)
    assert quotient == Estimate(1.0, 1.0, 1.0, positions, 80)


def test_a_quotient_is_the_speedup_of_total_time_on_the_same_prompts() -> None:
    tokens = torch.tensor([64.0, 32.0, 64.0, 16.0])
    plain, speculative = torch.tensor([8.0, 4.0, 8.0, 2.0]), torch.tensor([3.0, 2.0, 5.0, 1.0])
    speedup = bootstrap(Rate(tokens, speculative), Rate(tokens, plain), compare=operator.truediv)
    assert speedup.mean == pytest.approx(22 / 11)
    assert 8 / 5 <= speedup.low < 2 < speedup.high <= 8 / 3


def test_what_was_recovered_is_the_share_of_the_way_and_paired() -> None:
    generator = torch.Generator().manual_seed(3)
    counts = torch.full((60,), 20.0, dtype=torch.float64)
    way = 2 + 0.2 * torch.rand(60, generator=generator, dtype=torch.float64)
    noise = 0.05 * torch.randn(60, generator=generator, dtype=torch.float64)

    def share(come: Tensor) -> Estimate:
        return bootstrap(Rate(come, counts), Rate(way, counts), compare=operator.truediv)

    found = share(0.7 * way + noise)
    assert found.mean == pytest.approx(0.7, abs=0.02)
    assert found.low < 0.7 < found.high
    assert found.high - found.low < 0.03
    assert (found.n, found.prompts) == (1200, 60)
    ends = [share(come) for come in (0 * way, way)]
    assert [(end.low, end.high) for end in ends] == [(0.0, 0.0), (1.0, 1.0)]


def test_an_interval_from_fewer_than_two_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 prompts"):
        bootstrap(Rate(torch.tensor([3.0]), torch.tensor([4.0])))
    with pytest.raises(ValueError, match="at least 2 prompts"):
        bootstrap(Rate(torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0])))


def test_a_prompt_without_positions_is_no_observation() -> None:
    totals, counts = torch.tensor([3.0, 0.0, 2.0]), torch.tensor([4.0, 0.0, 5.0])
    with_empty = bootstrap(Rate(totals, counts))
    assert with_empty == bootstrap(Rate(totals[[0, 2]], counts[[0, 2]]))
    assert with_empty.prompts == 2
    with pytest.raises(ValueError, match="both sides"):
        bootstrap(Rate(totals, counts), Rate(totals, counts + 1), compare=operator.sub)


def test_an_estimate_serialises_in_the_form_of_every_summary() -> None:
    estimate = bootstrap(Rate(torch.tensor([1, 2]), torch.tensor([4, 4])))
    read_back = json.loads(json.dumps(estimate.as_dict()))
    assert read_back == {
        "mean": estimate.mean,
        "ci95": [estimate.low, estimate.high],
        "n": 8,
        "prompts": 2,
    }


# Exactness


def test_alpha_is_the_acceptance_that_speculative_sampling_realises() -> None:
    generator = torch.Generator().manual_seed(8)
    target_probs, draft_probs = (
        torch.randn(5, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2)
    )
    measured = measure_round(
        VERIFIERS["speculative"],
        target=lambda history: target_probs.expand(len(history), 5),
        draft=lambda history: draft_probs.expand(len(history), 5),
        vocab_size=5,
        gamma=4,
    )
    alpha = sampled_acceptance(target_probs=target_probs, draft_probs=draft_probs).item()
    assert measured.expected_accepted() == pytest.approx(expected_tokens(alpha, 4) - 1, abs=1e-12)
    histogram = torch.stack([measured.mass[measured.accepted == n].sum() for n in range(5)])
    iid = [alpha**n * (1 - alpha) for n in range(4)] + [alpha**4]
    expected = torch.tensor(iid, dtype=torch.float64)
    torch.testing.assert_close(histogram, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kept", [1, 5, 30])
def test_alpha_lies_within_the_bounds_of_a_truncated_support(kept: int) -> None:
    generator = torch.Generator().manual_seed(9)
    target_probs, draft_probs = (
        (2 * torch.randn(1000, 40, generator=generator, dtype=torch.float64)).softmax(-1)
        for _ in range(2)
    )
    ids = target_probs.topk(kept).indices
    target_kept, draft_kept = target_probs.gather(-1, ids), draft_probs.gather(-1, ids)
    low, high = tail_bound(
        kept_overlap=sampled_acceptance(target_probs=target_kept, draft_probs=draft_kept),
        target_tail=1 - target_kept.sum(-1),
        draft_tail=1 - draft_kept.sum(-1),
    )
    alpha = sampled_acceptance(target_probs=target_probs, draft_probs=draft_probs)
    assert (low <= alpha + 1e-12).all()
    assert (alpha <= high + 1e-12).all()
    assert (high - low).max() <= 1
    # Neither end could be tightened: some pairs nearly attain each of them.
    assert (alpha - low).min() < 0.1 * (high - low).max()
    disjoint = target_kept[..., :1] * 0
    assert torch.equal(
        tail_bound(kept_overlap=disjoint, target_tail=disjoint, draft_tail=disjoint)[1], disjoint
    )


# Whether a ratio lies above another one


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 19, 20, 127, 500])
def test_the_tail_of_student_s_t_is_that_of_scipy(degrees: int) -> None:
    for t in (-4.0, -0.3, 0.0, 0.7, 2.0, 6.5, 30.0):
        expected = float(stats.t.sf(t, degrees))
        assert student_t_tail(t, degrees) == pytest.approx(expected, rel=1e-9, abs=1e-12), t


def test_with_answers_of_one_length_the_test_of_a_gain_is_the_paired_t_test() -> None:
    generator = torch.Generator().manual_seed(1)
    after, before = torch.rand(2, 23, generator=generator, dtype=torch.float64)
    counts = torch.full_like(after, 10)
    found = gain_p_value(Rate(after * 10, counts), Rate(before * 10, counts))
    expected = stats.ttest_rel(after.numpy(), before.numpy(), alternative="greater").pvalue
    assert found == pytest.approx(float(expected), rel=1e-9)


def test_the_test_of_a_gain_refuses_nothing_to_compare_and_keeps_nan() -> None:
    ones = torch.ones(5, dtype=torch.float64)

    def p_value(after: Tensor, counts: Tensor = ones) -> float:
        return gain_p_value(Rate(after, counts), Rate(ones / 2, counts))

    assert p_value(ones / 2) == 1  # the same
    assert p_value(ones) == 0  # the same gain everywhere
    assert math.isnan(p_value(ones * math.nan))
    with pytest.raises(ValueError, match="at least 2 prompts with positions, got 1"):
        p_value(ones, torch.tensor([3.0, 0, 0, 0, 0], dtype=torch.float64))
