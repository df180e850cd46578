"""Forecasts of acceptance from runs on fewer texts, against laws whose future is known."""

import pytest
import torch

from draftkit.theory.forecast import DEVIATION, forecast

TEXTS = [400, 800, 1600]


def law(times: float, exponent: float, gain: float) -> float:
    """Alpha after `times` the largest run's texts, where it has 0.45."""
    return 0.45 + gain * (1 - times**-exponent) / (2**exponent - 1)


def runs(exponent: float, gain: float) -> list[float]:
    return [law(texts / TEXTS[-1], exponent, gain) for texts in TEXTS]


@pytest.mark.parametrize("times", [2, 4])
def test_four_of_five_intervals_hold_the_run_that_follows(times: int) -> None:
    draws, hits = torch.Generator().manual_seed(0), 0
    repetitions = 400
    for _ in range(repetitions):
        exponent, gain = 1.2 * _uniform(draws) - 0.2, 0.04 * _uniform(draws)
        noise = DEVIATION * torch.randn(4, generator=draws, dtype=torch.float64)
        judged = [
            one + error for one, error in zip(runs(exponent, gain), noise[:3].tolist(), strict=True)
        ]
        low, high = forecast(TEXTS, judged, times)["interval"]
        hits += low <= law(times, exponent, gain) + noise[3].item() <= high
    assert 0.75 < hits / repetitions < 0.85  # 0.8 +- 2.5 standard errors


def _uniform(draws: torch.Generator) -> float:
    return torch.rand((), generator=draws).item()


@pytest.mark.parametrize("exponent", [0.1, 0.5, 0.9])
def test_runs_that_bend_are_told_from_those_that_do_not(exponent: float) -> None:
    gain = 0.08  # large beside the deviation of a run, so that the bend is seen
    there = forecast(TEXTS, runs(exponent, gain), 4)["mean"]
    assert there == pytest.approx(law(4, exponent, gain), abs=0.012)
    assert forecast(TEXTS, runs(exponent, gain), 8)["mean"] > there


def test_more_text_is_less_certain_and_no_gain_stays_none() -> None:
    widths = []
    for times in (2, 5, 10):
        guess = forecast(TEXTS, [0.4, 0.4, 0.4], times)
        low, high = guess["interval"]
        assert low < guess["mean"] < high
        assert guess["mean"] == pytest.approx(0.4, abs=1e-3)
        widths.append(high - low)
    assert widths == sorted(widths)


def test_the_order_and_the_unit_of_the_runs_do_not_matter() -> None:
    judged = runs(0.4, 0.03)
    turned = forecast([3.2, 0.8, 1.6], [judged[2], judged[0], judged[1]], 5)
    assert turned["interval"] == pytest.approx(forecast(TEXTS, judged, 5)["interval"], abs=2e-4)


def test_two_numbers_of_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="runs on 3 numbers of texts"):
        forecast([400, 800, 800], [0.3, 0.4, 0.41], 2)
