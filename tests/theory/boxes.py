"""Where uniform numbers change what happens, found from outside.

`boxes` bisects one uniform after the other and returns every box of numbers in which nothing
changes, so that the probability of an outcome is a sum of volumes. Nothing is taken from the
formulas of what is measured: a test may have any number of thresholds.

Shapes: N points, R cells so far, E settings of later uniforms, P places (uniforms), M cells.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Result = Callable[[Tensor, Tensor], Tensor]  # (state [N], uniforms [N, P]) to an outcome [N]
LARGEST = 1 - 2.0**-52  # the largest uniform that noise.py makes
PIECES = 4  # in which a change is looked for
BISECTIONS = 40  # places are known to 2^-42
EDGE = 1e-11  # how near to the edge of a cell a point is tried


@dataclass(frozen=True)
class Boxes:
    """Cells of noise: each a box of `state`, in which nothing changes."""

    state: Tensor  # [M]
    low: Tensor  # [M, P]
    high: Tensor

    @property
    def mass(self) -> Tensor:
        return (self.high - self.low).prod(-1)

    def point(self, fraction: Tensor, inset: float = 0.0) -> Tensor:
        """That way [M, P] from the low to the high end of each box, less `inset` at either."""
        margin = ((self.high - self.low) / 2).clamp(max=inset)
        low, high = self.low + margin, self.high - margin
        return (low + (high - low) * fraction).clamp(max=LARGEST)

    @property
    def middle(self) -> Tensor:
        return self.point(torch.full_like(self.low, 0.5))

    def somewhere(self, generator: torch.Generator, *, at_edges: bool) -> Tensor:
        """A point of each box: any, or one of those next to its corners."""
        fraction = torch.rand(self.low.shape, generator=generator, dtype=torch.float64)
        return self.point(fraction.round(), EDGE) if at_edges else self.point(fraction)


def boxes(result: Result, states: int, places: int) -> Boxes:
    """The boxes of `result(state [N], uniforms [N, P]) -> [N]`, sought one uniform at a time.

    A uniform is bisected in every cell of those before it, for all extremes of those behind it.
    """
    found = Boxes(torch.arange(states), *torch.zeros(2, states, 0, dtype=torch.float64))
    for place in range(places):
        extremes = [(0.0,), *[(0.0, LARGEST)] * (places - place - 1)]
        behind = torch.tensor(list(itertools.product(*extremes)), dtype=torch.float64)
        before = found.middle[:, None].expand(-1, len(behind), -1)
        points = torch.cat([before, behind.expand(len(before), -1, -1)], dim=-1)

        def of_cells(cell: Tensor, uniforms: Tensor, state: Tensor = found.state) -> Tensor:
            return result(state[cell], uniforms)

        cell, low, high = _intervals(*_changes(of_cells, points, place), len(points))
        found = Boxes(
            found.state[cell],
            torch.cat([found.low[cell], low[:, None]], dim=1),
            torch.cat([found.high[cell], high[:, None]], dim=1),
        )
    return found


def _changes(result: Result, points: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """Where the uniform at `place` changes the result for any of `points` [R, E, P], by row.

    Halves every piece whose ends differ, so it misses what changes and changes back inside one of
    PIECES; `_check_inside` is there to see that.
    """
    others = points.flatten(0, 1)
    column = torch.arange(points.shape[-1]) == place

    def at(index: Tensor, value: Tensor) -> Tensor:
        uniforms = torch.where(column, value[:, None], others[index])
        return result(index // points.shape[1], uniforms)

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
