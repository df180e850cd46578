"""`python -m pipelines.benchmarks.engines FOLDER ...`: measured engines as one page of results.

Copies the summary of each folder of `measure_engine` to docs/results/engines, and writes
docs/results/engines.md from all that lie there. `--note TEXT` is stored with the folders of the
command, for the reader of their numbers.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, write_json, write_text
from draftkit.engines.drivers import DRIVERS
from draftkit.engines.tables import page

from ..plan import MANIFEST, SUMMARY

RESULTS = Path("docs") / "results"
KEPT, PAGE = "engines", "engines.md"


def pair_name(summary: dict[str, Any]) -> str:
    """The pair by the last names of its target's folder that are not `target`."""
    parts = [part for part in Path(summary["pair"]).parts if part != "target"]
    return parts[-1]


def store(folder: Path, results: Path, note: str) -> Path:
    """Copy the summary of a measurement to `results`, with `note`.

    Raises ValueError for a folder that is none.
    """
    if (
        not (folder / SUMMARY).is_file()
        or read_json(folder / MANIFEST)["stage"] != "measure_engine"
    ):
        raise ValueError(f"{folder} holds no complete measurement of measure_engine")
    summary = read_json(folder / SUMMARY)
    plugin = f"-{summary['plugin']}" if summary["plugin"] else ""
    file = results / KEPT / f"{pair_name(summary)}-{summary['engine']}{plugin}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, summary | {"pair": pair_name(summary), "note": note})
    return file


def write_page(results: Path) -> Path:
    """The page of all summaries below `results`, pairs by name, engines as they are listed."""
    summaries = [read_json(file) for file in sorted((results / KEPT).glob("*.json"))]
    order = [*DRIVERS]
    summaries.sort(key=lambda one: (order.index(one["engine"]), one["plugin"] or ""))
    groups = defaultdict(list)
    for summary in summaries:
        groups[summary["pair"]].append((summary, summary["note"]))
    write_text(results / PAGE, page(dict(sorted(groups.items()))))
    return results / PAGE


def main(arguments: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    """Store the folders, and write the page anew."""
    parser = argparse.ArgumentParser(description=__doc__, prog="pipelines.benchmarks.engines")
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--note", default="", help="what to know of these folders' numbers")
    given = parser.parse_args(arguments)
    try:
        for folder in given.folders:
            print(store(folder, results, given.note))
    except ValueError as error:
        raise SystemExit(f"{error}") from error
    print(write_page(results))


if __name__ == "__main__":
    main()
