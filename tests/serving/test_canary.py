"""A new version goes where it is surely worse than the old one; one as good nearly always stays."""

import random

import pytest

from draftkit.serving.canary import Served, judge


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
        assert "over 2000 positions" in verdict.reason


def test_the_verdict_waits_for_positions_and_for_two_requests_of_each() -> None:
    old = served(0.7, 200)
    assert judge(new=served(0.1, 99), old=old, positions=2000) is None
    assert judge(new=served(0.1, 100), old=old, positions=2000) is not None
    assert judge(new=served(0.1, 100), old=served(0.7, 1), positions=2000) is None
    assert judge(new=served(0.1, 1), old=old, positions=20) is None


@pytest.mark.parametrize(("loss", "least", "most"), [(0.0, 0, 11), (0.04, 180, 200)])
def test_how_often_a_canary_with_a_tenth_of_the_rows_goes(
    loss: float, least: int, most: int
) -> None:
    """200 trials. As good: 2.5 % go by chance, 5 expected, above 11 one time in a hundred.

    The mean against the old interval, the rule of before, lets a quarter of them go. A loss of 4
    of its standard errors is seen 97 times in 100.
    """
    gone = by_the_mean = 0
    for seed in range(200):
        old = served(0.7, 1000, seed=2 * seed)
        new = served(0.7 - loss, 100, seed=2 * seed + 1)
        verdict = judge(new=new, old=old, positions=2000)
        assert verdict is not None
        gone += not verdict.stays
        by_the_mean += new.mean < old.estimate().low
    assert least <= gone <= most
    assert by_the_mean >= 30  # the mutant: it would fail the line above


def test_positions_count_and_not_requests() -> None:
    made = Served()
    made.add(10, 1.0)
    made.add(90, 90.0)
    made.add(0, 0.0)
    assert made.positions == 100
    assert made.mean == 0.91
    assert made.estimate().prompts == 2
    copied = made.copy()
    made.add(1, 1.0)
    assert copied.positions == 100
