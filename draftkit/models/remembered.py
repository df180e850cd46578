"""A frozen model that remembers what it made of a text: read once, scored as often as one likes.

The states before the head are kept in memory, not logits: with H = 384 a token takes 768 bytes in
half precision, and the head is all that is run again. For experiments that come back to the same
texts many times; a model that learns must not be remembered.

Shapes: B rows, T tokens, M kept positions, H width of the states, V vocabulary.
"""

import torch
from torch import Tensor

from draftkit.models.adapter import CausalAdapter, Head, Packing


class RememberedAdapter:
    """`adapter` as teachers and judges of drafts see it. A row is known by its tokens up to the
    last kept position, and by which positions are kept.
    """

    def __init__(self, adapter: CausalAdapter) -> None:
        assert adapter.is_constant
        self.vocab_size = adapter.vocab_size
        self.device = adapter.device
        self.head: Head | None = adapter.head
        self._adapter = adapter
        self._known: dict[tuple[tuple[int, ...], tuple[bool, ...]], Tensor] = {}

    def score(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Logits [M, V] at the true positions of `keep` [B, T]."""
        states = self.states(tokens, keep)
        return states if self.head is None else self.head(states)

    def states(self, tokens: Tensor, keep: Tensor, packing: Packing | None = None) -> Tensor:
        """As `CausalAdapter.states`: [M, H]. Packed rows are read anew."""
        if packing is not None:
            return self._adapter.states(tokens, keep, packing)
        lengths = (keep * torch.arange(1, keep.shape[1] + 1, device=keep.device)).amax(1).tolist()
        rows = zip(tokens.tolist(), keep.tolist(), lengths, strict=True)
        keys = [(tuple(ids[:end]), tuple(kept[:end])) for ids, kept, end in rows]
        unknown = [row for row, key in enumerate(keys) if key not in self._known]
        if unknown:
            width = max(lengths[row] for row in unknown)
            index = torch.tensor(unknown, device=tokens.device)
            part = keep[index, :width]
            made = self._adapter.states(tokens[index, :width], part)
            for row, states in zip(unknown, made.split(part.sum(1).tolist()), strict=True):
                self._known[keys[row]] = states.clone()
        return torch.cat([self._known[key] for key in keys])
