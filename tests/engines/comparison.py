"""Predicted against counted: our decoder's acceptance beside an engine's own, with tests.

A cell is one way to draft at one temperature. Both sides answer the same prompts, so differences
are paired by their documents; the texts of a sampled cell are not the same ones. Whether a
difference is there is decided by a two-sided t test over documents, after Holm's correction over
all cells (Holm, Scandinavian Journal of Statistics 6, 1979).
"""

import operator
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from draftkit.theory.acceptance import Rate, estimate, gain_p_value
from tests.engines.counts import Answer, accepted_at, summed, tokens_a_pass

LEVEL = 0.05  # below which a difference is not chance


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What was measured of one way to draft at one temperature, turn by turn.

    drafted, plain: the engine's answers with and without the drafter. ours: our decoder's.
    """

    drafts: str
    temperature: float
    drafted: Sequence[Sequence[Answer]]
    plain: Sequence[Sequence[Answer]]
    ours: Sequence[Sequence[Answer]]
    documents: Sequence[Hashable] = ()  # what each prompt belongs to; empty: each is one


def holm(p_values: Sequence[float]) -> list[float]:
    """p values after Holm's correction, in their order."""
    corrected, before = [0.0] * len(p_values), 0.0
    ranked = sorted(range(len(p_values)), key=lambda number: p_values[number])
    for rank, number in enumerate(ranked):
        before = max(before, min(1.0, (len(p_values) - rank) * p_values[number]))
        corrected[number] = before
    return corrected


def two_sided(one: Rate, other: Rate) -> float:
    """How likely a paired difference as large would be if there were none."""
    return min(1.0, 2 * min(gain_p_value(one, other), gain_p_value(other, one)))


def rate_of_turn(answers: Sequence[Answer]) -> float:
    """Tokens a second, from request to last token."""
    return sum(len(one.ids) for one in answers) / sum(one.seconds for one in answers)


def middle(values: Sequence[float]) -> dict[str, float]:
    """The median of turns, the least and the most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def speed(cell: Cell) -> dict[str, Any] | None:
    """Tokens a second with and without the drafter, and the ratio of each turn; None without."""
    if not cell.plain:
        return None
    with_drafter, without = (
        [rate_of_turn(answers) for answers in turns] for turns in (cell.drafted, cell.plain)
    )
    ratios = [a / b for a, b in zip(with_drafter, without, strict=True)]
    return {
        "tokens_per_second": {"plain": middle(without), "drafted": middle(with_drafter)},
        "speedup": middle(ratios),
    }


def same(answers: Sequence[Answer], others: Sequence[Answer]) -> int:
    """How many answers are token for token the other ones."""
    return sum(a.ids == b.ids for a, b in zip(answers, others, strict=True))


def row(cell: Cell) -> dict[str, Any]:
    """A cell as the summary holds it, its p value uncorrected."""
    sides = (summed(cell.drafted), summed(cell.ours))
    rows = [
        (pair, document)
        for *pair, document in zip(*sides, cell.documents or range(len(sides[0])), strict=True)
        if all(one.passes for one in pair)
    ]
    if len({document for _, document in rows}) < 2:
        raise ValueError(
            "fewer than 2 documents in whose answers proposals were tested: use more prompts"
        )
    counted, ours = ([pair[side] for pair, _ in rows] for side in (0, 1))
    documents = [document for _, document in rows]
    rates = [tokens_a_pass(side)._replace(documents=documents) for side in (counted, ours)]
    difference = estimate(*rates, compare=operator.sub)
    return {
        "drafts": cell.drafts,
        "temperature": cell.temperature,
        "predicted": estimate(rates[1]).as_dict(),
        "counted": estimate(rates[0]).as_dict(),
        "difference": difference.as_dict(),
        "p": two_sided(*rates),
        "predicted_by_position": accepted_at(ours),
        "counted_by_position": accepted_at(counted),
        "speed": speed(cell),
    }


def compared(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """All cells, with `p_holm`, and `agrees`: whether chance explains the difference."""
    rows = [row(cell) for cell in cells]
    for one, p in zip(rows, holm([one["p"] for one in rows]), strict=True):
        one |= {"p_holm": p, "agrees": p >= LEVEL}
    return rows


def greedy(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Of each greedy cell how many answers equal the engine's plain ones, and our decoder's."""
    return [
        {
            "drafts": cell.drafts,
            "compared": len(cell.drafted[0]),
            "same_as_plain": same(cell.drafted[0], cell.plain[0]) if cell.plain else None,
            "same_as_ours": same(cell.drafted[0], cell.ours[0]),
        }
        for cell in cells
        if cell.temperature == 0
    ]
