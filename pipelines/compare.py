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

from .command import run_command
from .rankings import Ranking, rankings, recommendation
from .runs import read_runs
from .sheet import TABLE, as_csv, grid_of, page_of, parts_of, settings_table

PAGE = "compare.html"


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
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PAGE, page_of(made, unread))
    write_text(folder / TABLE, as_csv(made))
    show(made, unread, Console(markup=False, highlight=False))
    print(f"As a page: {folder / PAGE}")


if __name__ == "__main__":
    run_command("compare", compare)
