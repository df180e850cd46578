"""Divergence by source: what every cell of a sweep gained over the drafter that it began with, and
over plain training.

A cell is an experiment at one temperature. Differences are paired: both drafts are judged on the
same continuations of the same prompts. Every interval speaks of its own cell. Of many cells some
lie outside of theirs, and the best of many is more likely than others to have been lucky, as is the
control that did best.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich import box
from rich.table import Table

from draftkit.config import DIVERGENCE_NAMES, MIXTURE, SOURCE_NAMES
from draftkit.theory.acceptance import Rate, estimate

CONTROL = "next_token"  # plain training, for as many steps on as many tokens

Cell = dict[str, Any]
Number = dict[str, Any]  # an estimate: mean and ci95


def cells_of(
    config: Mapping[str, Any], summary: Mapping[str, Any], prompts: Mapping[str, Any]
) -> list[Cell]:
    """The cells of an evaluation under `config`: one a temperature, none without a drafter before.

    prompts: by temperature, sums of min(p, q) and positions by prompt, of the drafter `before` and
    `after`, and which `contexts` these are of; empty where they were not kept.
    """

    def cell(temperature: str, part: Mapping[str, Any]) -> Cell:
        before, own = part["before"]["acceptance_length"], prompts.get(temperature, {})
        return {
            "divergence": config["divergence"]["name"],
            "source": config["source"]["name"],
            "temperature": float(temperature),
            "alpha": part["alpha"],
            "gain": part["alpha_gain"],
            "times": part["acceptance_length"]["mean"] / before["mean"],
            "contexts": own.get("contexts"),
            "prompts": own.get("after"),
        }

    judged = summary.get("by_temperature", {}).items()
    return [cell(temperature, part) for temperature, part in judged if "before" in part]


def is_matrix(cells: Sequence[Cell]) -> bool:
    """Whether there are several divergences and several sources, and no cell twice."""
    keys = [(cell["divergence"], cell["source"], cell["temperature"]) for cell in cells]
    several = all(len({key[axis] for key in keys}) > 1 for axis in (0, 1))
    return several and len(set(keys)) == len(keys)


def matrix_tables(cells: Sequence[Cell]) -> list[Table]:
    """At each temperature what was gained, and what of it is more than plain training gives."""
    tables = []
    for temperature in sorted({cell["temperature"] for cell in cells}):
        some = [cell for cell in cells if cell["temperature"] == temperature]
        title = f"alpha gained, temperature {temperature:g}"
        legend = "; x: tokens a target pass over those before"
        tables.append(table_of(some, title, gain_text, legend))
        plain = [cell for cell in some if cell["divergence"] == CONTROL and cell["prompts"]]
        if plain:
            control = max(plain, key=lambda cell: cell["alpha"]["mean"])
            title = f"alpha over {CONTROL} on {control['source']} text, temperature {temperature:g}"
            tables.append(table_of(some, title, lambda cell, of=control: over_text(cell, of)))
    return tables


def table_of(
    cells: Sequence[Cell], title: str, text: Callable[[Cell], str], legend: str = ""
) -> Table:
    """A column for each source and a row for each divergence, `text` of the cell in each."""
    by_key = {(cell["divergence"], cell["source"]): cell for cell in cells}
    divergences, sources = ({key[axis] for key in by_key} for axis in (0, 1))
    caption = (
        f"95 % intervals, paired by document, each of its own cell and not of all {len(cells)} at "
        f"once: the best of many may have been lucky{legend}"
    )
    edges = {"show_edge": False, "pad_edge": False, "padding": 0}
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, **edges)
    table.add_column("", no_wrap=True)
    columns = sorted(sources, key=SOURCE_NAMES.index)
    for source in columns:
        table.add_column(source, justify="right", no_wrap=True)
    for divergence in sorted(divergences, key=(*DIVERGENCE_NAMES, MIXTURE).index):
        row = (by_key.get((divergence, source)) for source in columns)
        table.add_row(divergence, *(text(cell) if cell else "" for cell in row))
    return table


def gain_text(cell: Cell) -> str:
    """The gain, its interval, and `x1.31` below each other."""
    return f"{number_text(cell['gain'])}\nx{cell['times']:.2f}"


def over_text(cell: Cell, control: Cell) -> str:
    """The gain over `control`; empty for itself, and for a cell judged on other continuations."""
    if cell is control or not cell["prompts"] or cell["contexts"] != control["contexts"]:
        return ""
    return number_text(gain_over(cell, control))


def gain_over(cell: Cell, control: Cell) -> Number:
    """Alpha of `cell` minus that of `control`, on the same prompts."""
    mine, plain = cell["prompts"], control["prompts"]
    sums, others, positions = (
        torch.tensor(column, dtype=torch.float64)
        for column in (mine["alpha"], plain["alpha"], mine["positions"])
    )
    return estimate(Rate(sums - others, positions, mine["documents"])).as_dict()


def number_text(number: Number) -> str:
    """`+0.123` and `[0.110,0.135]` below each other: four of them fit a line."""
    if number["ci95"] is None:
        return f"{number['mean']:+.3f}\n(no interval)"
    low, high = number["ci95"]
    return f"{number['mean']:+.3f}\n[{low:.3f},{high:.3f}]"
