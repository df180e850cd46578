"""A new version goes where its acceptance is surely below the old one's, and not before."""

import math
import random

import pytest
import torch

from draftkit.config import GateConfig
from draftkit.serving.canary import KEPT, REQUESTS, WIDTH, AcceptanceLog, Judgement, judge
from draftkit.theory.acceptance import Rate, estimate


def served(rate: float, requests: int, *, seed: int = 0, tested: int = 20) -> AcceptanceLog:
    """Requests whose acceptance varies around `rate`."""
    draw, made = random.Random(seed), AcceptanceLog()
    for _ in range(requests):
        made.add(tested, tested * min(1.0, max(0.0, draw.gauss(rate, 0.1))))
    return made


def judged(new: AcceptanceLog, old: AcceptanceLog, positions: int) -> Judgement | None:
    return judge(GateConfig(canary_tokens=positions), new=new, old=old)


def test_a_clearly_worse_version_goes_and_any_other_stays() -> None:
    old = served(0.7, 200)
    for rate, stays in ((0.5, False), (0.66, False), (0.72, True), (0.9, True)):
        verdict = judged(new=served(rate, 100, seed=1), old=old, positions=2000)
        assert verdict is not None
        assert verdict.stays == stays
        assert f"over 2000 positions is {'not surely ' if stays else ''}below" in verdict.reason


def test_the_verdict_waits_for_positions_and_for_requests_of_both() -> None:
    old = served(0.7, 200)
    assert judged(new=served(0.1, 99), old=old, positions=2000) is None
    assert judged(new=served(0.1, 100), old=old, positions=2000) is not None
    assert judged(new=served(0.1, 100), old=served(0.7, REQUESTS - 1), positions=2000) is None
    few = served(0.1, REQUESTS - 1, tested=200)
    assert judged(new=few, old=old, positions=2000) is None
    few.add(200, 20.0)
    assert judged(new=few, old=old, positions=2000) is not None


def test_just_below_is_told_from_just_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the 95 % interval of the difference: here 0.05 is its half width."""
    monkeypatch.setattr(AcceptanceLog, "error", 0.05 / WIDTH / math.sqrt(2))
    old = served(0.7, 200)
    for change, stays in ((-0.0501, False), (-0.0499, True), (0.0501, True), (math.nan, False)):
        new = AcceptanceLog()
        for _ in range(REQUESTS):
            new.add(100, 100 * (old.mean + change))
        verdict = judged(new=new, old=old, positions=1000)
        assert verdict is not None
        assert verdict.stays == stays


def withdrawn(change: float, *, share: float, trials: int) -> float:
    """How often a version goes whose alpha is higher by `change`.

    It has gathered `online.gate.canary_tokens` positions, by requests of 60 tested positions
    whose own alpha varies by 0.1, and the old one the rest of the same traffic.
    """
    positions, generator = GateConfig().canary_tokens, torch.Generator().manual_seed(0)
    requests = -(-positions // 60)
    others = round(requests * (1 - share) / share)
    gone = 0
    for _ in range(trials):
        sides = []
        for count, mean in ((requests, 0.7 + change), (others, 0.7)):
            made = AcceptanceLog()
            alphas = (mean + 0.1 * torch.randn(count, generator=generator)).clamp(0, 1)
            for alpha in alphas.tolist():
                made.add(60, 60 * alpha)
            sides.append(made)
        verdict = judged(new=sides[0], old=sides[1], positions=positions)
        assert verdict is not None
        gone += not verdict.stays
    return gone / trials


TRIALS = [400, pytest.param(4000, marks=pytest.mark.soak)]


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize(("share", "caught"), [(GateConfig().canary_fraction, 0.95), (0.5, 0.75)])
def test_an_equal_version_is_rarely_withdrawn_and_one_that_is_worse_nearly_always(
    share: float, caught: float, trials: int
) -> None:
    assert withdrawn(0.0, share=share, trials=trials) <= 0.05  # 1/40 by the rule
    assert withdrawn(-0.05, share=share, trials=trials) >= caught
    assert withdrawn(0.02, share=share, trials=trials) <= 0.01


def test_the_error_of_a_mean_is_that_of_its_interval() -> None:
    draw, made = random.Random(3), AcceptanceLog()
    for _ in range(300):
        tested = draw.randrange(1, 120)
        made.add(tested, tested * draw.betavariate(4, 2))
    columns = (torch.tensor(made.acceptance), torch.tensor(made.tested))
    interval = estimate(Rate(*columns))
    assert made.error == pytest.approx((interval.high - interval.low) / 2 / WIDTH, rel=0.02)
    assert made.mean == pytest.approx(interval.mean)


def test_a_verdict_comes_however_many_positions_it_waits_for() -> None:
    """More than the requests of which the means are made can have."""
    new, old = AcceptanceLog(), AcceptanceLog()
    for number in range(2 * KEPT):
        new.add(2, 1.8 + 0.1 * (number % 2))
        old.add(2, 1.8 + 0.1 * (number % 2))
    assert judged(new=new, old=old, positions=4 * KEPT + 1) is None
    verdict = judged(new=new, old=old, positions=4 * KEPT)
    assert verdict is not None
    assert verdict.stays


def test_a_trial_that_nothing_can_decide_ends() -> None:
    new, gate = served(0.7, 10), GateConfig()
    share, positions = gate.canary_fraction, gate.canary_tokens
    enough = round(positions / share)
    old = served(0.7, 10)
    assert judge(gate, new=new, old=old) is None  # not a candidate, but the version in force
    assert judge(gate, new=new, old=old, rows=enough - 1) is None
    verdict = judge(gate, new=new, old=old, rows=enough)
    assert verdict is not None
    assert not verdict.stays
    assert "of 40000 rows it has 200 tested positions" in verdict.reason
    assert "online.gate.canary_tokens" in verdict.reason
    assert "\n" not in verdict.reason
    # Where one position would do, there must still be time for the requests of both.
    gate, new = GateConfig(canary_fraction=0.5, canary_tokens=1), AcceptanceLog()
    assert judge(gate, new=new, old=old, rows=8 * REQUESTS - 1) is None
    assert judge(gate, new=new, old=old, rows=8 * REQUESTS) is not None


def test_positions_count_and_not_requests() -> None:
    made = AcceptanceLog()
    made.add(10, 1.0)
    made.add(90, 90.0)
    made.add(0, 0.0)
    assert made.positions == 100
    assert made.mean == 0.91
    copied = made.copy()
    made.add(1, 1.0)
    assert copied.positions == 100
