"""A judgement puts measured parts together under the keys that other tools read."""

import pytest
import torch

from draftkit.config import Config, DecodeConfig, EvaluateConfig, SamplingConfig
from draftkit.decoding.generation import Completion
from draftkit.evaluation.alpha import PromptTotals
from draftkit.evaluation.judge import Evidence, compare, count_rounds, summarise
from draftkit.evaluation.lossless import Losslessness
from draftkit.evaluation.walltime import FullBatch, Timed
from draftkit.theory.speedup import Costs

CONFIG = Config(decode=DecodeConfig(gamma=2), evaluate=EvaluateConfig(bootstrap=300))
SERVED = SamplingConfig()


def completion(counts, tested, total):
    return Completion([1], [2] * 12, accept_counts=counts, tested=tested, acceptance_total=total)


def evidence(alpha=0.75, seconds=2.0, prefill=0.1):
    timed = Timed(
        seconds=[seconds, seconds],
        prefill_seconds=[prefill, prefill],
        tokens=[12, 12],
        completions=[completion([1, 2, 3], 11, 8.0), completion([2, 2, 2], 10, 6.0)],
        full=[FullBatch(seconds, 12, 6, 14), FullBatch(seconds, 12, 6, 12)],
    )
    plain = Timed(
        [4.0, 4.0],
        [0.05, 0.05],
        [12, 12],
        [completion([12], 0, 0.0)] * 2,
        [FullBatch(4.0, 12, 12, 12)] * 2,
    )
    column = torch.tensor([10.0, 20.0], dtype=torch.float64)
    totals = {
        "alpha": alpha * column,
        "alpha_greedy_draft": 0.5 * column,
        "alpha_exact_match": 0.25 * column,
    }
    return Evidence(
        scored=PromptTotals(totals, column),
        timed=timed,
        plain=plain,
        costs=Costs(0.01, 0.2, 1.1, 0.1, {1: 1.05, 2: 1.1, 4: 1.2, 8: 1.4}),
        lossless=Losslessness(4, 0, 0),
    )


def test_counts_follow_from_the_histogram_of_all_rounds():
    counted = count_rounds(evidence().timed, 2, seed=0, resamples=300)
    assert counted["accept_counts"] == [3, 4, 5]
    assert counted["acceptance_length"]["mean"] == pytest.approx(1 + 14 / 12)
    assert counted["acceptance_length"]["n"] == 12
    assert counted["acceptance_rate"]["mean"] == pytest.approx(14 / 24)
    assert counted["acceptance_per_position"] == pytest.approx([9 / 12, 5 / 12])
    assert counted["alpha_decoding"]["mean"] == pytest.approx(14 / 21)


def test_the_prediction_uses_tau_and_calibrated_costs_alone():
    summary = summarise(evidence(), SERVED, CONFIG)
    tau = 1 + 14 / 12
    assert summary["speedup"]["predicted"] == pytest.approx(tau / (2 * 0.2 + 1.1 + 0.1))
    assert summary["speedup"]["ceiling"] == pytest.approx(3 / 1.6)
    assert summary["speedup"]["measured"] == pytest.approx(2.0)
    slower = summarise(evidence(seconds=8.0), SERVED, CONFIG)
    assert slower["speedup"]["predicted"] == summary["speedup"]["predicted"]
    assert slower["speedup"]["measured"] == pytest.approx(0.5)
    assert slower["speedup"]["prediction_error"] == pytest.approx(0.5 / (tau / 1.6) - 1)


def test_verdict_and_break_even_follow():
    fast = summarise(evidence(), SERVED, CONFIG)
    slow = summarise(evidence(seconds=8.0), SERVED, CONFIG)
    assert (fast["verdict"], slow["verdict"]) == ("deploy", "do_not_deploy")
    alpha = fast["break_even_alpha"]
    assert 1 + alpha + alpha**2 == pytest.approx(1.6)
    assert fast["best_gamma"] > 0
    assert fast["tokens_per_second"] == {"autoregressive": 3.0, "speculative": 6.0}


def test_a_draft_whose_prefill_costs_more_than_its_rounds_save_is_not_deployed():
    """A chunk takes 4.05 s without it; 2 s of rounds with it, and 2.5 s or 0.5 s of prefill."""
    slow, fast = (evidence(prefill=seconds) for seconds in (2.5, 0.5))
    for judged, decision, speedup in (
        (slow, "do_not_deploy", 4.05 / 4.5),
        (fast, "deploy", 4.05 / 2.5),
    ):
        summary = summarise(judged, SERVED, CONFIG)
        assert summary["verdict"] == decision
        assert summary["speedup"]["measured"] == pytest.approx(2.0)
        assert summary["speedup"]["end_to_end"]["mean"] == pytest.approx(speedup)
        assert summary["speedup"]["end_to_end"]["ci95"] == pytest.approx([speedup, speedup])
        assert summary["speedup"]["end_to_end"]["chunks"] == 2
        assert summary["reason"].startswith(f"end-to-end speedup {speedup:.2f}")


def test_before_and_after_stand_side_by_side_with_a_paired_gain():
    pair = {"before": evidence(alpha=0.5), "after": evidence(alpha=0.75)}
    summary = compare(pair, "after", SERVED, CONFIG)
    assert summary["alpha"]["mean"] == pytest.approx(0.75)
    assert summary["before"]["alpha"]["mean"] == pytest.approx(0.5)
    # the same shift in every prompt leaves a paired interval of no width
    assert summary["alpha_gain"]["ci95"] == pytest.approx([0.25, 0.25])
    assert "before" not in compare({"given": evidence()}, "given", SERVED, CONFIG)
