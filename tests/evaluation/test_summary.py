"""The verdict follows the interval, and exactness comes first."""

import pytest

from draftkit.evaluation.lossless import NOT_CHECKED, Losslessness
from draftkit.evaluation.summary import best_of, verdict
from draftkit.theory.acceptance import Estimate

NAN = float("nan")
EXACT = Losslessness(compared=32, mismatches=0, near_ties=0)


def estimate(low, high):
    return Estimate(mean=(low + high) / 2, low=low, high=high, n=100, prompts=10)


def decide(low, high, lossless=EXACT, break_even=0.7, rounds=0.9):
    return verdict(
        speedup=estimate(low, high),
        rounds=estimate(rounds, rounds),
        lossless=lossless,
        ceiling=0.95,
        break_even_alpha=break_even,
    )


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.01, 1.4, "deploy"),
        (0.8, 0.99, "do_not_deploy"),
        (0.9, 1.1, "inconclusive"),
        (1.0, 1.2, "inconclusive"),
        (NAN, NAN, "inconclusive"),
    ],
)
def test_the_interval_against_one_decides(low, high, expected):
    decision, reason = decide(low, high)
    assert decision == expected
    assert reason.startswith(f"end-to-end speedup {(low + high) / 2:.2f} [{low:.2f}, {high:.2f}]")


def test_a_draft_that_changes_outputs_is_never_deployed_however_fast():
    decision, reason = decide(2.0, 3.0, Losslessness(compared=32, mismatches=3, near_ties=1))
    assert decision == "do_not_deploy"
    assert "2 of 32" in reason


def test_near_ties_do_not_stop_a_deployment():
    assert decide(2.0, 3.0, Losslessness(compared=32, mismatches=2, near_ties=2))[0] == "deploy"


def test_what_was_not_checked_is_deployed_by_its_speed_and_the_reason_says_so():
    decision, reason = decide(2.0, 3.0, NOT_CHECKED)
    assert decision == "deploy"
    assert reason.endswith("lies above 1; whether it is lossless was not checked")
    fast = {"speedup": {"end_to_end": {"mean": 1.2, "ci95": [1.1, 1.3]}}}
    for lossless, best in ((NOT_CHECKED, "drafter"), (Losslessness(4, 1, 0), "none")):
        assert best_of({"drafter": fast | {"lossless": lossless.as_dict()}}) == best


def test_a_hopeless_pair_is_told_its_ceiling():
    assert "even a perfect draft would reach 0.95" in decide(0.5, 0.6, break_even=None)[1]
    assert "alpha of 0.70" in decide(0.5, 0.6)[1]


def test_rounds_that_gain_what_the_prefill_costs_again_are_told_apart():
    reason = decide(0.8, 0.9, rounds=1.21)[1]
    assert "rounds alone reach 1.21, but the draft's prefill costs more" in reason
    assert "alpha" not in reason
