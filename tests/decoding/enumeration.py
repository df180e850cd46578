"""The law of a decoder, measured from outside, to the last digit.

`fork` multiplies the rows of a running decoder, `Bench` plays one round of them again and again
with noise that the test decides. `measure` finds by bisection where each uniform of a round
(proposals, tests, next token) changes what the decoder does, and returns every cell between those
places with its probability and outcome. Nothing is taken from the decoder's formulas, so a changed
threshold anywhere, in proposer, warping, verification, cache or commitment, changes what is
measured.

Shapes: S states, N rows, R blocks, K proposals, C = 2^K combinations of tests, M cells, V
vocabulary.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.decoding.decoder import Decoder
from draftkit.models.cache import SlotCache
from draftkit.theory.noise import ACCEPT, DRAFT, NEXT
from tests.theory.laws import LARGEST, LawBroken

BISECTIONS = 45  # places are known to 2^-45
EDGE = 1e-11  # how near to the edge of a cell a point is tried


class Forced:
    """A noise function whose numbers the test sets before every round, one purpose once."""

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}

    def __call__(self, *, row: Tensor, count: int, purpose: int, **key: Tensor) -> Tensor:
        if purpose not in self.values:
            raise LawBroken(f"noise of purpose {purpose} serves twice in one round")
        numbers = self.values.pop(purpose)[row]
        if numbers.shape[1] != count:
            raise LawBroken(f"{count} numbers of purpose {purpose} in a round that has others")
        return numbers


def fork(decoder: Decoder, index: Tensor) -> Decoder:
    """A decoder whose row n is in the state of row index[n] of `decoder`; rows get new ids."""
    twin, old, rows = copy.copy(decoder), decoder.state, index.tolist()
    twin.cache = _gathered(decoder.cache, index)
    twin._proposers = {}
    for name, proposer in decoder._proposers.items():
        shadow: Any = copy.copy(proposer)
        shadow._cache = _gathered(shadow._cache, index)
        twin._proposers[name] = shadow
    twin.state = type(old)(
        tokens=old.tokens[index],
        length=old.length[index],
        limit=old.limit[index],
        seed=old.seed[index],
        row=torch.arange(len(index)),
        done=old.done[index],
        slots={n: copy.copy(old.slots[row]) for n, row in enumerate(rows)},
    )
    twin._free = []
    twin._running = twin._groups()
    return twin


def _gathered(cache: SlotCache, index: Tensor) -> SlotCache:
    twin = type(cache)(len(index), cache.capacity)
    twin._keys = [keys[index] for keys in cache._keys]
    twin._values = [values[index] for values in cache._values]
    return twin


class Outcome(NamedTuple):
    """What a round did to N rows."""

    draft_tokens: Tensor  # [N, K]
    accepted: Tensor  # [N]: one less than the tokens emitted
    committed: Tensor  # [N]
    text: Tensor  # [N, K + 1] committed tokens, -1 beyond
    done: Tensor  # [N] bool
    last: Tensor  # [N] the last token emitted

    def differs(self, other: "Outcome") -> Tensor:
        """[N] bool: where anything differs."""
        pairs = zip(self, other, strict=True)
        flags = [(a != b).reshape(len(a), -1).any(-1) for a, b in pairs if a.numel()]
        return torch.stack(flags).any(0)

    def signature(self) -> Tensor:
        """[N]: what a change of the tests alone must change, an accepted end of text included."""
        return self.accepted << 32 | self.last

    def at(self, index: Tensor) -> "Outcome":
        return Outcome(*(part[index] for part in self))


class Bench:
    """Rows of a decoder, one round of which can be played many times over."""

    def __init__(self, decoder: Decoder, index: Tensor) -> None:
        self.decoder = fork(decoder, index)
        self.rows = len(index)
        state = self.decoder.state
        self._state = copy.copy(state)
        self._state.tokens, self._state.length = state.tokens.clone(), state.length.clone()
        self._state.done = state.done.clone()
        self._progress = [(s.length, s.fed, s.followed, s.rounds) for s in state.slots.values()]
        self._running = self.decoder._running
        proposers: Any = self.decoder._proposers.values()
        self._caches = [self.decoder.cache, *(proposer._cache for proposer in proposers)]
        self._buffers = [(list(c._keys), list(c._values)) for c in self._caches]

    def play(self, *, draft: Tensor, accept: Tensor, then: Tensor) -> Outcome:
        """One round from the same state with uniforms [N, K], [N, K] and [N]."""
        self._rewind()
        noise = self.decoder.noise
        assert isinstance(noise, Forced)
        noise.values = {DRAFT: draft, ACCEPT: accept, NEXT: then[:, None]}
        (result,) = self.decoder.round()
        assert result.slots == list(range(self.rows))
        emitted, committed = torch.tensor(result.emitted), torch.tensor(result.committed)
        beyond = torch.arange(result.gamma + 1) >= committed[:, None]
        return Outcome(
            draft_tokens=result.draft_tokens,
            accepted=emitted - 1,
            committed=committed,
            text=result.tokens.masked_fill(beyond, -1),
            done=torch.tensor(result.done),
            last=result.tokens.gather(1, emitted[:, None] - 1)[:, 0],
        )

    def _rewind(self) -> None:
        state, kept = self.decoder.state, self._state
        state.tokens, state.length = kept.tokens.clone(), kept.length.clone()
        state.done = kept.done.clone()
        for slot, progress in zip(state.slots.values(), self._progress, strict=True):
            slot.length, slot.fed, slot.followed, slot.rounds = progress
            slot.is_finished = False
        self.decoder._running = self._running
        for cache, (keys, values) in zip(self._caches, self._buffers, strict=True):
            cache._keys = [tensor.clone() for tensor in keys]
            cache._values = [tensor.clone() for tensor in values]


@dataclass(frozen=True)
class Cells:
    """All that a round can do: noise in a box, which gives one outcome. Sorted by state."""

    state: Tensor  # [M]
    mass: Tensor  # [M] the volume of the box
    low: Tensor  # [M, 2 K + 1] of the uniforms of proposals, tests, next token
    high: Tensor
    outcome: Outcome

    def play(self, bench: Bench, cell: Tensor, fraction: Tensor, inset: float = 0.0) -> Outcome:
        """Play row n of `bench` in cell[n], at `fraction` [N, 2 K + 1] of the way through it."""
        low, high = self.low[cell], self.high[cell]
        margin = ((high - low) / 2).clamp(max=inset)
        point = (low + margin) + (high - low - 2 * margin) * fraction
        gamma = point.shape[1] // 2
        return bench.play(
            draft=point[:, :gamma],
            accept=point[:, gamma : 2 * gamma],
            then=point[:, -1].clamp(max=LARGEST),
        )


def _bisect(is_past: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """Where each monotone `is_past` [rows] turns true on [0, 1]: 0 if always, 1 if never."""
    low = torch.zeros(rows, dtype=torch.float64)
    high = torch.ones_like(low)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        past = is_past(middle)
        low, high = torch.where(past, low, middle), torch.where(past, middle, high)
    return high


def _with_ends(bounds: Tensor) -> Tensor:
    """[..., n] inner places to [..., n + 2] with 0 and 1 around them."""
    ends = bounds.new_tensor([0.0, 1.0]).expand(*bounds.shape[:-1], 2)
    return torch.cat([ends[..., :1], bounds, ends[..., 1:]], dim=-1)


def _proposals(
    decoder: Decoder, states: Tensor, *, gamma: int, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Every block that can be proposed: state [R], low and high [R, K] of its uniforms."""
    state = states
    low = high = torch.zeros(len(states), 0, dtype=torch.float64)
    for place in range(gamma):
        token = torch.arange(vocab_size - 1).repeat(len(state))
        index = torch.arange(len(state)).repeat_interleave(vocab_size - 1)
        bench = Bench(decoder, state[index])
        before = ((low + high) / 2)[index]
        after = torch.zeros(len(index), gamma - place - 1, dtype=torch.float64)

        def proposed(value: Tensor, bench: Bench = bench, parts: Any = (before, after)) -> Tensor:
            draft = torch.cat([parts[0], value[:, None], parts[1]], dim=1)
            zeros = torch.zeros_like(draft)
            return bench.play(draft=draft, accept=zeros, then=zeros[:, 0]).draft_tokens

        bounds = _bisect(
            lambda value: proposed(value)[:, place] > token,  # noqa: B023
            len(index),
        )
        edges = _with_ends(bounds.view(len(state), vocab_size - 1))
        parent, token = (edges.diff(dim=-1) > 0).nonzero(as_tuple=True)
        low = torch.cat([low[parent], edges[parent, token, None]], dim=1)
        high = torch.cat([high[parent], edges[parent, token + 1, None]], dim=1)
        state = state[parent]
    return state, low, high


