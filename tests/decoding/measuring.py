"""The law of a round of the decoder, measured from outside, to the last digit.

`Rows` are those of a decoder whose prompts are fed, as tensors: any of them, any number of times,
on which the decoder's own units play a round with noise that the test decides. `measure` finds by
bisection (`tests.theory.boxes`) where each uniform of a round changes what happens, and returns
every cell between those places with its probability and outcome: first the cells of the proposer's
noise, then, for each different proposal, those of the tests and of the next token. Nothing is taken
from the decoder's formulas, so a changed threshold anywhere, in proposer, warping, verification,
cache or commitment, changes what is measured. A proposer may draw as many numbers as it likes.

Shapes: N rows, K proposals, P uniforms, M cells, V vocabulary.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import Proposal, Proposer
from draftkit.decoding.round import RoundInputs
from draftkit.decoding.state import DecodeState
from draftkit.theory.noise import ACCEPT, DRAFT, NEXT
from tests.params import select
from tests.theory.boxes import Boxes, boxes
from tests.theory.laws import LawBroken


class Outcome(NamedTuple):
    """What a round did to N rows; -1 stands for proposals and tokens that do not count."""

    draft_tokens: Tensor  # [N, K]
    accepted: Tensor  # [N]: one less than the tokens emitted
    committed: Tensor  # [N]
    text: Tensor  # [N, K + 1] committed tokens
    done: Tensor  # [N] bool
    last: Tensor  # [N] the last token emitted

    def differs(self, other: "Outcome") -> Tensor:
        """[N] bool: where anything differs."""
        pairs = zip(self, other, strict=True)
        flags = [(a != b).reshape(len(a), -1).any(-1) for a, b in pairs if a.numel()]
        return torch.stack(flags).any(0)

    def number(self, vocab_size: int) -> Tensor:
        """[N]: one for each commitment and path of a tree, accepted ends of text told from those
        that were drawn."""
        width, whole = self.text.shape[1], torch.cat([self.text, self.draft_tokens], dim=1)
        digits = ((whole + 1) * (vocab_size + 1) ** torch.arange(whole.shape[1])).sum(1)
        return (digits * (width + 1) + self.accepted) * vocab_size + self.last

    def at(self, index: Tensor) -> "Outcome":
        return Outcome(*(part[index] for part in self))


class Rows:
    """All rows of a `decoder` that are ready and run together; `take` makes others of them.

    A row's next round is played by the units that the decoder itself runs.
    """

    def __init__(self, decoder: Decoder) -> None:
        (group,) = decoder._groups()
        self.units: Any = decoder._verify.__globals__["units"]  # a mutant has its own
        self.decoder = decoder
        self.proposer = decoder._proposers.get(group.proposer_id)
        self.inputs = RoundInputs(group, visible=decoder.capacity)
        self.draws = self._draws()

    def _draws(self) -> int:
        """How many numbers the proposer draws in a round."""
        counts = [0]

        def listening(*, count: int, purpose: int, **_: Any) -> Tensor:
            counts.append(count * (purpose == DRAFT))
            return torch.zeros(1, count, dtype=torch.float64)

        one = self.take(torch.tensor([0]))
        one.decoder.noise = listening
        one.propose()
        return max(counts)

    def __len__(self) -> int:
        return len(self.inputs.group.index)

    @property
    def gamma(self) -> int:
        return self.inputs.group.gamma

    @property
    def state(self) -> DecodeState:
        return self.decoder.state

    def take(self, index: Tensor) -> "Rows":
        """Rows of which the n-th is in the state of row index[n]."""
        taken, decoder, group = copy.copy(self), copy.copy(self.decoder), self.inputs.group
        at = group.index[index]
        tensors = {k: v[at] for k, v in vars(self.state).items() if isinstance(v, Tensor)}
        decoder.state = DecodeState(**tensors | {"row": torch.arange(len(at))})
        decoder.cache = _gathered(decoder.cache, at)
        taken.decoder = decoder
        taken.proposer = self.proposer and _with_caches(self.proposer, at)
        every, active = torch.arange(len(at)), torch.ones(len(at), dtype=torch.bool)
        of_rows = {"params": select(group.params, index), "ignores_eos": group.ignores_eos[index]}
        group = replace(group, members={}, index=every, rows=every, active=active, **of_rows)
        taken.inputs = self.inputs._replace(group=group)
        return taken

    def propose(self) -> Proposal:
        """The proposals of the next round."""
        if self.proposer is None:
            return self.units.no_proposal(self.inputs)
        return self.units.propose((self.proposer, self.decoder), self.inputs)

    def play(self) -> tuple[Proposal, Any]:
        """The next round: its proposals and the outcome as the unit reports it."""
        proposal = self.propose()
        return proposal, self.units.verify(self.decoder, self.inputs._replace(proposal=proposal))

    def force(self, uniforms: Tensor) -> "Rows":
        """Let the next round draw these numbers [N, P], each purpose once."""
        values = dict(
            zip((DRAFT, ACCEPT, NEXT), uniforms.split([self.draws, self.gamma, 1], 1), strict=True)
        )

        def forced(*, count: int, purpose: int, **_: Any) -> Tensor:
            if purpose not in values:
                raise LawBroken(f"noise of purpose {purpose} serves twice in one round")
            numbers = values.pop(purpose)
            if numbers.shape[1] != count:
                raise LawBroken(f"{count} numbers of purpose {purpose} in a round that has others")
            return numbers

        self.decoder.noise = forced
        return self

    def proposals(self, row: Tensor, draft: Tensor) -> tuple[Tensor, Proposal]:
        """What rows propose by their numbers [N, draws], told apart by a number [N]."""
        rest = draft.new_zeros(len(draft), self.gamma + 1)
        proposal = self.take(row).force(torch.cat([draft, rest], dim=1)).propose()
        tokens, tree = proposal.tokens, self.inputs.group.tree
        order = torch.arange(tokens.shape[1])
        depths = order if tree is None else tree.depths[1:] - 1
        tokens = tokens.masked_fill(depths >= proposal.lengths[:, None], 0)
        digits = (tokens * self.decoder.target.vocab_size**order).sum(1)
        return digits * (self.gamma + 1) + proposal.lengths, proposal

    def outcomes(self, row: Tensor, uniforms: Tensor) -> Outcome:
        """What a round of rows does by its numbers [N, draws + K + 1]."""
        return self.take(row).force(uniforms).outcome()

    def outcome(self) -> Outcome:
        """What the next round does; the rows are those after it."""
        _, done = self.play()
        emitted, committed, lengths = done.report[:, 0], done.report[:, 1], done.report[:, 4]
        place = torch.arange(done.tokens.shape[1])
        beyond = place[: self.gamma] >= lengths[:, None]
        return Outcome(
            draft_tokens=done.draft_tokens.masked_fill(beyond, -1),
            accepted=emitted - 1,
            committed=committed,
            text=done.tokens.masked_fill(place >= committed[:, None], -1),
            done=done.report[:, 3].bool(),
            last=done.tokens.gather(1, emitted[:, None] - 1)[:, 0],
        )


def _gathered(cache: Any, index: Tensor) -> Any:
    twin = type(cache)(len(index), cache.capacity, cache.encoder_capacity)
    twin._keys = [keys[index] for keys in cache._keys]
    twin._values = [values[index] for values in cache._values]
    twin.taps = cache.taps
    twin.streams = {layer: states[index] for layer, states in cache.streams.items()}
    twin._encoder = [(keys[index], values[index]) for keys, values in cache._encoder]
    if cache._encoder:
        twin._encoder_lengths = cache._encoder_lengths[index]
    return twin


def _with_caches(proposer: Proposer, index: Tensor) -> Proposer:
    """`proposer`, or one made of others, with the caches of those rows."""
    twin: Any = copy.copy(proposer)
    if "model" in vars(proposer):
        twin.model = _with_caches(twin.model, index)
    elif twin.has_cache:
        twin._cache = _gathered(twin._cache, index)
    return twin


@dataclass(frozen=True)
class Cells:
    """What one round does in every cell of its uniforms, from every row; by row.

    boxes: the whole uniforms of one proposal of that outcome; mass: of all of them.
    """

    boxes: Boxes
    mass: Tensor  # [M]
    outcome: Outcome

    @property
    def state(self) -> Tensor:
        """The row [M] that each cell is of."""
        return self.boxes.state


def measure(rows: Rows) -> Cells:
    """Every cell of the next round of `rows`.

    Raises LawBroken where a cell has more than one outcome.
    """
    size = rows.decoder.target.vocab_size
    first = boxes(lambda row, u: rows.proposals(row, u)[0], len(rows), rows.draws)
    number, proposal = rows.proposals(first.state, first.middle)
    example, kind = one_of_each(torch.stack([first.state, number], dim=1))
    _check_same_law(proposal, example[kind])
    state, draft = first.state[example], first.middle[example]

    def by_tests(which: Tensor, uniforms: Tensor) -> Tensor:
        whole = torch.cat([draft[which], uniforms], dim=1)
        return rows.outcomes(state[which], whole).number(size)

    second = boxes(by_tests, len(example), rows.gamma + 1)
    mass = torch.zeros(len(example), dtype=torch.float64).index_add(0, kind, first.mass)
    mass, which = second.mass * mass[second.state], example[second.state]
    whole = Boxes(
        state[second.state],
        torch.cat([first.low[which], second.low], dim=1),
        torch.cat([first.high[which], second.high], dim=1),
    )
    outcome = rows.outcomes(whole.state, whole.middle)
    _check_inside(rows, first, kind, second, outcome)
    return Cells(whole, mass, outcome)


def one_of_each(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The index of one of every kind of `rows` [N, C], and the number [N] of each row's kind."""
    _, kind = rows.unique(dim=0, return_inverse=True)
    example = torch.zeros(int(kind.max()) + 1 if len(kind) else 0, dtype=torch.long)
    return example.scatter(0, kind, torch.arange(len(kind))), kind


