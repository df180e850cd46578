"""The verdict follows the interval, and exactness comes first."""

import math

import pytest
import torch

from draftkit.evaluation.intervals import Estimate, speedup
from draftkit.evaluation.lossless import NOT_CHECKED, Losslessness
from draftkit.evaluation.summary import best_of, best_use, verdict, ways_beside
from draftkit.evaluation.walltime import PLAIN
from tests.evaluation.simulated import WAYS, chunked

NAN = float("nan")
EXACT = Losslessness(compared=32, mismatches=0, near_ties=0)


def estimate(low, high, documents=20):
    return Estimate((low + high) / 2, low, high, n=100, prompts=50, documents=documents)


def decide(low, high, lossless=EXACT, break_even=0.7, rounds=0.9, **of):
    return verdict(
        gained=estimate(low, high, of.pop("documents", 20)),
        rounds=estimate(rounds, rounds),
        lossless=lossless,
        ceiling=0.95,
        break_even_alpha=break_even,
        **of,
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
    for lossless, best in ((NOT_CHECKED, "drafter"), (Losslessness(4, 1, 0), "none")):
        ways = {"drafter": way(1.2, 1.1) | {"lossless": lossless.as_dict()}}
        assert best_of(ways, "drafter") == best


def way(mean, low, p_value=1e-6):
    whole = {"mean": mean, "ci95": None if low is None else [low, 2 * mean - low]}
    return {"speedup": {"end_to_end": whole | {"p_value": p_value}}}


def test_the_best_is_chosen_of_ways_that_pass_a_harder_test_than_the_judged_one():
    """Of two others each has half of the 0.2 % that they share."""
    judged = {"drafter": way(1.2, 1.01, 0.02)}
    for p_value, best in ((0.0009, "prompt_lookup"), (0.0011, "drafter")):
        others = {"prompt_lookup": way(1.3, 1.05, p_value), "before": way(1.1, 1.001, 0.0249)}
        assert best_of(others | judged, "drafter") == best
    alone = {"prompt_lookup": way(1.3, 1.05, 0.01), "drafter": way(0.9, 0.8, 0.9)}
    assert best_of(alone, "drafter") == "none"
    few = {"drafter": way(2.0, None, None), "before": way(2.0, None, None)}
    assert best_of(few, "drafter") == "none"


@pytest.mark.parametrize(
    ("documents", "batch_size", "words"),
    [
        (6, 1, "it timed 6 of the 20 documents that a verdict needs "),
        (6, 4, "it timed 6 of the 20 batches of 4 documents that a verdict needs "),
    ],
)
def test_few_documents_decide_nothing_however_fast_and_the_reason_says_how_many_there_were(
    documents, batch_size, words
):
    decision, reason = decide(0, math.inf, documents=documents, batch_size=batch_size)
    assert decision == "inconclusive"
    assert reason.startswith(f"this run only shows that every part works: {words}")


def test_a_hopeless_pair_is_told_its_ceiling():
    assert "even a perfect draft would reach 0.95" in decide(0.5, 0.6, break_even=None)[1]
    assert "alpha of 0.70" in decide(0.5, 0.6)[1]


def test_rounds_that_gain_what_the_prefill_costs_again_are_told_apart():
    reason = decide(0.8, 0.9, rounds=1.21)[1]
    assert "rounds alone reach 1.21, but the draft's prefill costs more" in reason
    assert "alpha" not in reason


def used(decision, mixed, others=(), passed=True):
    """The verdict on a drafter of 1.2 that got `decision` alone, beside the hybrid `mixed`."""
    lossless = {"passed": passed}
    drafter = way(1.2, 1.1) | {"verdict": decision, "reason": "alone", "proposer": "sampled"}
    ways = {"drafter": drafter, "hybrid": mixed} | dict(others)
    ways = {name: one | {"lossless": lossless} for name, one in ways.items()}
    found = best_use(drafter | {"lossless": lossless}, ways)
    return found["use"], found["verdict"], found["reason"]


def test_the_verdict_is_on_the_best_use_of_the_drafter():
    """The hybrid has to pass the harder test of a way that stands beside the judged one."""
    reason = "end-to-end speedup as decode.proposer=hybrid 1.40 [1.30, 1.50] lies above 1"
    for decision in ("deploy", "inconclusive", "do_not_deploy"):
        assert used(decision, way(1.4, 1.3)) == ("hybrid", "deploy", reason)
    assert used("deploy", way(1.1, 1.05))[0] == "sampled"  # the drafter alone is faster
    assert used("inconclusive", way(1.1, 1.05))[:2] == ("hybrid", "deploy")
    three = {"prompt_lookup": way(1.0, 0.9, 0.5), "before": way(1.0, 0.9, 0.5)}
    for p_value, decision in ((0.0006, "deploy"), (0.0007, "inconclusive")):
        assert used("inconclusive", way(1.4, 1.01, p_value), three)[1] == decision


def test_a_drafter_that_loses_alone_is_not_turned_down_while_its_hybrid_may_gain():
    use, decision, reason = used("do_not_deploy", way(0.98, 0.9, 0.7))
    assert (use, decision) == ("hybrid", "inconclusive")
    assert reason == "alone; but as decode.proposer=hybrid 0.98 [0.90, 1.06] does not"
    assert used("do_not_deploy", way(0.8, 0.7, 0.99))[1] == "do_not_deploy"


def test_what_loses_exactness_or_has_no_interval_is_judged_as_before():
    assert used("do_not_deploy", way(2.0, 1.9), passed=False)[1:] == ("do_not_deploy", "alone")
    assert used("inconclusive", way(2.0, None, None))[1:] == ("inconclusive", "alone")


def test_a_way_beside_the_judged_one_has_the_interval_of_one_that_was_chosen():
    """Three of them leave out a third each of what the judged one leaves out."""
    generator = torch.Generator().manual_seed(0)
    tokens = 50 + 100 * torch.rand(24, generator=generator, dtype=torch.float64)
    noise = torch.randn(24, generator=generator, dtype=torch.float64)
    one = chunked(tokens, tokens / 1.2 * (0.1 * noise).exp(), [*range(24)])
    timed = {PLAIN: chunked(tokens, tokens, [*range(24)])} | dict.fromkeys(WAYS.values(), one)
    ways = ways_beside(timed, WAYS, "drafter", {})
    for name, tail in {**dict.fromkeys(WAYS, 0.025 / 3), "drafter": 0.025}.items():
        expected = speedup(one.answers, timed[PLAIN].answers, tail=tail)
        assert ways[name]["speedup"]["end_to_end"]["ci95"] == expected.ci95
