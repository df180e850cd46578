"""The law of a round of any proposer under any rule, measured from outside.

As `enumeration`, with less to assume: a proposer may draw as many numbers as it likes, to any end,
and a test may have any number of thresholds. The cells of a round are found in two steps: first
those of the proposer's noise, then, for each different proposal, those of the tests and of the
next token. A uniform is bisected inside each cell of those before it.

Shapes: N rows, R cells so far, E settings of later uniforms, K proposals, P places (uniforms), M
cells, V vocabulary.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftkit.decoding.proposers import Proposal
from draftkit.theory.noise import ACCEPT, DRAFT, NEXT
from draftkit.theory.verification import VERIFIERS, Verifier
from tests.decoding.checks import PROMPT, VOCAB_SIZE, Measured, Setting
from tests.decoding.enumeration import Cells, Outcome
from tests.decoding.stand import Made, Stand
from tests.params import params_of, select
from tests.theory.laws import LARGEST, LawBroken

Told = Callable[[Tensor, Tensor], Tensor]  # (row [N], uniforms [N, P]) to what happens, a number
PIECES = 4  # in which a change is looked for
BISECTIONS = 40  # places are known to 2^-42


@dataclass(frozen=True)
class Boxes:
    """Cells of noise: each a box of `state`, in which nothing changes."""

    state: Tensor  # [M]
    low: Tensor  # [M, P]
    high: Tensor

    @property
    def mass(self) -> Tensor:
        return (self.high - self.low).prod(-1)

    @property
    def middle(self) -> Tensor:
        return ((self.low + self.high) / 2).clamp(max=LARGEST)

    def inside(self, generator: torch.Generator) -> Tensor:
        """A random point of each box."""
        fraction = torch.rand(self.low.shape, generator=generator, dtype=torch.float64)
        return (self.low + (self.high - self.low) * fraction).clamp(max=LARGEST)


def boxes(outcome: Told, states: int, places: int) -> Boxes:
    """The boxes of `outcome(state [N], uniforms [N, P]) -> [N]`, sought one uniform at a time.

    A uniform is bisected in every cell of those before it, for all extremes of those behind it.
    """
    found = Boxes(torch.arange(states), *torch.zeros(2, states, 0, dtype=torch.float64))
    for place in range(places):
        extremes = [(0.0,), *[(0.0, LARGEST)] * (places - place - 1)]
        behind = torch.tensor(list(itertools.product(*extremes)), dtype=torch.float64)
        before = found.middle[:, None].expand(-1, len(behind), -1)
        points = torch.cat([before, behind.expand(len(before), -1, -1)], dim=-1)

        def told(cell: Tensor, uniforms: Tensor, state: Tensor = found.state) -> Tensor:
            return outcome(state[cell], uniforms)

        cell, low, high = _intervals(*_changes(told, points, place), len(points))
        found = Boxes(
            found.state[cell],
            torch.cat([found.low[cell], low[:, None]], dim=1),
            torch.cat([found.high[cell], high[:, None]], dim=1),
        )
    return found


def _changes(told: Told, points: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """Where the uniform at `place` changes the outcome for any of `points` [R, E, P], by row.

    Halves every piece whose ends differ, so it misses what changes and changes back inside one of
    PIECES; `_check_inside` is there to see that.
    """
    others = points.flatten(0, 1)
    column = torch.arange(points.shape[-1]) == place

    def at(index: Tensor, value: Tensor) -> Tensor:
        uniforms = torch.where(column, value[:, None], others[index])
        return told(index // points.shape[1], uniforms)

    cuts = torch.linspace(0, 1, PIECES + 1, dtype=torch.float64).clamp(max=LARGEST)
    every = torch.arange(len(others)).repeat_interleave(PIECES + 1)
    results = at(every, cuts.repeat(len(others))).view(-1, PIECES + 1)
    index, piece = (results[:, :-1] != results[:, 1:]).nonzero(as_tuple=True)
    low, high = cuts[piece], cuts[piece + 1]
    at_low, at_high = results[index, piece], results[index, piece + 1]
    for _ in range(BISECTIONS if len(index) else 0):
        middle = (low + high) / 2
        at_middle = at(index, middle)
        low, high = torch.cat([low, middle]), torch.cat([middle, high])
        at_low, at_high = torch.cat([at_low, at_middle]), torch.cat([at_middle, at_high])
        index = index.repeat(2)
        odd = at_low != at_high
        index, low, high, at_low, at_high = (x[odd] for x in (index, low, high, at_low, at_high))
    return index // points.shape[1], high


def _intervals(row: Tensor, place: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pieces into which places [m] of `row` [m] cut the unit interval: row, low and high."""
    ends = torch.arange(2.0, dtype=torch.float64).repeat(rows)
    place = torch.cat([place, ends])
    row = torch.cat([row, torch.arange(rows).repeat_interleave(2)])
    order = place.argsort()
    order = order[row[order].argsort(stable=True)]
    place, row = place[order], row[order]
    real = (row.diff() == 0) & (place.diff() > 1e-12)
    return row[:-1][real], place[:-1][real], place[1:][real]


