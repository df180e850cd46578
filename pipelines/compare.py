"""Experiments side by side: `python -m pipelines.compare 'runs=[outputs/a,outputs/b]'`.

Reads finished folders (an experiment's, a sweep's or one stage's) and, for `wandb:PROJECT/GROUP`,
runs uploaded to Weights & Biases. Shows acceptance, speedup, verdict and the settings that differ;
of a sweep over divergences and sources also what each cell gained, as tables and a heat map.
It measures nothing, and says that one run is better only where the 95 % intervals do not overlap
and target, text (by their checksums) and sampling are the same.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from draftkit.artifacts import fingerprint, read_json, write_json
from draftkit.config import Config, flatten
from pipelines.evaluate import PROMPTS
from pipelines.experiments.matrix import (
    Cell,
    cells_of,
    control_table,
    heat_map,
    is_matrix,
    matrix_table,
    temperatures,
)
from pipelines.folder import CONFIG
from pipelines.plan import MANIFEST, SUMMARY, Given, StageFolder
from pipelines.run import stage

STAGES = ("evaluate", "distill")  # the first that is there gives the numbers
TRAINING = "train"
PRODUCT = "compare.json"
HEAT_MAP = "heat_map.png"
REMOTE = "wandb:"
CAPTION = "means over 95 % intervals; end to end: speedup with prefill and waiting"
_NOT_SHOWN = ("name", "root", "overwrite", "runs", "tracker")
_SAME_QUESTION = ("target", "data", "sampling", "evaluate.temperatures", "evaluate.max_new_tokens")
_CONTENT = ("target", "data")  # inputs of which the settings do not tell all: a seed makes a target
_SAME_MACHINE = (*_SAME_QUESTION, "hardware", "machine")

Row = dict[str, Any]


def _is_stage(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def stages_of(folder: Path) -> list[Path]:
    """The stage folders that tell of the experiment in `folder`, or `folder` if it is one.

    Training has a row of its own only until `distill`, whose summary repeats it, has begun.
    """
    if _is_stage(folder):
        return [folder]
    names = STAGES if _is_stage(folder / STAGES[-1]) else (*STAGES, TRAINING)
    return [folder / name for name in names if _is_stage(folder / name)]


def expand(run: str) -> list[Path]:
    """The folders that `run` stands for: itself, or the jobs of the sweep that it holds.

    Raises ValueError when there is no such folder or nothing in it was made by a stage.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise ValueError(f"runs: there is no folder {run}; give experiment folders, outputs/NAME")
    if stages_of(folder):
        return [folder]
    jobs = sorted({path.parent.parent for path in folder.glob(f"*/*/{MANIFEST}")})
    jobs = [job for job in jobs if stages_of(job)]
    if not jobs:
        raise ValueError(f"runs: {run} holds no evaluate or distill folder: run one of them first")
    return jobs


def _numbers(summary: Mapping[str, Any]) -> Row:
    speedup = summary.get("speedup")
    return {
        "alpha": summary.get("alpha", summary.get("alpha_after")),
        "acceptance_length": summary.get("acceptance_length"),
        "speedup": speedup,
        "end_to_end": summary.get("end_to_end", (speedup or {}).get("end_to_end")),
        "verdict": summary.get("verdict"),
        "seconds": summary.get("seconds"),
    }


def read_run(folder: Path) -> Row:
    """One row: label, whether it is finished, its numbers and its settings."""
    stages = stages_of(folder)
    finished = [path for path in stages if (path / SUMMARY).is_file()]
    numbers = _numbers({})
    for path in reversed(finished):  # the more telling stage speaks last
        found = _numbers(read_json(path / SUMMARY))
        seconds = (numbers["seconds"] or 0) + (found["seconds"] or 0)
        numbers |= {key: value for key, value in found.items() if value is not None}
        numbers["seconds"] = seconds
    settings: dict[str, Any] = {}
    for path in reversed(stages):
        if (path / CONFIG).is_file():
            settings |= flatten(yaml.safe_load((path / CONFIG).read_text(encoding="utf-8")))
    manifest = read_json(stages[0] / MANIFEST)
    machine = manifest.get("provenance", {}).get("hardware", {})
    shown = {key: value for key, value in settings.items() if key.split(".")[0] not in _NOT_SHOWN}
    shown |= checksums(manifest.get("inputs", {}))
    unfinished = [path.name for path in stages if path not in finished]
    if stages[0].name == TRAINING and not unfinished:
        unfinished = [STAGES[0]]
    cells = [asdict(cell) for path in finished for cell in cells_in(path, settings)]
    return {"run": str(folder), "unfinished": unfinished, **numbers, "cells": cells} | {
        "settings": shown | {f"machine.{key}": value for key, value in machine.items()}
    }


