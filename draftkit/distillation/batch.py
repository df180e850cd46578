"""What one training step sees: token ids, and which of them were generated.

The label shift lives here and nowhere else: the logits at position i - 1 predict the token at i.
Texts are padded on the right; a padded position is never generated, so it never enters a loss.

Shapes: B rows, T tokens, M generated tokens of the batch, row by row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftkit.data.rollouts import Record
from draftkit.models.parallel import Chains, unrolled

_OPTIONAL = {  # of `TokenSequence` and `Batch` alike
    "rejected": torch.bool,
    "block_offset": torch.long,
    "topk_ids": torch.long,
    "topk_log_probs": torch.float32,
    "tail_mass": torch.float32,
    "features": torch.bfloat16,
}


@dataclass(frozen=True)
class TokenSequence:
    """Token ids and, for each, whether it was generated (true) or given (false).

    rejected: whether verification refused what the draft had proposed there. block_offset: how
    many drafted tokens come before it in its round. topk_ids, topk_log_probs, tail_mass: what is
    stored of the target's distribution there (`theory.truncation`), the last at the temperature of
    the loss. All mean nothing where nothing was generated. features: what is stored of its hidden
    states at every token [T, F].
    """

    token_ids: Sequence[int]
    generated: Sequence[bool]
    rejected: Sequence[bool] | None = None
    block_offset: Sequence[int] | None = None
    topk_ids: Sequence[Sequence[int]] | None = None
    topk_log_probs: Sequence[Sequence[float]] | None = None
    tail_mass: Sequence[float] | None = None
    features: Tensor | None = None


def continued(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> TokenSequence:
    """A prompt and what a model made of it, loss on the latter."""
    return TokenSequence(
        [*prompt_ids, *output_ids], [False] * len(prompt_ids) + [True] * len(output_ids)
    )


def sequence_of_record(record: Record) -> TokenSequence:
    """A rollout, loss on its output, with what is known of it: refusals, the target's scores."""
    text, given = continued(record.prompt_ids, record.output_ids), len(record.prompt_ids)
    if record.rejected is not None:
        text = replace(text, rejected=[False] * given + record.rejected)
    text = replace(text, features=record.features)
    ids, log_probs, tails = record.topk_ids, record.topk_log_probs, record.loss_tail_mass
    if ids is None or log_probs is None or tails is None:
        return text
    count = len(ids[0])
    return replace(
        text,
        topk_ids=[[0] * count] * given + ids,
        topk_log_probs=[[0.0] * count] * given + log_probs,
        tail_mass=[0.0] * given + tails,
    )


def block_of_record(record: Record) -> TokenSequence:
    """Tokens drafted after a text, loss on them alone; each knows how many came before it."""
    offsets = [0] * len(record.prompt_ids) + list(range(len(record.output_ids)))
    return replace(continued(record.prompt_ids, record.output_ids), block_offset=offsets)


@dataclass(frozen=True)
class Batch:
    """Rows of text with the explicit mask of their generated tokens."""

    input_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool: this token was generated
    rejected: Tensor | None = None  # [B, T] bool
    block_offset: Tensor | None = None  # [B, T]
    topk_ids: Tensor | None = None  # [B, T, k]
    topk_log_probs: Tensor | None = None  # [B, T, k]
    tail_mass: Tensor | None = None  # [B, T]
    features: Tensor | None = None  # [B, T, F]

    @property
    def predicting(self) -> Tensor:
        """[B, T] bool: the logits here predict a generated token. No text begins with one."""
        ahead = torch.zeros_like(self.loss_mask)
        ahead[:, :-1] = self.loss_mask[:, 1:]
        return ahead

    def generated(self, values: Tensor) -> Tensor:
        """Those of `values` [B, T, ...] that stand at generated tokens: [M, ...]."""
        return values[:, 1:][self.loss_mask[:, 1:]]

    @property
    def token_ids(self) -> Tensor:
        """[M] the generated tokens, in the order of the logits at `predicting`."""
        return self.generated(self.input_ids)

    @property
    def texts(self) -> list[TokenSequence]:
        """The rows up to the last token that was generated."""
        texts = []
        for ids, mask in zip(self.input_ids.tolist(), self.loss_mask.tolist(), strict=True):
            end = max((number for number, generated in enumerate(mask, 1) if generated), default=1)
            texts.append(TokenSequence(ids[:end], mask[:end]))
        return texts

    @property
    def entries(self) -> Chains:
        """The rows as a plain draft reads them: each entry predicts one of the M, in order."""
        order = torch.arange(int(self.predicting.sum()), device=self.input_ids.device)
        return Chains(self.input_ids, self.predicting, None, order, torch.zeros_like(order))

    def unrolled(self, steps: int) -> Chains:
        """The rows as a head learns on them (`models.heads`).

        Chains of `steps` begin at every predicting token, of drafted blocks where they were drawn.
        """
        begins = predicting = self.predicting
        if self.block_offset is not None:
            begins = predicting.clone()
            begins[:, :-1] &= self.block_offset[:, 1:] == 0
        return unrolled(self.input_ids, predicting, steps, begins)

    def micro_batches(self, count: int) -> list["Batch"]:
        """Split the rows, at least `count`, into that many parts, cut to the longest row of each.

        Rows of like length go together, so that little is padding.
        """
        columns = torch.arange(self.loss_mask.shape[1], device=self.loss_mask.device)
        lengths = (self.loss_mask * columns).amax(1)
        parts: list[Batch] = []
        for rows in lengths.argsort(descending=True, stable=True).tensor_split(count):
            width, known = int(lengths[rows].max()) + 1, vars(self).items()
            cut = {name: v[rows][:, :width] for name, v in known if isinstance(v, Tensor)}
            parts.append(replace(self, **cut))
        return parts


def collate(rows: Sequence[TokenSequence], *, device: torch.device) -> Batch:
    """`rows`, padded on the right to their longest. ValueError if nothing was generated."""
    if not any(any(row.generated[1:]) for row in rows):
        raise ValueError("a batch holds no generated token: nothing can be learned from it")

    def padded(values: Iterable[Any], dtype: torch.dtype) -> Tensor:
        """[B, T, ...] of the values of each row."""
        lines = [torch.as_tensor(line, dtype=dtype) for line in values]
        return pad_sequence(lines, batch_first=True).to(device)

    known = {
        name: padded((getattr(row, name) for row in rows), dtype)
        for name, dtype in _OPTIONAL.items()
        if all(getattr(row, name) is not None for row in rows)
    }
    return Batch(
        input_ids=padded((row.token_ids for row in rows), torch.long),
        # A text begins with what was given: its first token was never predicted.
        loss_mask=padded(([False, *row.generated[1:]] for row in rows), torch.bool),
        **known,
    )
