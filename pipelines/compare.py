"""`python -m pipelines.compare 'runs=[outputs/a,outputs/b]'`: experiments side by side.

Reads finished folders (an experiment's, a sweep's or one stage's) and, for `wandb:PROJECT/GROUP`,
runs uploaded to Weights & Biases. Shows acceptance, speedup, verdict and the settings that differ;
of a sweep over divergences and sources also tables of what each cell gained.
It measures nothing, and says that one run is better only where the 95 % intervals do not overlap
and target, text (by their checksums) and sampling are the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config, flatten

from .command import run_command
from .evaluate import PROMPTS
from .matrix import cells_of, is_matrix, matrix_tables
from .product import MANIFEST, SUMMARY
from .stage import CONFIG

STAGES = ("evaluate", "distill")  # the first that is there gives the numbers
TRAINING = "train"
PRODUCT = "compare.json"
REMOTE = "wandb:"
CAPTION = "means over 95 % intervals; end to end: speedup with prefill and waiting"
_NOT_SHOWN = ("name", "root", "overwrite", "runs", "tracker", "provenance", "inputs")
_SAME_QUESTION = ("target", "data", "sampling", "evaluate.temperatures", "evaluate.max_new_tokens")
_CONTENT = ("target", "data")  # inputs of which the settings do not tell all: a seed makes a target
_SAME_MACHINE = (*_SAME_QUESTION, "hardware", "machine")

Row = dict[str, Any]


def stages_of(folder: Path) -> list[Path]:
    """The stage folders that tell of the experiment in `folder`, or `folder` if it is one.

    Training has a row of its own only until `distill`, whose summary repeats it, has begun.
    """
    if (folder / MANIFEST).is_file():
        return [folder]
    begun = [folder / name for name in (*STAGES, TRAINING) if (folder / name / MANIFEST).is_file()]
    names = [path.name for path in begun]
    return [path for path in begun if path.name != TRAINING or STAGES[-1] not in names]


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


def _settings(config: Mapping[str, Any], inputs: Mapping[str, str]) -> dict[str, Any]:
    """The settings that may differ, and beginnings of the checksums of target and text."""
    settings = {k: v for k, v in flatten(config).items() if k.split(".")[0] not in _NOT_SHOWN}
    return settings | {f"{key}.sha256": inputs[key][:12] for key in _CONTENT if key in inputs}


def read_run(folder: Path) -> Row:
    """One row: label, whether it is finished, its numbers and its settings."""
    stages = stages_of(folder)
    numbers, config, cells, unfinished = _numbers({}), {}, [], []
    for path in reversed(stages):  # the more telling stage speaks last
        if (path / CONFIG).is_file():
            config |= yaml.safe_load((path / CONFIG).read_text(encoding="utf-8"))
        if not (path / SUMMARY).is_file():
            unfinished.append(path.name)
            continue
        summary = read_json(path / SUMMARY)
        known = {key: value for key, value in _numbers(summary).items() if value is not None}
        known["seconds"] = (numbers["seconds"] or 0) + known.get("seconds", 0)
        numbers |= known
        prompts = read_json(path / PROMPTS) if (path / PROMPTS).is_file() else {}
        cells += cells_of(config, summary, prompts)
    if stages[0].name == TRAINING and not unfinished:
        unfinished = [STAGES[0]]
    manifest = read_json(stages[0] / MANIFEST)
    machine = manifest.get("provenance", {}).get("hardware", {})
    settings = _settings(config, manifest.get("inputs", {}))
    settings |= {f"machine.{key}": value for key, value in machine.items()}
    row = {"run": str(folder), "unfinished": unfinished[::-1], **numbers}
    return row | {"cells": cells, "settings": settings}


def read_remote(run: str) -> list[Row]:
    """Evaluations of the W&B group `wandb:[ENTITY/]PROJECT/GROUP`, from its scalars.

    Raises ValueError when W&B cannot be asked or the group has none.
    """
    import wandb

    name = run.removeprefix(REMOTE)
    project, _, group = name.rpartition("/")
    try:
        filters = {"group": group, "jobType": STAGES[0]}
        uploaded = list(wandb.Api().runs(project, filters=filters, lazy=False))
    except (wandb.Error, ValueError) as error:
        raise ValueError(f"runs: W&B does not answer for {name} ({error})") from error
    if not uploaded:
        raise ValueError(f"runs: W&B has no evaluation in the group {name}")
    return [_remote_row(run, project) for run in uploaded]


def _remote_row(run: Any, project: str) -> Row:
    flat = dict(run.summary)

    def estimate(key: str) -> Row | None:
        if key not in flat:
            return None
        return {"mean": flat[key], "ci95": [flat.get(f"{key}/low"), flat.get(f"{key}/high")]}

    speedup = {"ci95": [flat.get("speedup/ci95/0"), flat.get("speedup/ci95/1")]}
    speedup |= {key: flat.get(f"speedup/{key}") for key in ("measured", "predicted")}
    numbers = {key: estimate(key) for key in ("alpha", "acceptance_length")}
    numbers |= {"speedup": speedup, "end_to_end": estimate("speedup/end_to_end")}
    return {
        "run": f"{REMOTE}{project}/{run.name}",
        "unfinished": [] if run.state == "finished" else [STAGES[0]],
        **_numbers(flat | numbers),
        "settings": _settings(run.config, run.config.get("inputs", {})),
    }


def read_runs(runs: list[str]) -> list[Row]:
    """The rows of all `runs`, each once. Raises ValueError naming the one that cannot be read."""
    if not runs:
        raise ValueError("runs must name what to compare: 'runs=[outputs/a,outputs/b]'")
    rows: list[Row] = []
    for run in runs:
        is_remote = run.startswith(REMOTE)
        rows += read_remote(run) if is_remote else map(read_run, expand(run))
    return [*{row["run"]: row for row in rows}.values()]


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
    cells = [cell for row in rows for cell in row.get("cells", ())]
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
        for table in matrix_tables(cells):
            console.print(table)


def comparison(runs: list[str]) -> dict[str, Any]:
    """The rows of all `runs`, the settings that differ, and what can be said of the numbers."""
    rows = read_runs(runs)
    findings = [
        finding(rows, "alpha", "alpha", _SAME_QUESTION),
        finding(rows, "acceptance_length", "tau", (*_SAME_QUESTION, "decode.gamma")),
        finding(rows, "end_to_end", "speedup end to end", _SAME_MACHINE),
    ]
    findings = [line for line in findings if line]
    return {"runs": rows, "differing": differing(rows), "findings": findings}


def compare(config: Config) -> None:
    """Print a comparison, and leave it in `<root>/<name>/compare`.

    Raises ValueError naming a run that cannot be read.
    """
    made, folder = comparison(config.runs), Path(config.root) / config.name / "compare"
    write_json(folder / PRODUCT, made)
    render(made["runs"], made["findings"], Console())


if __name__ == "__main__":
    run_command("compare", compare)
