"""The target as teacher: its scores at the positions that predict generated tokens.

Never trained, never in a checkpoint. Scores answer one question: given the draft's logits of some
tokens, what are both distributions over one set of outcomes? So a loss need not know whether the
target's logits were made of its states just now, or come from a store of its most likely tokens.

Shapes: M tokens of a batch, m of them, V vocabulary, W outcomes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftkit.distillation.batch import Batch
from draftkit.models.adapter import CausalAdapter, Head
from draftkit.theory.warping import SamplingParams, tempered, warped_logits


@dataclass(frozen=True)
class Warp:
    """The distributions that a loss compares: temperature in both, cuts in the target alone.

    never: [V] bool, ids that the draft cannot propose. The target is that of the other ids: what
    it gives to these is lost whatever the draft does.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    never: Tensor | None = None

    def target(self, logits: Tensor) -> Tensor:
        """Logits [m, V] of the target, -inf outside its support."""
        if self.never is not None:
            logits = logits.masked_fill(self.never, -torch.inf)
        if self.top_k == 0 and self.top_p == 1:
            return tempered(logits, self.temperature)
        params = SamplingParams.uniform(
            1,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            device=logits.device,
        )
        return warped_logits(logits[None], params)[0]

    def draft(self, logits: Tensor) -> Tensor:
        """Logits [m, V] of the draft, whose support stays whole."""
        return tempered(logits, self.temperature)


class TargetScores(Protocol):
    """What the target makes of the M generated tokens of a batch."""

    def beside(self, draft_logits: Tensor, rows: slice, warp: Warp) -> tuple[Tensor, Tensor]:
        """Warped logits [m, W] of target and draft over the same outcomes.

        draft_logits: raw, [m, V], of the tokens `rows`.
        """
        ...

    def best(self, rows: slice, warp: Warp) -> Tensor:
        """The target's most likely id [m] at each of the tokens `rows`."""
        ...


@dataclass(frozen=True)
class FullScores:
    """States [M, H] and the head that makes logits of them; without a head, the logits [M, V]."""

    states: Tensor
    head: Head | None

    def beside(self, draft_logits: Tensor, rows: slice, warp: Warp) -> tuple[Tensor, Tensor]:
        """Both over the vocabulary."""
        with torch.no_grad():
            target_logits = warp.target(self._logits(rows))
        return target_logits, warp.draft(draft_logits)

    def best(self, rows: slice, warp: Warp) -> Tensor:
        """The first of the largest logits."""
        with torch.no_grad():
            return warp.target(self._logits(rows)).argmax(-1)

    def _logits(self, rows: slice) -> Tensor:
        states = self.states[rows]
        return states if self.head is None else self.head(states)


class Teacher:
    """Scores batches with a frozen target."""

    def __init__(self, target: CausalAdapter) -> None:
        self._target = target

    @torch.no_grad()
    def score(self, batch: Batch) -> TargetScores:
        """Run the target once over `batch`."""
        states = self._target.states(batch.input_ids, batch.predicting, batch.packing)
        return FullScores(states, self._target.head)
