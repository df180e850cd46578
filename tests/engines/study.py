"""`python -m tests.engines.study FOLDER TARGET DRAFT --name PAIR [ENGINE ...]`: predicted, counted.

Starts each engine that is installed (`make engines`) on a pair, once for each way in which it
drafts, and runs `measure_engine` on its server at two temperatures. Every measurement becomes a row
of docs/results/engines.json, in the place of an older one of the same pair, engine and setting;
docs/results/engines.md is written from all rows.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from draftkit.artifacts import machine, provenance, read_json, write_text
from draftkit.evaluation.report import interval, signed
from pipelines.command import launch
from pipelines.configuration import compose_config
from pipelines.plan import MEASURE_ENGINE
from tests.engines.servers import DRAFTS, PLUGIN, Launch, export_pair, serving

GAMMA, PROMPTS, TOKENS, TEMPERATURES = 4, 48, 48, (0.0, 1.0)
LENGTH = 512  # of a prompt with its answer, at most
ROWS, PAGE = Path("docs/results/engines.json"), Path("docs/results/engines.md")
KEY = ("pair", "engine", "plugin", "drafts", "temperature")  # of a row: one measurement each
ABOUT = """\
# Engines: predicted and counted

What each engine counts of its own while it drafts, beside what draftkit predicts of it from the
target's own answers to the same prompts, at the engine's gamma. Tokens a pass of the target are
1 + accepted / passes. Intervals are 95 %, over prompts; the difference is paired by prompt, and is
no chance where its interval leaves out 0.

    make engines
    python -m pipelines.distill +experiment=quickstart draft.kind=plain decode.gamma=1 name=plain
    python -m tests.engines.study outputs/engines draftkit/embedded outputs/plain/train/draft \\
        --name embedded

measures the servers that are installed; `python -m tests.engines.pairs FOLDER` makes the pairs
`llama` and `qwen3` (four layers and one, heads of 32 and of 64, briefly trained). Rows of d3751b8
hold as predicted what our decoder counted on the same prompts, and those of transformers and ONNX
Runtime GenAI, which are no servers, were measured by programs of that commit.
"""
NOTES = f"""
vLLM's CPU build 0.32 divides the target's logits of drafted positions by uninitialised memory at
temperatures above 0 (upstream issue 55005), so it accepts too little and its answers are not the
target's; greedy ones are. In rows of the plugin `{PLUGIN}` that one kernel is replaced by
tests/engines/plugins/{PLUGIN}.

`evaluate certify.with=... certify.without=...` sees it. A `llama` target and a disturbed copy of it
that drafts (probabilistic, four proposals, temperature 1; 6,144 answers a server): as shipped it is
not certified (p = 0.001), with the plugin it is (p = 0.92; a bias of 0.041 in total variation would
have been seen). All 24 greedy answers are equal both times. A test marked `engines` repeats it.
"""


def measured(
    engine: str, folder: Path, target: Path, draft: Path, *, plugin: str = "", **changes: Any
) -> Iterator[dict[str, Any]]:
    """A row for each way to draft and temperature, as `measure_engine` finds it.

    changes: other settings of `measure_engine`, with dots as two underscores. Raises ValueError
    where the engine is not installed, or cannot be measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    export_pair(engine, folder, target.absolute(), draft.absolute(), gamma=GAMMA)
    words = [
        *(f"root={folder / 'outputs'}", "overwrite=true", "tracker=none", "evaluate.draft=given"),
        *(f"target.path={target.absolute()}", f"draft.path={draft.absolute()}"),
        *("hardware.device=cpu", "hardware.dtype=float32", "hardware.threads=1"),
        *("data.max_rows=200", "data.domains=[python]", f"evaluate.prompts={PROMPTS}"),
        *(f"evaluate.max_new_tokens={TOKENS}", "sampling.top_k=0", "sampling.top_p=1"),
        *(f"{key.replace('__', '.')}={value}" for key, value in changes.items()),
    ]
    for drafts in DRAFTS[engine]:
        started = Launch(
            folder=folder.absolute(),
            target=target.absolute(),
            gamma=GAMMA,
            drafts=drafts,
            length=LENGTH,
            plugin=plugin,
        )
        with serving(engine, started) as url:
            version = version_of(url)
            for temperature in TEMPERATURES:
                given = [f"engine.url={url}", f"sampling.temperature={temperature:g}"]
                summary = launch(MEASURE_ENGINE, compose_config([*words, *given]))
                (row,) = (one for one in summary["rows"] if one["drafts"] == drafts)
                yield {
                    **{"engine": f"{summary['engine']} {version}", "plugin": plugin},
                    **{"drafts": drafts, "temperature": temperature, "gamma": summary["gamma"]},
                    **{side: rounded(row[side]) for side in ("predicted", "counted", "difference")},
                    **{"prompts": summary["prompts"], "max_new_tokens": TOKENS},
                    **{"machine": machine(gpu=False), "commit": provenance()["git_commit"][:7]},
                }


def rounded(number: dict[str, Any]) -> dict[str, Any]:
    """An estimate as the rows hold it."""
    return {"mean": round(number["mean"], 4), "ci95": [round(one, 4) for one in number["ci95"]]}


def version_of(url: str) -> str:
    """What vLLM says under /version, llama.cpp under /props."""
    version = httpx.get(f"{url}/version", timeout=30)
    if version.is_success:
        return str(version.json()["version"])
    return str(httpx.get(f"{url}/props", timeout=30).json()["build_info"])


def merged(rows: Sequence[dict[str, Any]], newer: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, `newer` ones in the place of those of the same measurement, sorted."""
    both = {tuple(row[key] for key in KEY): row for row in (*rows, *newer)}
    return [both[key] for key in sorted(both)]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page of all rows: in its table a line holds both temperatures."""
    at = [f"T = {one:g}: predicted, counted, difference" for one in TEMPERATURES]
    lines = [["pair", "engine", "drafts", *at, "commit"], ["---"] * 6]
    for _, group in groupby(rows, lambda row: [row[key] for key in KEY[:-1]]):
        pair = sorted(group, key=lambda row: row["temperature"])
        plugin = f", plugin {pair[0]['plugin']}" if pair[0]["plugin"] else ""
        cells = []
        for one in pair:
            numbers = [interval(one[side], 2) for side in ("predicted", "counted")]
            cells.append(", ".join([*numbers, signed(one["difference"])]))
        first = pair[0]
        lines.append([first["pair"], first["engine"] + plugin, first["drafts"], *cells])
        lines[-1].append(first["commit"])
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{ABOUT}\n{table}{NOTES}"


def keep(rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows, a line each, and their page."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_text(ROWS, f"[\n{lines}\n]\n")
    write_text(PAGE, page(rows))


def main() -> None:
    """Measure the engines that are installed, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.study")
    for name in ("folder", "target", "draft"):
        parser.add_argument(name, type=Path)
    parser.add_argument("engines", nargs="*", default=[*DRAFTS])
    parser.add_argument("--plugin", default="", help=f"of vLLM: {PLUGIN}")
    parser.add_argument("--name", required=True, help="of the pair")
    given = parser.parse_intermixed_args()
    for engine in given.engines:
        folder = given.folder / given.name
        try:
            new = [
                {"pair": given.name, **row}
                for row in measured(engine, folder, given.target, given.draft, plugin=given.plugin)
            ]
        except ValueError as error:
            Console(width=80).print(f"{engine}: {error}")
            continue
        keep(merged(read_json(ROWS), new))


if __name__ == "__main__":
    main()
