"""What more training text would give: the acceptance of three or more runs, carried on.

A run's alpha grows with its number of texts n, in units of the largest run,

    alpha(n) = last + gain (f(n) - f(1)) / (f(1) - f(least)) + a deviation of the run
    f(n) = -(n + b)^-c

so `last` is alpha of the largest run and `gain` what came since the smallest. Three runs tell
neither b nor c nor the deviation. The forecast is an average over these, weighted by how well they
fit:

- b = 0 and c from -0.2 (each doubling gains 1.15 times the one before) over 0 (each gains the same)
  to 3 (each gains an eighth): the power laws by which losses fall with data (Hestness et al., arXiv
  1712.00409; Kaplan et al., arXiv 2001.08361).
- c = 1, and c = 20 with b = 20 tau, which is nearly 1 - exp(-n / tau): alpha saturates.
- The deviation about `DEVIATION`, by a scaled inverse chi square of `DEGREES`. Runs that fit badly
  widen the interval.
"""

from collections.abc import Sequence
from typing import Any

import torch

LEAST_RUNS = 3
TIMES = (2, 5, 10)  # the largest run's texts that often
# Standard deviation of alpha between trainings of one setting: by seed, order of texts, rounding.
DEVIATION, DEGREES = 0.003, 2
DEVIATIONS = DEVIATION * torch.logspace(-0.6, 0.8, 10, dtype=torch.float64)
_POWERS = torch.linspace(-0.2, 3, 80, dtype=torch.float64)  # not 0, where f is constant
_SCALES = torch.logspace(-1, 0.5, 40, dtype=torch.float64)
EXPONENTS = torch.cat([_POWERS, torch.ones(40), torch.full((40,), 20.0)])[:, None]
SHIFTS = torch.cat([torch.zeros(80), _SCALES, 20 * _SCALES])[:, None]


def forecast(
    texts: Sequence[float], alphas: Sequence[float], times: float, *, level: float = 0.8
) -> dict[str, Any]:
    """Alpha after `times` as many texts as the largest run had: `mean` (the median), `interval`.

    texts, alphas: one a run. Runs share all other settings and the prompts that they are judged on;
    each has a schedule of its own. The interval, of probability `level`, is of a single run judged
    on the same prompts. Raises ValueError for fewer than `LEAST_RUNS` different numbers of texts.
    """
    if len(set(texts)) < LEAST_RUNS:
        raise ValueError(f"a forecast needs runs on {LEAST_RUNS} numbers of texts, as n/4, n/2, n")
    sizes = torch.tensor(texts, dtype=torch.float64) / max(texts)
    judged = torch.tensor(alphas, dtype=torch.float64)
    rows = _rows(sizes, sizes.min())  # [C, R, 2]
    normal = rows.mT @ rows  # [C, 2, 2]
    fitted = torch.linalg.solve(normal, rows.mT @ judged)  # [C, 2]: last, gain
    misfit = (judged - (rows @ fitted[..., None])[..., 0]).square().sum(-1)
    # The likelihood of shape and deviation [C, S], after last and gain have been integrated out.
    fits = -(misfit[:, None] / DEVIATIONS.square() + normal.logdet()[:, None]) / 2
    fits = fits - (len(texts) - 2) * DEVIATIONS.log()
    prior = -DEGREES * (DEVIATIONS.log() + (DEVIATION / DEVIATIONS).square() / 2)
    weights = (fits + prior).flatten().softmax(0)
    ahead = _rows(torch.tensor([times], dtype=torch.float64), sizes.min())[:, 0]  # [C, 2]
    centers = (ahead * fitted).sum(-1, keepdim=True)
    leverage = (ahead * torch.linalg.solve(normal, ahead)).sum(-1, keepdim=True)
    spreads = DEVIATIONS * (1 + leverage).sqrt()  # [C, S]
    levels = torch.tensor([(1 - level) / 2, 0.5, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.zeros_like(levels), torch.ones_like(levels)
    for _ in range(20):  # by bisection
        middle = (low + high) / 2
        below = torch.special.ndtr((middle[:, None, None] - centers) / spreads).flatten(1) @ weights
        low, high = middle.where(below < levels, low), middle.where(below >= levels, high)
    least, median, most = high.tolist()
    return {"mean": median, "interval": [least, most], "level": level, "times": times}


def _rows(sizes: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """By shape, what multiplies last and gain in alpha at `sizes` [R]: [C, R, 2]."""
    grown, first, last = (-((n + SHIFTS) ** -EXPONENTS) for n in (sizes, least, torch.tensor(1.0)))
    grown = (grown - last) / (last - first)
    return torch.stack([torch.ones_like(grown), grown], -1)
