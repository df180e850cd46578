"""A frozen model that remembers what it made of a text: read once, scored as often as one likes.

The states before the head are kept in memory, not logits: with H = 384 a token takes 768 bytes in
half precision, and the head is all that is run again. All of a text is kept, whatever part is asked
for, so that a loss on a whole text and a score of its answer read it once between them.

Shapes: B rows, T tokens, M kept positions, H width of the states, V vocabulary.
"""

import torch
from torch import Tensor

from draftkit.models.adapter import CausalAdapter, Head


class RememberedAdapter:
    """`adapter` as teachers and judges of drafts see it. A row is known by its tokens up to the
    last kept position.
    """

    def __init__(self, adapter: CausalAdapter) -> None:
        assert adapter.is_constant
        self.vocab_size = adapter.vocab_size
        self.device = adapter.device
        self.head: Head | None = adapter.head
        self._adapter = adapter
        self._known: dict[tuple[int, ...], Tensor] = {}

    def score(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """Logits [M, V] at the true positions of `keep` [B, T]."""
        states = self.states(tokens, keep)
        return states if self.head is None else self.head(states)

    def states(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """As `CausalAdapter.states`: [M, H]."""
        ends = (keep * torch.arange(1, keep.shape[1] + 1, device=keep.device)).amax(1)
        lengths = ends.tolist()
        texts = [tuple(ids[:end]) for ids, end in zip(tokens.tolist(), lengths, strict=True)]
        unknown = [row for row, text in enumerate(texts) if text not in self._known]
        if unknown:
            index = torch.tensor(unknown, device=tokens.device)
            width = int(ends[index].max())
            inside = torch.arange(width, device=keep.device) < ends[index, None]
            made = self._adapter.states(tokens[index, :width], inside)
            for row, states in zip(unknown, made.split(ends[index].tolist()), strict=True):
                self._known[texts[row]] = states.clone()
        rows = zip(texts, keep, lengths, strict=True)
        return torch.cat([self._known[text][kept[:end]] for text, kept, end in rows])
