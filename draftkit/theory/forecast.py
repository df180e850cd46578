"""What more training text would give: the acceptance of three or more runs, carried on.

A run's alpha follows a power law of its number of texts n, with a limit,

    alpha(n) = last + gain (1 - n^-c) / (2^c - 1) + a deviation of the run,

the form in which losses fall with data (Hestness et al., arXiv 1712.00409; Kaplan et al., arXiv
2001.08361). With n in units of the largest run, `last` is alpha there and `gain` that of the last
doubling. Three runs do not tell c. The forecast is therefore an average over all c from -0.2 (each
doubling gains 1.15 times the one before, as early in training) over 0 (each gains the same) to 1
(each gains half of the one before), weighted by how well they fit.
"""

from collections.abc import Sequence
from typing import Any

import torch

LEAST_RUNS = 3
TIMES = (2, 5, 10)  # the largest run's texts that often
# Standard deviation of a run's alpha about the law: order of the texts, rounding.
DEVIATION = 0.003
EXPONENTS = torch.linspace(-0.2, 1.0, 60, dtype=torch.float64)  # not 0, where both sides vanish
ALPHAS = torch.linspace(0, 1, 10_001, dtype=torch.float64)


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
    rows = _rows(sizes)  # [C, R, 2]
    normal = rows.mT @ rows  # [C, 2, 2]
    fitted = torch.linalg.solve(normal, rows.mT @ judged)  # [C, 2]: last, gain
    misfit = (judged - (rows @ fitted[..., None])[..., 0]).square().sum(-1)
    # The likelihood of c, after last and gain have been integrated out
    weights = (-misfit / (2 * DEVIATION**2) - normal.logdet() / 2).softmax(0)
    ahead = _rows(torch.tensor([times], dtype=torch.float64))[:, 0]  # [C, 2]
    centers = (ahead * fitted).sum(-1)
    spreads = DEVIATION * (1 + (ahead * torch.linalg.solve(normal, ahead)).sum(-1)).sqrt()
    below = weights @ torch.special.ndtr((ALPHAS - centers[:, None]) / spreads[:, None])
    levels = below.new_tensor([(1 - level) / 2, 0.5, (1 + level) / 2])
    at = torch.searchsorted(below, levels).clamp(max=len(ALPHAS) - 1)
    low, median, high = ALPHAS[at].tolist()
    return {"mean": median, "interval": [low, high], "level": level, "times": times}


def _rows(sizes: torch.Tensor) -> torch.Tensor:
    """By exponent, what multiplies last and gain in alpha at `sizes` [R]: [C, R, 2]."""
    exponents = EXPONENTS[:, None]
    grown = (1 - sizes**-exponents) / (2**exponents - 1)
    return torch.stack([torch.ones_like(grown), grown], -1)
