"""The optimizers of training: AdamW, and for a model without knowledge Muon beside it."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from draftkit.config import OptimConfig

Named = Iterable[tuple[str, nn.Parameter]]
OptimizerOf = Callable[[Named, OptimConfig, float], torch.optim.Optimizer]  # the peak rate last

BETAS = (0.9, 0.98)  # of AdamW: decay of the first and the second moment
ADAMW_SCALE = "match_rms_adamw"  # of torch's Muon: updates as large as AdamW's


def adamw(weights: Named, optim: OptimConfig, rate: float) -> torch.optim.Optimizer:
    """AdamW over all of `weights`, at `rate`."""
    return torch.optim.AdamW(
        [weight for _, weight in weights],
        lr=rate,
        betas=BETAS,
        weight_decay=optim.weight_decay,
        fused=True,
    )


class Muon(torch.optim.Optimizer):
    """Muon for the matrices inside a model, AdamW for embeddings, head and vectors.

    An update of a matrix is its momentum with all singular values brought near 1 (Jordan et al.
    2024), scaled so that AdamW's rate serves both (Liu et al. 2502.16982).
    """

    def __init__(self, weights: Named, optim: OptimConfig, rate: float) -> None:
        matrices, others = [], []
        for name, weight in weights:
            if weight.ndim == 2 and not re.search("embed|lm_head", name):
                matrices.append(weight)
            else:
                others.append((name, weight))
        decay = optim.weight_decay
        muon = partial(torch.optim.Muon, lr=rate, weight_decay=decay, adjust_lr_fn=ADAMW_SCALE)
        rest = partial(adamw, optim=optim, rate=rate)
        makers = ((muon, matrices), (rest, others))
        self._parts = [make(part) for make, part in makers if part]
        groups: list[dict[str, Any]] = [g for part in self._parts for g in part.param_groups]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all weights that have a gradient."""
        assert closure is None
        # Others replace the state and the groups of this optimizer; its parts work on the same.
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [group]
            part.step()


OPTIMIZERS: dict[str, OptimizerOf] = {"adamw": adamw, "muon": Muon}
