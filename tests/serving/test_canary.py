"""A new version goes where its acceptance lies below the old one's interval, and not before."""

import random

import pytest

from draftkit.serving.canary import Served, judge
from draftkit.theory.acceptance import Estimate


def served(rate: float, requests: int, *, seed: int = 0, tested: int = 20) -> Served:
    """Requests whose acceptance varies around `rate`."""
    draw, made = random.Random(seed), Served()
    for _ in range(requests):
        made.add(tested, tested * min(1.0, max(0.0, draw.gauss(rate, 0.1))))
    return made


def test_a_clearly_worse_version_goes_and_any_other_stays() -> None:
    old = served(0.7, 200)
    for rate, stays in ((0.5, False), (0.66, False), (0.72, True), (0.9, True)):
        verdict = judge(new=served(rate, 100, seed=1), old=old, positions=2000)
        assert verdict is not None
        assert verdict.stays == stays
        assert f"over 2000 positions is {'not ' if stays else ''}below" in verdict.reason


def test_the_verdict_waits_for_positions_and_for_two_requests_of_the_old_one() -> None:
    old = served(0.7, 200)
    assert judge(new=served(0.1, 99), old=old, positions=2000) is None
    assert judge(new=served(0.1, 100), old=old, positions=2000) is not None
    assert judge(new=served(0.1, 100), old=served(0.7, 1), positions=2000) is None


def test_just_below_is_told_from_just_above(monkeypatch: pytest.MonkeyPatch) -> None:
    old = served(0.7, 200)
    monkeypatch.setattr(Served, "interval", lambda _: Estimate(0.7, 0.65, 0.75, 1, 2))
    for rate, stays in ((0.6499, False), (0.65, True), (0.6501, True)):
        new = Served()
        new.add(1000, 1000 * rate)
        verdict = judge(new=new, old=old, positions=1000)
        assert verdict is not None
        assert verdict.stays == stays


def test_positions_count_and_not_requests() -> None:
    made = Served()
    made.add(10, 1.0)
    made.add(90, 90.0)
    made.add(0, 0.0)
    assert made.positions == 100
    assert made.mean == 0.91
    assert made.interval().prompts == 2
    copied = made.copy()
    made.add(1, 1.0)
    assert copied.positions == 100
