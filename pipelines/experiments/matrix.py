"""Divergence by source: what every cell of a sweep gained over the drafter that it began with, and
over plain training.

A cell is an experiment; several of one cell (other seeds) stand in it together. Differences are
paired: both drafts are judged on the same continuations of the same prompts. What all seeds made of
a document is one observation: seeds are no new documents.
Every interval speaks of its own cell. Of many cells some lie outside of theirs, and the best of
many is more likely than others to have been lucky, as is the control that did best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich import box
from rich.table import Table

from draftkit.artifacts import atomic_path
from draftkit.config import DIVERGENCE_NAMES, MIXTURE, SOURCE_NAMES
from draftkit.theory.acceptance import Rate, estimate

CONTROL = "next_token"  # plain training, for as many steps on as many tokens

Number = dict[str, Any]  # an estimate: mean and ci95


@dataclass(frozen=True)
class Cell:
    """One experiment at one temperature."""

    divergence: str
    source: str
    temperature: float
    seed: int
    judged: dict[str, Number]  # alpha, alpha_gain, acceptance_length, acceptance_length_before
    # What was measured prompt by prompt, where it was kept: which `contexts`, sums and positions of
    # the drafter `before` and `after`.
    prompts: dict[str, Any]

    @property
    def after(self) -> list[float]:
        """Sums of min(p, q) by prompt; empty where they or their documents are not known."""
        after = self.prompts.get("after", {})
        return after.get("alpha", []) if "documents" in after else []

    @property
    def question(self) -> tuple[int, str]:
        """The seed, and which continuations of which prompts it was judged on."""
        return self.seed, self.prompts.get("contexts", "")


def cells_of(
    config: Mapping[str, Any], summary: Mapping[str, Any], prompts: Mapping[str, Any] | None = None
) -> list[Cell]:
    """The cells of an evaluation under `config`: one a temperature, none without a drafter before.

    prompts: by temperature, what the evaluation found prompt by prompt.
    """
    return [
        Cell(
            config["divergence"]["name"],
            config["source"]["name"],
            float(temperature),
            config["seed"],
            judged={key: part[key] for key in ("alpha", "alpha_gain", "acceptance_length")}
            | {"acceptance_length_before": part["before"]["acceptance_length"]},
            prompts=(prompts or {}).get(temperature, {}),
        )
        for temperature, part in summary.get("by_temperature", {}).items()
        if "before" in part
    ]


def is_matrix(cells: Sequence[Cell]) -> bool:
    """Whether there are several divergences and several sources."""
    return min(len({c.divergence for c in cells}), len({c.source for c in cells})) > 1


def temperatures(cells: Sequence[Cell]) -> list[float]:
    return sorted({cell.temperature for cell in cells})


def grid(cells: Sequence[Cell], temperature: float) -> dict[str, dict[str, list[Cell]]]:
    """Cells by divergence and source, in the order of the choices; empty where there is none."""
    divergences, sources = {cell.divergence for cell in cells}, {cell.source for cell in cells}
    rows: dict[str, dict[str, list[Cell]]] = {
        divergence: {source: [] for source in sorted(sources, key=SOURCE_NAMES.index)}
        for divergence in sorted(divergences, key=(*DIVERGENCE_NAMES, MIXTURE).index)
    }
    for cell in cells:
        if cell.temperature == temperature:
            rows[cell.divergence][cell.source].append(cell)
    return rows


def paired(after: Sequence[Cell], baselines: Sequence[list[float]]) -> Number:
    """Alpha of `after` minus that of the baselines, both by seed and on the same prompts."""

    def column(lists: Sequence[list[float]]) -> torch.Tensor:
        return torch.tensor(lists, dtype=torch.float64).sum(0)

    positions = column([cell.prompts["after"]["positions"] for cell in after])
    gain = column([cell.after for cell in after]) - column(baselines)
    return estimate(Rate(gain, positions, after[0].prompts["after"]["documents"])).as_dict()


def gain(cells: Sequence[Cell]) -> Number:
    """What the seeds of a cell gained over the drafters that they began with.

    Raises ValueError for several evaluations of which one does not tell its prompts apart.
    """
    if len(cells) == 1:
        return cells[0].judged["alpha_gain"]
    counts = {len(cell.after) for cell in cells}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(
            "runs: seeds stand together only where each evaluation has its prompts.json, of as "
            "many prompts and with their documents: run pipelines.evaluate on the others again, "
            "with overwrite=true"
        )
    return paired(cells, [cell.prompts["before"]["alpha"] for cell in cells])


def control(cells: Sequence[Cell], temperature: float) -> list[Cell]:
    """The seeds of the better plain training, on whichever texts; none where it was not run."""
    by_source = grid(cells, temperature).get(CONTROL, {}).values()
    return max(
        filter(None, by_source),
        key=lambda seeds: fmean([cell.judged["alpha"]["mean"] for cell in seeds]),
        default=[],
    )


def over_control(cells: Sequence[Cell], controls: Sequence[Cell]) -> Number | None:
    """What `cells` have over plain training of the same seeds; None where nothing is paired."""
    by_question = {cell.question: cell.after for cell in controls if cell.after}
    both = [cell for cell in cells if cell.after and cell.question in by_question]
    if not both:
        return None
    return paired(both, [by_question[cell.question] for cell in both])


def matrix_table(cells: Sequence[Cell], temperature: float) -> Table:
    """Gain of alpha with its interval, and of tokens per target pass, by divergence and source."""
    title = f"alpha gained, temperature {temperature:g}"
    return table_of(
        cells, temperature, title, cell_text, "; x: tokens a target pass over those before"
    )


def control_table(cells: Sequence[Cell], temperature: float) -> Table | None:
    """Alpha over that of plain training; None where no cell can be paired with it."""
    controls = control(cells, temperature)
    if not any(over_control([cell], controls) for cell in cells if cell.temperature == temperature):
        return None

    def text(seeds: Sequence[Cell]) -> str:
        number = over_control(seeds, controls)
        same = seeds and seeds[0].divergence == CONTROL and seeds[0].source == controls[0].source
        return "" if number is None or same else number_text(number)

    title = f"alpha over {CONTROL} on {controls[0].source} text, temperature {temperature:g}"
    return table_of(cells, temperature, title, text)


def table_of(
    cells: Sequence[Cell],
    temperature: float,
    title: str,
    text: Callable[[Sequence[Cell]], str],
    legend: str = "",
) -> Table:
    """A column for each source and a row for each divergence, `text` of the seeds in each cell."""
    rows = grid(cells, temperature)
    count = sum(bool(seeds) for by_source in rows.values() for seeds in by_source.values())
    caption = (
        f"95 % intervals, paired by document, each of its own cell and not of all {count} at once: "
        f"the best of many may have been lucky{legend}"
    )
    edges = {"show_edge": False, "pad_edge": False, "padding": 0}
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, **edges)
    table.add_column("", no_wrap=True)
    for source in next(iter(rows.values())):
        table.add_column(source, justify="right", no_wrap=True)
    for divergence, by_source in rows.items():
        table.add_row(divergence, *map(text, by_source.values()))
    return table


def number_text(number: Number) -> str:
    """`+0.123` and `[0.110,0.135]` below each other: four of them fit a line."""
    if number["ci95"] is None:
        return f"{number['mean']:+.3f}\n(no interval)"
    low, high = number["ci95"]
    return f"{number['mean']:+.3f}\n[{low:.3f},{high:.3f}]"


def cell_text(cells: Sequence[Cell]) -> str:
    """The gain, its interval, and `x1.31` below each other; of several seeds with their count."""
    if not cells:
        return ""
    keys = ("acceptance_length", "acceptance_length_before")
    lengths = [[cell.judged[key]["mean"] for cell in cells] for key in keys]
    times = fmean(map(truediv, *lengths))
    seeds = f" n={len(cells)}" if len(cells) > 1 else ""
    return f"{number_text(gain(cells))}\nx{times:.2f}{seeds}"


def heat_map(cells: Sequence[Cell], path: Path) -> None:
    """Draw the gains of alpha, a panel for each temperature, as PNG."""
    from matplotlib.figure import Figure

    panels = temperatures(cells)
    figure = Figure(figsize=(1.5 + 4.2 * len(panels), 5.2), layout="constrained")
    reach = max(abs(cell.judged["alpha_gain"]["mean"]) for cell in cells) or 1.0
    for axes, temperature in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        rows = grid(cells, temperature)
        sources = list(next(iter(rows.values())))
        values = [
            [gain(seeds)["mean"] if seeds else float("nan") for seeds in by_source.values()]
            for by_source in rows.values()
        ]
        axes.imshow(values, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto")
        centred = {"ha": "center", "va": "center", "fontsize": 7}
        for y, by_source in enumerate(rows.values()):
            for x, seeds in enumerate(by_source.values()):
                colour = "white" if abs(values[y][x]) > 0.6 * reach else "black"
                axes.text(x, y, cell_text(seeds), color=colour, **centred)
        axes.set_xticks(range(len(sources)), sources)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_title(f"alpha gained, temperature {temperature:g}", fontsize=10)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.supxlabel("intervals: 95 %, each of its own cell, not of all at once", fontsize=7)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
