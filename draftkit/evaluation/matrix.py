"""Divergence by source: what every cell of a sweep gained over the drafter that it began with.

A cell is an experiment; several of one cell (other seeds) stand in it together, by their mean and
the range of their intervals. Renders summaries; computes nothing that they do not hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from draftkit.artifacts import atomic_path

Number = dict[str, Any]  # an estimate: mean and ci95


@dataclass(frozen=True)
class Cell:
    """One experiment at one temperature."""

    divergence: str
    source: str
    temperature: float
    alpha: Number
    alpha_gain: Number
    length: Number
    length_before: Number

    @property
    def length_gain(self) -> float:
        """Tokens per target pass over those of the starting drafter."""
        return self.length["mean"] / self.length_before["mean"]


def cells_of(divergence: str, source: str, summary: dict[str, Any]) -> list[Cell]:
    """The cells of an evaluation: one a temperature, none without a drafter before."""
    found = []
    for name, part in summary.get("by_temperature", {}).items():
        if "before" not in part:
            continue
        found.append(
            Cell(
                divergence,
                source,
                float(name),
                alpha=part["alpha"],
                alpha_gain=part["alpha_gain"],
                length=part["acceptance_length"],
                length_before=part["before"]["acceptance_length"],
            )
        )
    return found


def is_matrix(cells: Sequence[Cell]) -> bool:
    """Whether there are several divergences and several sources."""
    return min(len({c.divergence for c in cells}), len({c.source for c in cells})) > 1


def temperatures(cells: Sequence[Cell]) -> list[float]:
    """All of them, ascending."""
    return sorted({cell.temperature for cell in cells})


def grid(cells: Sequence[Cell], temperature: float) -> dict[str, dict[str, list[Cell]]]:
    """Cells by divergence and source, in order of appearance; empty lists where there is none."""
    sources = dict.fromkeys(cell.source for cell in cells)
    rows: dict[str, dict[str, list[Cell]]] = {
        divergence: {source: [] for source in sources}
        for divergence in dict.fromkeys(cell.divergence for cell in cells)
    }
    for cell in cells:
        if cell.temperature == temperature:
            rows[cell.divergence][cell.source].append(cell)
    return rows


def mean(values: Sequence[float]) -> float:
    """Their mean."""
    return sum(values) / len(values)


def matrix_table(cells: Sequence[Cell], temperature: float) -> Table:
    """Gain of alpha with its interval, and of tokens per target pass, by divergence and source."""
    table = Table(
        title=f"alpha gained, temperature {temperature:g}",
        caption="95 % intervals, paired by prompt; x: tokens a target pass over those before",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("", no_wrap=True)
    rows = grid(cells, temperature)
    for source in next(iter(rows.values())):
        table.add_column(source, justify="right", no_wrap=True)
    for divergence, by_source in rows.items():
        table.add_row(divergence, *(cell_text(found) for found in by_source.values()))
    return table


def cell_text(cells: Sequence[Cell]) -> str:
    """`+0.123`, `[0.11, 0.13]`, `x1.31` below each other; of several seeds the mean, counted."""
    if not cells:
        return ""
    gain = mean([cell.alpha_gain["mean"] for cell in cells])
    low = min(cell.alpha_gain["ci95"][0] for cell in cells)
    high = max(cell.alpha_gain["ci95"][1] for cell in cells)
    times = mean([cell.length_gain for cell in cells])
    seeds = f" n={len(cells)}" if len(cells) > 1 else ""
    return f"{gain:+.3f}\n[{low:.2f}, {high:.2f}]\nx{times:.2f}{seeds}"


def heat_map(cells: Sequence[Cell], path: Path) -> None:
    """Draw the gains of alpha, a panel for each temperature, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = temperatures(cells)
    figure = Figure(figsize=(1.5 + 4.2 * len(panels), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    reach = max(abs(cell.alpha_gain["mean"]) for cell in cells) or 1.0
    for axes, temperature in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        rows = grid(cells, temperature)
        sources = list(next(iter(rows.values())))
        values = [
            [
                mean([cell.alpha_gain["mean"] for cell in found]) if found else float("nan")
                for found in by_source.values()
            ]
            for by_source in rows.values()
        ]
        axes.imshow(values, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto")
        for y, by_source in enumerate(rows.values()):
            for x, found in enumerate(by_source.values()):
                if found:
                    text, strong = cell_text(found), abs(values[y][x]) > 0.6 * reach
                    axes.text(
                        x,
                        y,
                        text,
                        ha="center",
                        va="center",
                        fontsize=7,
                        color="white" if strong else "black",
                    )
        axes.set_xticks(range(len(sources)), sources)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_title(f"alpha gained, temperature {temperature:g}", fontsize=10)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=130)
