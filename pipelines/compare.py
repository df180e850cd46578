"""`python -m pipelines.compare 'runs=[outputs/a,outputs/b]'`: experiments side by side.

Reads finished folders (an experiment's, a sweep's or one stage's) and, for `wandb:PROJECT/GROUP`,
runs uploaded to Weights & Biases. It measures nothing: it says which run to take, what of that is
sure, and which settings differ, and leaves a page and a table in `<root>/<name>/compare`.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from draftkit.artifacts import write_text
from draftkit.config import Config
from draftkit.evaluation.page import as_html

from .command import run_command
from .rankings import Ranking, rankings, recommendation
from .runs import read_runs
from .sheet import as_csv, grid_of, grid_tables, page_of, ranking_table, settings_table

PAGE, TABLE = "compare.html", "compare.csv"
SHOWN = 20  # runs in the terminal


def render(made: Sequence[Ranking], unread: Sequence[str], console: Console) -> None:
    """Print what to take, the numbers, the settings that differ, and what could not be compared."""
    verdict, _, sentence = recommendation(made)
    console.print(f"{verdict}. {sentence}\n", highlight=False, markup=False)
    for ranking in made:
        console.print(ranking_table(ranking, SHOWN))
        if (hidden := len(ranking.runs) - SHOWN) > 0:
            console.print(f"{hidden} more in {TABLE}")
        console.print(*ranking.notes, sep="\n", highlight=False, markup=False)
        console.print(*grid_tables(ranking), sep="\n")
    if made and not grid_of(made[0].runs):
        console.print(settings_table(made[0].runs, SHOWN))
    console.print(*unread[:SHOWN], sep="\n", highlight=False, markup=False)


def compare(config: Config) -> None:
    """Print a comparison, and leave its page and its table in `<root>/<name>/compare`.

    Raises ValueError naming a run that cannot be read.
    """
    runs = read_runs(config.runs)
    unread = [
        f"{run.name}: {', '.join(run.unfinished)} unfinished" for run in runs if run.unfinished
    ]
    made, folder = rankings(runs), Path(config.root) / config.name / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PAGE, as_html(page_of(made, unread)))
    write_text(folder / TABLE, as_csv(made))
    render(made, unread, Console())
    print(f"As a page: {folder / PAGE}")


if __name__ == "__main__":
    run_command("compare", compare)