def checksums(inputs: Mapping[str, str]) -> dict[str, str]:
    """Beginnings of the checksums of target and text, as settings that may differ."""
    return {f"{name}.sha256": inputs[name][:12] for name in _CONTENT if name in inputs}


def cells_in(path: Path, settings: Mapping[str, Any]) -> list[Cell]:
    """What the evaluation in `path` says of its divergence and source at each temperature."""
    return cells_of(
        str(settings.get("divergence.name")),
        str(settings.get("source.name")),
        int(settings.get("seed", 0)),
        read_json(path / SUMMARY),
        read_json(path / PROMPTS) if (path / PROMPTS).is_file() else None,
    )


def read_remote(name: str) -> list[Row]:
    """Evaluations of the W&B group `[ENTITY/]PROJECT/GROUP`, from its scalars.

    Raises ValueError when W&B cannot be asked or the group has none.
    """
    import wandb

    project, _, group = name.rpartition("/")
    try:
        filters = {"group": group, "jobType": STAGES[0]}
        found = list(wandb.Api().runs(project, filters=filters, lazy=False))
    except (wandb.Error, ValueError) as error:
        raise ValueError(f"runs: W&B does not answer for {name} ({error})") from error
    if not found:
        raise ValueError(f"runs: W&B has no evaluation in the group {name}")
    rows = []
    for run in found:
        flat = dict(run.summary)

        def estimate(key: str, flat: dict[str, Any] = flat) -> Row | None:
            if key not in flat:
                return None
            return {"mean": flat[key], "ci95": [flat.get(f"{key}/low"), flat.get(f"{key}/high")]}

        speedup = {"ci95": [flat.get("speedup/ci95/0"), flat.get("speedup/ci95/1")]}
        speedup |= {key: flat.get(f"speedup/{key}") for key in ("measured", "predicted")}
        numbers = {key: estimate(key) for key in ("alpha", "acceptance_length")}
        numbers |= {"speedup": speedup, "end_to_end": estimate("speedup/end_to_end")}
        numbers |= {"verdict": flat.get("verdict")}
        settings = {
            key: value
            for key, value in flatten(run.config).items()
            if key.split(".")[0] not in (*_NOT_SHOWN, "provenance", "inputs")
        } | checksums(run.config.get("inputs", {}))
        unfinished = [] if run.state == "finished" else [STAGES[0]]
        row = {"run": f"{REMOTE}{project}/{run.name}", "unfinished": unfinished}
        rows.append(row | _numbers(flat | numbers) | {"settings": settings})
    return rows


def read_runs(runs: list[str]) -> list[Row]:
    """The rows of all `runs`. Raises ValueError naming the one that cannot be read."""
    if not runs:
        raise ValueError("runs must name what to compare: 'runs=[outputs/a,outputs/b]'")
    rows = []
    for run in runs:
        if run.startswith(REMOTE):
            rows += read_remote(run.removeprefix(REMOTE))
        else:
            rows += [read_run(folder) for folder in expand(run)]
    return rows


def differing(rows: list[Row]) -> list[str]:
    """Settings that are not the same in all rows, in order of appearance."""
    keys = dict.fromkeys(key for row in rows for key in row["settings"])
    return [key for key in keys if len({repr(row["settings"].get(key)) for row in rows}) > 1]


def _interval(row: Row, key: str) -> tuple[float, float] | None:
    value = row[key]
    low, high = (value or {}).get("ci95") or (None, None)
    return None if low is None or high is None else (low, high)


