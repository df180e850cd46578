"""The target as teacher: its scores at the positions that predict generated tokens.

Never trained, never in a checkpoint. Later forms of the scores (hidden states with the head,
top-k with a tail) take the place of full logits behind the same call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftkit.distillation.batch import Batch
from draftkit.models.adapter import Adapter


@dataclass(frozen=True)
class TargetScores:
    """Logits [M, V] of the target for the M generated tokens of a batch."""

    logits: Tensor


class Teacher:
    """Scores batches with a frozen target."""

    def __init__(self, target: Adapter) -> None:
        self._target = target

    @torch.no_grad()
    def score(self, batch: Batch) -> TargetScores:
        """Run the target once over `batch`."""
        return TargetScores(self._target.score(batch.input_ids, batch.predicting))
