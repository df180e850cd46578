"""`python -m pipelines.compare 'runs=[outputs/a,outputs/b]'`: experiments side by side.

Reads finished folders (an experiment's, a sweep's or one stage's) and, for `wandb:PROJECT/GROUP`,
runs uploaded to Weights & Biases. It measures nothing: it says which run to take, what of that is
sure, and which settings differ, and leaves a page and a table in `<root>/<name>/compare`.
"""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftkit.artifacts import write_text
from draftkit.config import Config
from draftkit.evaluation.page import Page, as_html

from .command import run_command
from .rankings import rankings
from .runs import read_runs
from .sheet import TABLE, as_csv, page_of

PAGE = "compare.html"


def show(page: Page, console: Console) -> None:
    """Print the page without its figures and what is folded."""
    console.print(f"{page.verdict}. {page.sentence}\n")
    for section in page.sections:
        for part in section.parts:
            if isinstance(part, str | Table) and not section.folded:
                console.print(part)


def compare(config: Config) -> None:
    """Print a comparison, and leave its page and its table in `<root>/<name>/compare`.

    Raises ValueError naming a run that cannot be read.
    """
    runs = read_runs(config.runs)
    unread = [
        f"{one.name}: {', '.join(one.unfinished)} unfinished" for one in runs if one.unfinished
    ]
    made, folder = rankings(runs), Path(config.root) / config.name / "compare"
    page = page_of(made, unread)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PAGE, as_html(page))
    write_text(folder / TABLE, as_csv(made))
    show(page, Console(markup=False, highlight=False))
    print(f"As a page: {folder / PAGE}")


if __name__ == "__main__":
    run_command("compare", compare)