def finding(rows: list[Row], key: str, title: str, same: tuple[str, ...]) -> str:
    """One sentence: which run is above all others, or why that cannot be said. Empty for one."""
    known = [(row["run"], limits) for row in rows if (limits := _interval(row, key))]
    if len(known) < 2:
        return ""
    other = [setting for setting in differing(rows) if setting.startswith(same)]
    if other:
        return f"{title}: not comparable, {', '.join(other)} differ"
    best, (low, _) = max(known, key=lambda item: item[1][0])
    if all(low > high for run, (_, high) in known if run != best):
        return f"{title}: {best} is above the others (intervals do not overlap)"
    return f"{title}: intervals overlap, no run is above all others"


def _shown(row: Row, key: str, mean: str, unit: str = "") -> str:
    value = (row[key] or {}).get(mean)
    if value is None:
        return "-"
    limits = _interval(row, key)
    interval = f"\n{limits[0]:.2f}-{limits[1]:.2f}" if limits else "\n(no interval)"
    return f"{value:.3f}{unit}{interval}"


def render(rows: list[Row], findings: list[str], console: Console) -> None:
    """Print the numbers, the settings that differ, and the findings."""
    table = Table(box=box.SIMPLE_HEAD, caption=CAPTION, pad_edge=False)
    table.add_column("run", overflow="fold")
    for title in ("alpha", "tau", "end to end", "verdict", "seconds"):
        table.add_column(title, justify="right")
    for row in rows:
        verdict = (row["verdict"] or "-").replace("_", " ")
        if row["unfinished"]:
            verdict += f"\n({', '.join(row['unfinished'])} unfinished)"
        seconds = "-" if row["seconds"] is None else f"{row['seconds']:.0f}"
        table.add_row(
            row["run"],
            _shown(row, "alpha", "mean"),
            _shown(row, "acceptance_length", "mean"),
            _shown(row, "end_to_end", "mean", "x"),
            verdict,
            seconds,
        )
    console.print(table)
    cells = cells_of_rows(rows)
    keys = differing(rows)
    if keys and not is_matrix(cells):  # where it is one, its tables say what differs
        settings = Table("run", "settings that differ", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            values = [f"{key}={row['settings'].get(key, '(unknown)')}" for key in keys]
            settings.add_row(row["run"], "\n".join(values))
        console.print(settings)
    for line in findings:
        console.print(line, highlight=False)
    if is_matrix(cells):
        for temperature in temperatures(cells):
            console.print(matrix_table(cells, temperature))
            if (table := control_table(cells, temperature)) is not None:
                console.print(table)


def cells_of_rows(rows: list[Row]) -> list[Cell]:
    """The cells of all rows."""
    return [Cell(**cell) for row in rows for cell in row.get("cells", ())]


def _needs(config: Config) -> dict[str, Given]:
    return {row["run"]: Given(fingerprint(repr(row))) for row in read_runs(config.runs)}


def _show(config: Config, path: Path) -> None:
    product = read_json(path / PRODUCT)
    render(product["runs"], product["findings"], Console())


@stage(sections=(), needs=_needs, product=None, after=_show)
def compare(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Write `compare.json`: the rows, the settings that differ and the findings."""
    rows = read_runs(config.runs)
    findings = [
        finding(rows, "alpha", "alpha", _SAME_QUESTION),
        finding(rows, "acceptance_length", "tau", (*_SAME_QUESTION, "decode.gamma")),
        finding(rows, "end_to_end", "speedup end to end", _SAME_MACHINE),
    ]
    findings = [line for line in findings if line]
    product = {"runs": rows, "differing": differing(rows), "findings": findings}
    if folder.is_main:
        write_json(folder.path / PRODUCT, product)
        cells = cells_of_rows(rows)
        if is_matrix(cells):
            heat_map(cells, folder.path / HEAT_MAP)
            folder.tracker.figure("compare/heat_map", folder.path / HEAT_MAP)
    columns = ["run", "alpha", "acceptance_length", "end_to_end", "speedup", "verdict"]
    cells = [
        [
            row["run"],
            *((row[key] or {}).get("mean") for key in columns[1:4]),
            (row["speedup"] or {}).get("measured"),
            row["verdict"],
        ]
        for row in rows
    ]
    folder.tracker.table("compare", columns, cells)
    return {"runs": [row["run"] for row in rows], "findings": findings}


if __name__ == "__main__":
    compare.main()