def _thresholds(decoder: Decoder, state: Tensor, draft: Tensor) -> Tensor:
    """Where each test of each block [R, K] changes the result; 1 where it never does.

    Looked for with the other tests at that combination of their extremes where this one counts.
    """
    rows, gamma = draft.shape
    every = list(itertools.product((0.0, LARGEST), repeat=gamma - 1)) if gamma else []
    others = torch.tensor(every, dtype=torch.float64).reshape(len(every), max(gamma - 1, 0))
    place = torch.arange(gamma).repeat_interleave(len(every) * rows)
    block = torch.arange(rows).repeat_interleave(len(every)).repeat(gamma)
    accept = others.repeat(rows * gamma, 1)
    column = torch.arange(gamma)
    source = (column - (column > place[:, None]).long()).clamp(max=max(gamma - 2, 0))
    accept = accept.gather(1, source) if gamma > 1 else torch.zeros(len(block), gamma).double()
    is_place = column == place[:, None]  # [N, K]

    def result(bench: Bench, pick: Tensor, value: Tensor) -> Tensor:
        tests = torch.where(is_place[pick], value[:, None], accept[pick])
        zeros = torch.zeros(len(pick), dtype=torch.float64)
        return bench.play(draft=draft[block[pick]], accept=tests, then=zeros).signature()

    pick = torch.arange(len(block))
    bench = Bench(decoder, state[block])
    blank = torch.zeros(len(block), dtype=torch.float64)
    changes = result(bench, pick, blank) != result(bench, pick, blank + LARGEST)
    changes = changes.view(gamma, rows, len(every))
    counts = changes.any(-1)  # [K, R]
    pick = pick.view(changes.shape).gather(2, changes.byte().argmax(-1, keepdim=True))[counts][:, 0]
    thresholds = torch.ones(gamma, rows, dtype=torch.float64)
    if not len(pick):
        return thresholds.T
    bench = Bench(decoder, state[block[pick]])
    at_zero = result(bench, pick, blank[pick])
    found = _bisect(lambda value: result(bench, pick, value) != at_zero, len(pick))
    thresholds[counts] = found
    return thresholds.T