class Field:
    """All texts of a setting under all its samplings, ready for rounds."""

    def __init__(self, make: Made, setting: Setting, verifier: Verifier | None) -> None:
        self.setting = setting
        self.proposer = make(setting.draft())
        self.verifier = verifier or VERIFIERS[setting.verification]
        texts = [[*PROMPT, *text] for text in setting.prefixes] * len(setting.samplings)
        self.length = torch.tensor([len(text) for text in texts])
        self.texts = torch.tensor([t + [0] * (max(self.length) - len(t)) for t in texts])
        self.params = params_of([vars(s) for s in setting.samplings for _ in setting.prefixes])
        self.draws = self._draws()

    def stand(self, state: Tensor, values: dict[int, Tensor]) -> Stand:
        """Rows in `state` [N], whose noise will be `values` by purpose, [N, count] each."""

        def forced(*, count: int, purpose: int, **_: Any) -> Tensor:
            return values[purpose][:, :count]

        return Stand(
            self.proposer,
            self.setting.target,
            self.texts[state],
            self.length[state],
            params=select(self.params, state),
            gamma=self.setting.gamma,
            limit=len(PROMPT) + self.setting.tokens,
            verifier=self.verifier,
            noise_function=forced,
            eos=self.setting.eos,
        )

    def _draws(self) -> int:
        """How many numbers the proposer draws in a round."""
        counts = [0]

        def listening(*, count: int, **_: Any) -> Tensor:
            counts.append(count)
            return torch.zeros(1, count, dtype=torch.float64)

        stand = self.stand(torch.tensor([0]), {})
        stand.noise = listening
        stand.propose()
        return max(counts)

    def proposals(self, state: Tensor, draft: Tensor) -> tuple[Tensor, Proposal]:
        """What is proposed, told apart by a number [N], with garbage blanked."""
        stand = self.stand(state, {DRAFT: draft})
        proposal = stand.propose()
        gamma = self.setting.gamma
        beyond = torch.arange(gamma) >= proposal.lengths[:, None]
        tokens = proposal.tokens.masked_fill(beyond, 0)
        digits = (tokens * VOCAB_SIZE ** torch.arange(gamma)).sum(1)
        return digits * (gamma + 1) + proposal.lengths, proposal._replace(tokens=tokens)

    def outcomes(self, state: Tensor, uniforms: Tensor) -> tuple[Tensor, Outcome]:
        """What a round does, told apart by a number [N]; uniforms of proposer, tests, next."""
        parts = uniforms.split([self.draws, self.setting.gamma, 1], dim=1)
        stand = self.stand(state, dict(zip((DRAFT, ACCEPT, NEXT), parts, strict=True)))
        proposal, done = stand.play()
        emitted, committed = done.report[:, 0], done.report[:, 1]
        place = torch.arange(done.tokens.shape[1])
        text = done.tokens.masked_fill(place >= committed[:, None], -1)
        outcome = Outcome(
            draft_tokens=proposal.tokens,
            accepted=emitted - 1,
            committed=committed,
            text=text,
            done=done.report[:, 3].bool(),
            last=done.tokens.gather(1, emitted[:, None] - 1)[:, 0],
        )
        digits = ((text + 1) * (VOCAB_SIZE + 1) ** place).sum(1)
        return (digits * (len(place) + 1) + emitted) * VOCAB_SIZE + outcome.last, outcome


def measured(make: Made, setting: Setting, *, verifier: Verifier | None = None) -> Measured:
    """Measure a round from every text of the setting, for `check_joint_law` and its like.

    Raises LawBroken where a cell has more than one outcome.
    """
    field = Field(make, setting, verifier)
    states = len(field.length)
    first = boxes(lambda s, u: field.proposals(s, u)[0], states, field.draws)
    number, proposal = field.proposals(first.state, first.middle)
    different, kind = torch.stack([first.state, number]).unique(dim=1, return_inverse=True)
    example = torch.zeros(different.shape[1], dtype=torch.long)
    example = example.scatter(0, kind, torch.arange(len(kind)))
    _check_same_law(proposal, example[kind])
    draft = first.middle[example]

    def with_draft(which: Tensor, uniforms: Tensor) -> tuple[Tensor, Outcome]:
        full = torch.cat([draft[which], uniforms], dim=1)
        return field.outcomes(first.state[example][which], full)

    places = setting.gamma + 1
    second = boxes(lambda w, u: with_draft(w, u)[0], len(example), places)
    number, outcome = with_draft(second.state, second.middle)
    of_kind = torch.zeros(len(example), dtype=torch.float64).index_add(0, kind, first.mass)
    _check_inside(field, first, kind, second, number)
    state = first.state[example][second.state]
    mass = second.mass * of_kind[second.state]
    cells = Cells(state, mass, second.low, second.high, outcome)
    return Measured(setting, None, cells)  # pyrefly: ignore[bad-argument-type]


def _check_same_law(proposal: Proposal, example: Tensor) -> None:
    """The same proposals after the same text must come with the same q."""
    if proposal.draft_probs is not None:
        real = torch.arange(proposal.tokens.shape[1]) < proposal.lengths[:, None]
        law = proposal.draft_probs * real[..., None]
        if not torch.allclose(law, law[example], rtol=0, atol=1e-12):
            raise LawBroken("q depends on more than the text and the proposals before")


def _check_inside(field: Field, first: Boxes, kind: Tensor, second: Boxes, number: Tensor) -> None:
    """Any noise of a proposal, with any of the tests, does what was measured of the proposal."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        order = torch.randperm(len(second.state), generator=generator)
        some = torch.zeros(len(kind), dtype=torch.long)  # a random cell of each kind
        some = some.scatter(0, second.state[order], order)[kind]
        uniforms = torch.cat([first.inside(generator), second.inside(generator)[some]], dim=1)
        real = (first.mass > 1e-9) & (second.mass[some] > 1e-9)
        found, _ = field.outcomes(first.state, uniforms)
        if (real & (found != number[some])).any():
            raise LawBroken("the outcome of a round depends on more than its uniforms in turn")
