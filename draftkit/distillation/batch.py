"""What one training step sees: token ids, and which of them were generated.

The label shift lives here and nowhere else: the logits at position i - 1 predict the token at i.
Rows are padded on the right; a padded position is never generated, so it never enters a loss.

Shapes: B rows, T tokens, M generated tokens of the batch, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """Token ids and, for each, whether it was generated (true) or given (false).

    rejected: whether verification refused what the draft had proposed there. block_offset: how
    many drafted tokens come before it in its round. Both mean nothing where nothing was generated.
    """

    token_ids: Sequence[int]
    generated: Sequence[bool]
    rejected: Sequence[bool] | None = None
    block_offset: Sequence[int] | None = None


@dataclass(frozen=True)
class Batch:
    """Rows of text with the explicit mask of their generated tokens."""

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool: this token was generated
    sampler_version: str = ""  # which weights sampled it; "" for text of others

    @property
    def predicting(self) -> Tensor:
        """[B, T] bool: the logits here predict a generated token. The first token never is one."""
        ahead = torch.zeros_like(self.loss_mask)
        ahead[:, :-1] = self.loss_mask[:, 1:]
        return ahead

    @property
    def token_ids(self) -> Tensor:
        """[M] the generated tokens, in the order of the logits at `predicting`."""
        return self.input_ids[:, 1:][self.loss_mask[:, 1:]]

    def micro_batches(self, count: int) -> list["Batch"]:
        """Split the rows into at most `count` parts, cut to the longest row of each."""
        parts = []
        for ids, mask in zip(self.input_ids.chunk(count), self.loss_mask.chunk(count), strict=True):
            width = int(mask.any(dim=0).nonzero().max()) + 1 if mask.any() else 1
            parts.append(Batch(ids[:, :width], mask[:, :width], self.sampler_version))
        return parts


def collate(
    rows: Sequence[TokenSequence], *, device: torch.device, sampler_version: str = ""
) -> Batch:
    """Pad `rows` on the right to their longest. Raises ValueError if nothing was generated."""
    width = max(len(row.token_ids) for row in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    loss_mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        input_ids[index, :length] = torch.tensor(row.token_ids)
        loss_mask[index, :length] = torch.tensor(row.generated)
    if not loss_mask[:, 1:].any():
        raise ValueError("a batch holds no generated token: nothing can be learned from it")
    return Batch(input_ids.to(device), loss_mask.to(device), sampler_version)
