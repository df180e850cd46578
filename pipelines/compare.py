"""`python -m pipelines.compare 'runs=[outputs/a,outputs/b]'`: experiments side by side.

Reads finished folders (an experiment's, a sweep's or one stage's) and, for `wandb:PROJECT/GROUP`,
runs uploaded to Weights & Biases. It measures nothing: it says which run to take, what of that is
sure, and which settings differ, and leaves a page and a table in `<root>/<name>/compare`.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftkit.artifacts import write_text
from draftkit.config import DIVERGENCE_NAMES, MIXTURE, SOURCE_NAMES, Config
from draftkit.evaluation.page import AFTER, MUTED, Figure
from draftkit.evaluation.ranking import Difference, Entry, front
from draftkit.templates import render

from .command import run_command
from .rankings import CONTROL, Ranking, differing, rankings, recommendation
from .runs import Run, read_runs

AXES = ("divergence.name", "source.name")  # of a grid, down and across
ORDER = [*DIVERGENCE_NAMES, MIXTURE, *SOURCE_NAMES]
NAMED, SHOWN = 5, 30  # runs in a figure, and in a table
DIGITS = {"alpha": ".3f", "tau": ".2f", "speedup": ".2f"}
PAGE, TABLE = "compare.html", "compare.csv"  # the table of all runs


def show(made: Sequence[Ranking], unread: Sequence[str], console: Console) -> None:
    """Print what the page says, without its figures, and without settings that a grid tells."""
    verdict, _, sentence = recommendation(made)
    parts = [part for one in made for part in parts_of(one)]
    if made and not grid_of(made[0].runs):
        parts.append(settings_table(made[0].runs))
    console.print(f"{verdict}. {sentence}\n", *parts, *unread, sep="\n")


def compare(config: Config) -> None:
    """Print a comparison, and leave its page and its table in `<root>/<name>/compare`.

    Raises ValueError naming a run that cannot be read.
    """
    runs = read_runs(config.runs)
    unread = [
        f"{one.name}: {', '.join(one.unfinished)} unfinished" for one in runs if one.unfinished
    ]
    made, folder = rankings(runs), Path(config.root) / config.name / "compare"
    write_text(folder / PAGE, page_of(made, unread))
    write_text(folder / TABLE, as_csv(made))
    show(made, unread, Console(markup=False, highlight=False))
    print(f"As a page: {folder / PAGE}")


# Tables


def text_of(
    one: Entry | Difference | None, digits: str = ".3f", gap: Difference | None = None
) -> str:
    """The number, with a star if `gap` is one that differs, and its interval below."""
    if one is None:
        return ""
    star, known = " *" * (gap is not None and gap.differs), math.isfinite(one.high)
    limits = f"[{one.low:{digits}},{one.high:{digits}}]" if known else "(no interval)"
    return f"{one.mean:{digits}}{star}\n{limits}"


def table_of(columns: Sequence[str], title: str = "", caption: str = "") -> Table:
    """An empty table of numbers behind a name."""
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False)
    table.pad_edge, table.padding = False, (0, 1, 0, 0)
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def ranking_table(ranking: Ranking) -> Table:
    """The first runs, with what decides beside that of the very first."""
    table = table_of(
        ["run", "alpha", "tau", "speed-up", "difference", "minutes"],
        title=f"temperature {ranking.runs[0].temperature}, best {ranking.measure} first",
        caption="Intervals are of 95 %, each by itself. *: differs from the first, surely of all "
        "pairs of runs together (Holm, 5 %)",
    )
    for run in ranking.runs[:SHOWN]:
        cells = [
            text_of(run.entries.get(m), digits, run.gaps.get(m)) for m, digits in DIGITS.items()
        ]
        gap = run.gaps.get(ranking.measure)
        cells.append(text_of(gap, f"+{DIGITS[ranking.measure]}", gap))
        cells.append("" if run.minutes is None else f"{run.minutes:.1f}")
        table.add_row(f"{run.label}\n({run.verdict.replace('_', ' ')})", *cells)
    return table


def settings_of(runs: Sequence[Run]) -> list[str]:
    """The settings that tell the runs apart."""
    return [key for key in differing(runs) if not key.startswith("machine.")]


def settings_table(runs: Sequence[Run]) -> Table:
    """What differs, run by run."""
    table = table_of(["run"])
    table.add_column("settings that differ", overflow="fold")
    for run in runs[:SHOWN]:
        values = (f"{key}={run.settings.get(key, '(unknown)')}" for key in settings_of(runs))
        table.add_row(run.label, "\n".join(values))
    return table


def grid_of(runs: Sequence[Run]) -> dict[tuple[str, ...], Run]:
    """The runs by divergence and source; empty where not both differ, or two runs share a cell."""
    cells = {tuple(str(run.settings.get(key)) for key in AXES): run for run in runs}
    is_grid = len(differing(runs, *AXES)) == len(AXES) and len(cells) == len(runs) > 3
    return cells if is_grid else {}


def sides_of(grid: Iterable[tuple[str, ...]]) -> list[list[str]]:
    """The values down and across a grid, as the field lists them."""
    return [
        sorted(set(side), key=lambda name: (name in ORDER and ORDER.index(name), name))
        for side in zip(*grid, strict=True)
    ]


def grid_tables(runs: Sequence[Run]) -> list[Table]:
    """Alpha (or what was gained) by divergence and source, and that over plain training."""
    if not (grid := grid_of(runs)):
        return []
    texts = {"alpha": [text_of(run.entries["alpha"]) for run in runs]}
    if all("gain" in run.entries for run in runs):
        texts = {"alpha gained": [text_of(run.entries["gain"], "+.3f") for run in runs]}
    if any(CONTROL in run.gaps for run in runs):
        control = next(run.label for run in runs if CONTROL not in run.gaps)
        texts[f"alpha over {control}"] = [
            text_of(gap := run.gaps.get(CONTROL), "+.3f", gap) for run in runs
        ]
    down, across = sides_of(grid)
    tables = []
    for name, cells in texts.items():
        by_cell = dict(zip(grid, cells, strict=True))
        table = table_of(["", *across], title=f"{name}, temperature {runs[0].temperature}")
        for value in down:
            table.add_row(value, *(by_cell.get((value, other), "") for other in across))
        tables.append(table)
    return tables


# The page


def scatter(points: Sequence[tuple[Any, float, str]], x: str, y: str) -> Figure:
    """Runs at (x, y, label), those that no other beats joined by a line and named."""
    free = [points[number] for number in front([(up, cost) for cost, up, _ in points])]

    def draw(axes: Any) -> None:
        axes.scatter([one[0] for one in points], [one[1] for one in points], c=MUTED, s=14)
        axes.plot([one[0] for one in free], [one[1] for one in free], "o-", c=AFTER)
        for *at, label in free[:NAMED]:
            axes.annotate(label[:24], at, (3, 4), textcoords="offset points", fontsize=7)
        axes.set(xlabel=x, ylabel=y)
        axes.margins(0.2)

    named = ", ".join(label for *_, label in free[:NAMED])
    return Figure(draw, f"Up and left is better: in {y} over {x} no other run beats {named}.")


def curves(runs: Sequence[Run]) -> Figure:
    """Alpha on validation prompts over tokens, the best run in colour."""

    def draw(axes: Any) -> None:
        for run in reversed(runs):
            style = {"c": AFTER, "lw": 2} if run is runs[0] else {"c": MUTED, "lw": 0.8}
            tokens, alphas = zip(*run.curve, strict=True) if run.curve else ((), ())
            axes.plot([count / 1000 for count in tokens], alphas, **style)
        axes.set(xlabel="thousand generated tokens", ylabel="alpha on validation prompts")

    return Figure(draw, f"What training brought; in colour: {runs[0].label}.")


def heat_map(grid: Mapping[tuple[str, ...], Run]) -> Figure:
    """Alpha by divergence and source."""
    down, across = sides_of(grid)
    alphas = [run.entries["alpha"].mean for run in grid.values()]
    least, span = min(alphas), max(alphas) - min(alphas) or 1

    def draw(axes: Any) -> None:
        for (name, other), alpha in zip(grid, alphas, strict=True):
            x, y, share = across.index(other), down.index(name), (alpha - least) / span
            axes.bar(x, 1, 1, y - 0.5, color=AFTER, alpha=0.05 + 0.5 * share)
            axes.text(x, y, f"{alpha:.3f}", ha="center", va="center", fontsize=8)
        name, other = AXES
        axes.set(xlabel=other, ylabel=name, ylim=(len(down) - 0.5, -0.5))
        axes.set_xticks(range(len(across)), across, fontsize=8)
        axes.set_yticks(range(len(down)), down, fontsize=8)

    return Figure(draw, "Alpha: the fuller the colour, the larger.")


def figures_of(runs: Sequence[Run]) -> list[Figure]:
    """What the runs have numbers for."""
    made = [heat_map(grid)] if (grid := grid_of(runs)) else []
    for x, cost, y, name in (
        ("cost of a proposal c", "cost_ratio", "tokens a target pass", "tau"),
        ("minutes of training", "minutes", "speed-up end to end", "speedup"),
    ):
        known = [run for run in runs if name in run.entries and getattr(run, cost) is not None]
        if known:
            points = [(getattr(run, cost), run.entries[name].mean, run.label) for run in known]
            made.append(scatter(points, x, y))
    return made + [curves(runs)] * any(run.curve for run in runs)


def parts_of(ranking: Ranking) -> list[str | Table]:
    """What the terminal and the page say of the runs at one temperature."""
    hidden = len(ranking.runs) - SHOWN
    more = [f"{hidden} more in {TABLE}"] * (hidden > 0)
    return [ranking_table(ranking), *more, *ranking.notes, *grid_tables(ranking.runs)]


def page_of(made: Sequence[Ranking], unread: Sequence[str]) -> str:
    """The comparison as a page. unread: sentences on runs that are in no ranking."""
    verdict, tone, sentence = recommendation(made)
    runs = made[0].runs if made else []
    speedup = runs[0].entries.get("speedup") if runs else None
    return render(
        "compare.html",
        verdict=verdict,
        tone=tone,
        sentence=sentence,
        best=runs[0].label if runs else "",
        speedup=text_of(speedup, ".2f").split("\n") if speedup else None,
        rankings=[
            {
                "temperature": one.runs[0].temperature,
                "figures": figures_of(one.runs),
                "parts": parts_of(one),
            }
            for one in made
        ],
        settings=settings_table(runs) if runs else None,
        is_grid=bool(grid_of(runs)),  # which tells as much
        unread=unread,
    )


def as_csv(made: Sequence[Ranking]) -> str:
    """A line for each run of each ranking: all numbers, gaps, and settings that differ."""
    runs = [run for ranking in made for run in ranking.runs]
    settings, lines = settings_of(runs), []
    for run in runs:
        keys = ("name", "temperature", "verdict", "minutes", "gamma", "cost_ratio")
        line = {key: getattr(run, key) for key in keys}
        line["seeds"] = len(run.entries["alpha"].by_seed) or 1
        gaps = {f"{name}_gap": gap for name, gap in run.gaps.items()}
        for name, one in (run.entries | gaps).items():
            line |= {name: one.mean, f"{name}/low": one.low, f"{name}/high": one.high}
        line |= {f"{name}/p": gap.p_value for name, gap in gaps.items()}
        lines.append(line | {key: run.settings.get(key) for key in settings})
    file = io.StringIO()
    table = csv.DictWriter(file, [*dict.fromkeys(key for line in lines for key in line)])
    table.writeheader()
    table.writerows(lines)
    return file.getvalue()


if __name__ == "__main__":
    run_command("compare", compare)