def _check_same_law(proposal: Proposal, example: Tensor) -> None:
    """The same proposals after the same text must come with the same q."""
    if proposal.draft_probs is not None:
        real = torch.arange(proposal.tokens.shape[1]) < proposal.lengths[:, None]
        law = proposal.draft_probs * real[..., None]
        if not torch.allclose(law, law[example], rtol=0, atol=1e-12):
            raise LawBroken("q depends on more than the text and the proposals before")


def _check_inside(rows: Rows, first: Boxes, kind: Tensor, second: Boxes, outcome: Outcome) -> None:
    """Any noise of a proposal, with any of the tests, does what was measured of the proposal."""
    generator = torch.Generator().manual_seed(0)
    for at_edges in (False, False, True, True):
        order = torch.randperm(len(second.state), generator=generator)
        some = torch.zeros(len(kind), dtype=torch.long)  # a random cell of each kind
        some = some.scatter(0, second.state[order], order)[kind]
        draft, tests = (one.somewhere(generator, at_edges=at_edges) for one in (first, second))
        uniforms = torch.cat([draft, tests[some]], dim=1)
        real = (first.mass > 1e-9) & (second.mass[some] > 1e-9)
        if (real & rows.outcomes(first.state, uniforms).differs(outcome.at(some))).any():
            raise LawBroken("the outcome of a round depends on more than its uniforms in turn")