def measure(decoder: Decoder, states: Tensor, *, gamma: int, vocab_size: int) -> Cells:
    """Every cell of the next round of the rows `states` [S] of `decoder`, by bisection.

    Raises LawBroken where a cell has more than one outcome.
    """
    state, low, high = _proposals(decoder, states, gamma=gamma, vocab_size=vocab_size)
    draft = (low + high) / 2
    thresholds = _thresholds(decoder, state, draft) if gamma else draft
    flags = torch.tensor(list(itertools.product((True, False), repeat=gamma)), dtype=torch.bool)
    edges = _with_ends(thresholds[:, None, :, None])  # [R, 1, K, 3]
    accept_low = torch.where(flags, edges[..., 0], edges[..., 1]).flatten(0, 1)  # [R C, K]
    accept_high = torch.where(flags, edges[..., 1], edges[..., 2]).flatten(0, 1)
    block = torch.arange(len(state)).repeat_interleave(len(flags))
    real = (accept_high > accept_low).all(-1)
    block, accept_low, accept_high = block[real], accept_low[real], accept_high[real]
    edges = _next_edges(
        decoder,
        state[block],
        block=block,
        draft=draft[block],
        accept=(accept_low + accept_high) / 2,
        vocab_size=vocab_size,
    )
    cell, token = (edges.diff(dim=-1) > 0).nonzero(as_tuple=True)
    block = block[cell]
    lows = torch.cat([low[block], accept_low[cell], edges[cell, token, None]], dim=1)
    highs = torch.cat([high[block], accept_high[cell], edges[cell, token + 1, None]], dim=1)
    return _with_outcomes(decoder, state[block], low=lows, high=highs)


def _next_edges(
    decoder: Decoder,
    state: Tensor,
    *,
    block: Tensor,
    draft: Tensor,
    accept: Tensor,
    vocab_size: int,
) -> Tensor:
    """Where the next token changes, [N, V + 1], once for each result of the tests of a block."""
    bench = Bench(decoder, state)
    zeros = torch.zeros(len(state), dtype=torch.float64)
    signature = bench.play(draft=draft, accept=accept, then=zeros).signature()
    kinds, member = torch.stack([block, signature]).unique(dim=1, return_inverse=True)
    example = torch.zeros(kinds.shape[1], dtype=torch.long)
    example = example.scatter(0, member, torch.arange(len(state)))
    index = example.repeat_interleave(vocab_size - 1)
    token = torch.arange(vocab_size - 1).repeat(len(example))
    bench = Bench(decoder, state[index])
    bounds = _bisect(
        lambda value: bench.play(draft=draft[index], accept=accept[index], then=value).last > token,
        len(index),
    )
    return _with_ends(bounds.view(len(example), vocab_size - 1))[member]


def _with_outcomes(decoder: Decoder, state: Tensor, *, low: Tensor, high: Tensor) -> Cells:
    """The cells with what happens in them, which must be the same wherever in them."""
    mass = (high - low).prod(-1)
    bench, every = Bench(decoder, state), torch.arange(len(state))
    empty = Outcome(*(torch.zeros(0) for _ in Outcome._fields))
    cells = Cells(state, mass, low, high, empty)
    outcome = cells.play(bench, every, torch.full_like(low, 0.5))
    generator = torch.Generator().manual_seed(0)
    for inset in (0.0, 0.0, EDGE, EDGE):
        fraction = torch.rand(low.shape, generator=generator, dtype=torch.float64)
        fraction = fraction.round() if inset else fraction
        odd = cells.play(bench, every, fraction, inset=inset).differs(outcome)
        if (odd & (mass > 1e-9)).any():
            raise LawBroken("the outcome of a round depends on more than its uniforms in turn")
    order = state.argsort(stable=True)
    return Cells(state[order], mass[order], low[order], high[order], outcome.at(order))
