"""A float64 language model that is a table, behind the face that the decoder sees.

The law of the next token depends on the last two tokens, which the model reads out of the cache,
from the slots of its position and of the one before: a slot that is stale, off by one or of another
row changes the law. The token before those two has left a row of weights in its slot, which is
added: rows that outlive a change of weights keep traces of the old ones, as in real models.

Shapes: B rows, N new tokens, T tokens, C slots, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from draftkit.models.adapter import by_name
from draftkit.models.parallel import Parallel

UNBOUNDED = 1 << 30


class TabularAdapter:
    """An `Adapter` with logits table[last but one, last] + memory[last but two].

    table: [I + 1, I, V], row I for the first token of a text; memory: [I, V], none by default. I
    is V, or V + 1 for a parallel draft, whose masks have the id V.
    """

    has_encoder, start_id, reads = False, None, ()
    width = 2  # of its one stream

    def __init__(
        self, table: Tensor, memory: Tensor | None = None, *, max_positions: int = UNBOUNDED
    ) -> None:
        self.vocab_size = table.shape[-1]
        self.max_positions = max_positions
        self.table = table.double().clone()
        self.memory = torch.zeros_like(self.table[0]) if memory is None else memory.double().clone()
        self.ids = len(self.table) - 1
        assert self.table.shape == (self.ids + 1, self.ids, self.vocab_size)

    @property
    def signature(self) -> object:
        return (type(self), self.vocab_size, self.max_positions)

    @property
    def parallel(self) -> Parallel | None:
        return Parallel(self.vocab_size, 3) if self.ids > self.vocab_size else None

    @property
    def blocks(self) -> int:
        return 1 if self.parallel is None else self.parallel.blocks

    @property
    def is_constant(self) -> bool:
        return False

    @property
    def weight_bytes(self) -> int:
        return self.table.nbytes + self.memory.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    def step(self, tokens: Tensor, *, positions: Tensor, cache: Any, last: int = 0) -> Tensor:
        """Write tokens and what they leave behind to the cache, then look both up there."""
        positions = positions.clamp(max=self.max_positions - 1)
        marks = (tokens + 1).to(self.table.dtype)  # 0 is a slot that nobody has written
        slots, behind, seen = cache.reading(positions)
        keys, values = cache.at(slots).update(
            marks[:, None, :, None], self.memory[tokens][:, None], 0
        )
        keys, values = keys[:, 0, :, 0].long() - 1, values[:, 0]  # [B, C], [B, C, V]

        def back(count: int) -> Tensor:
            """[B, N]: the first slot in sight whose token stands so many positions before."""
            return (seen & (behind == count))[:, 0].to(torch.uint8).argmax(-1)

        inside = slots.clamp(max=keys.shape[1] - 1)  # an idle row may lie beyond what is read
        fed, previous = keys.gather(1, inside), keys.gather(1, back(1))
        first = (positions < 1) | (previous < 0)
        previous = torch.where(first, self.before(cache), previous)
        left = values.gather(1, back(2)[..., None].expand(-1, -1, self.vocab_size))
        for layer in cache.taps:
            cache.keep(layer, torch.stack([fed + 1, previous + 1], -1).to(self.dtype))
        logits = self.table[previous, fed] + left.masked_fill((positions < 2)[..., None], 0.0)
        return logits[:, -last:]

    def before(self, cache: Any) -> Tensor:
        """The row of the table for the first token of a text: [] or [B, 1]."""
        return torch.tensor(self.ids)

    def prefill(self, tokens: Tensor, *, positions: Tensor, cache: Any) -> None:
        self.step(tokens, positions=positions, cache=cache)

    def score(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """The logits [M, V] at the true positions of `keep` [B, T], without a cache."""
        return self.logits(tokens)[keep]

    def logits(self, tokens: Tensor) -> Tensor:
        """The logits after every token of `tokens` [B, T]: [B, T, V]."""
        start = torch.full_like(tokens[:, :1], self.ids)
        shifted = torch.cat([start, start, tokens], dim=1)
        older, previous = shifted[:, :-2], shifted[:, 1:-1]
        memory = torch.cat([self.memory, torch.zeros_like(self.memory[:1])])
        return self.table[previous, tokens] + memory[older]

    def load_weights(self, state_dict: dict[str, Tensor]) -> None:
        own = self.state_dict()
        for name, weight in by_name(own, state_dict).items():
            own[name].copy_(weight)

    def weights(self) -> dict[str, Tensor]:
        return self.state_dict()

    def state_dict(self) -> dict[str, Tensor]:
        return {"table": self.table, "memory": self.memory}


class TabularHead:
    """A head on the target's hidden states, which are the marks of its last two tokens.

    Its law depends on the token of its slot, on the last token that the features tell of, on the
    one before it, and on the token that its own cache holds one slot back. A state is told from
    features by marks of its own. With `mask` [2] it proposes in one pass.
    """

    reads, has_encoder, start_id, kept_ids = (0,), False, None, None

    def __init__(self, draft: TabularAdapter, *, parallel: bool = False) -> None:
        size = draft.vocab_size
        self.vocab_size, self.max_positions = size, draft.max_positions
        self.parallel = Parallel(size, 3) if parallel else None
        generator = torch.Generator().manual_seed(
            len(draft.table) + int(draft.table.clamp(min=-99).abs().sum())
        )

        def near(table: Tensor, *shape: int) -> Tensor:
            other = torch.randn(*shape, size, generator=generator, dtype=torch.float64)
            return (other + table.expand_as(other)) / 2**0.5

        self.table = near(draft.table[:1, :1], 2 * size + 3, size + 1)  # [features, token]
        self.memory = near(draft.memory[:1], size + 3)  # of the older token of the features
        self.own = near(draft.memory[:1], size + 2)  # of the token one slot back

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def signature(self) -> object:
        return (type(self), self.vocab_size, self.parallel)

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def mask_features(self) -> Tensor:
        return torch.tensor([2.0 * self.vocab_size + 2, self.vocab_size + 2.0]).double()

    def project(self, features: Tensor) -> Tensor:
        """Features [..., 2] as the place of a state [..., 2 + V]."""
        return torch.cat([features, features.new_zeros(*features.shape[:-1], self.vocab_size)], -1)

    def feed(
        self, tokens: Tensor, hidden: Tensor, *, positions: Tensor, cache: Any, last: int = 0
    ) -> Tensor:
        """Write the tokens, look up the law; a state is marks and logits."""
        marks = (tokens + 1).to(self.dtype)[:, None, :, None]
        slots, behind, seen = cache.reading(positions)
        keys, _ = cache.at(slots).update(marks, marks, 0)
        before = (seen & (behind == 1))[:, 0].to(torch.uint8).argmax(-1)  # the first in sight
        back = keys[:, 0, :, 0].long().gather(1, before)
        back = back.masked_fill(positions < 2, 0)  # there is no slot 0
        newer, older = hidden[..., 0].long(), hidden[..., 1].long()
        logits = self.table[newer, tokens] + self.memory[older] + self.own[back]
        own = torch.stack([tokens + 1 + self.vocab_size, newer % (self.vocab_size + 1)], -1)
        return torch.cat([own.to(self.dtype), logits], -1)[:, -last:]

    def fill(self, tokens: Tensor, hidden: Tensor, *, positions: Tensor, cache: Any) -> None:
        self.feed(tokens, hidden, positions=positions, cache=cache)

    def logits(self, states: Tensor) -> Tensor:
        return states[..., 2:]

    def law(self, text: Tensor, block: int) -> Tensor:
        """The logits [V] of proposal `block` (from 0) of a round: `text` ends before it."""
        size, begin = self.vocab_size, len(text) - block
        marks = text + 1

        def mark(place: int) -> int:
            return int(marks[place]) if place >= 0 else size + 1  # before a text

        token, back = text[-1], marks[-2] if len(text) > 2 else 0
        if self.parallel is not None and block > 0:
            token, back = size, size + 1 if block > 1 else marks[begin - 1]
            newer, older = self.mask_features.long().tolist()
            return self.table[newer, token] + self.memory[older] + self.own[back]
        newer, older = mark(len(text) - 2), mark(len(text) - 3)
        if block > 0:
            newer += size
            # A state tells of the token before it as it was told: by a state, or by features.
            older = (older + size if block > 1 else older) % (size + 1)
        return self.table[newer, token] + self.memory[older] + self.own[back]

    def weights(self) -> dict[str, Tensor]:
        return {"table": self.table, "memory": self.memory, "own": self.own}


class TabularMedusa(TabularHead):
    """Two heads of Medusa: each depends on the last two tokens that the features tell of."""

    blocks = 2

    def made_of(self, features: Tensor, block: int) -> Tensor:
        newer, older = features[..., 0].long(), features[..., 1].long()
        return self.table[newer, block] + self.memory[older]

    def head(self, states: Tensor) -> Tensor:
        return states


class EncodedAdapter(TabularAdapter):
    """The same law behind an encoder: the last token that it reads stands before the decoder's
    first, which is token 0."""

    has_encoder, start_id = True, 0

    def __init__(self, model: TabularAdapter) -> None:
        super().__init__(model.table)

    def encode(self, tokens: Tensor, *, lengths: Tensor, cache: Any) -> None:
        text = tokens[..., None, None].to(self.table.dtype)  # [B, E, 1, 1]
        cache.write_encoder([(text, text)], lengths)

    def before(self, cache: Any) -> Tensor:
        ((text, _),) = cache.read_encoder()
        return text[:, 0, :, 0].long().gather(1, cache.encoder_lengths[:, None] - 1)


def random_adapter(
    vocab_size: int, seed: int, *, spread: float = 1.5, max_positions: int = UNBOUNDED
) -> TabularAdapter:
    """A reproducible model with Gaussian logits."""
    generator = torch.Generator().manual_seed(seed)

    def gaussian(*shape: int) -> Tensor:
        return spread * torch.randn(shape, generator=generator, dtype=torch.float64)

    table = gaussian(vocab_size + 1, vocab_size, vocab_size)
    return TabularAdapter(table, gaussian(vocab_size, vocab_size), max_positions=max_positions)


def relative(target: TabularAdapter, seed: int, *, spread: float = 1.5) -> TabularAdapter:
    """A draft that agrees with `target` in part."""
    other = random_adapter(target.vocab_size, seed, spread=spread)
    return TabularAdapter(
        (target.table + other.table) / 2**0.5,
        (target.memory + other.memory) / 2**0.5,
        max_positions=target.max_positions,
    )


def with_masks(draft: TabularAdapter, *, spread: float = 1.5) -> TabularAdapter:
    """`draft` as a parallel one, whose laws after masks have nothing to do with those of tokens."""
    size = draft.vocab_size
    other = random_adapter(size + 1, 7, spread=spread)
    table, memory = other.table[..., :size], other.memory[..., :size]
    table[:size, :size], memory[:size] = draft.table[:size], draft.memory
    table[-1, :size] = draft.table[-1]
    return TabularAdapter(table, memory, max_positions=draft.max_positions)
