"""`python -m tests.engines.study FOLDER TARGET DRAFT [ENGINE ...]`: predicted beside counted.

Starts each engine that is installed (`make engines`) on a pair, lets it answer held-out prompts
with and without the drafter in turns, and holds its counts against our decoder's on the same
prompts, at the same gamma, sampled by temperature alone. FOLDER/ENGINE.json holds each measurement;
`--name PAIR [--note TEXT]` keeps them in docs/results/engines, and writes docs/results/engines.md
of all that lie there. All in float32, as GGUF and ONNX are.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftkit.artifacts import machine, read_json, write_json, write_text
from draftkit.config import HardwareConfig, ModelConfig, SamplingConfig
from draftkit.data.prompts import read_splits
from draftkit.decoding.catalogue import PROPOSERS, Material
from draftkit.engines.folder import write_plain_folder
from draftkit.evaluation.walltime import rotated
from draftkit.models.loading import load_draft, load_target
from pipelines.configuration import compose_config
from pipelines.texts import texts
from tests.engines.comparison import Cell, compared, greedy
from tests.engines.counts import Answer, OurDecoder
from tests.engines.drivers import DRIVERS, Launch, environment_of
from tests.engines.gguf import write_gguf
from tests.engines.onnx import write_onnx_pair
from tests.engines.tables import measured_lines, measured_table, page

GAMMA, PROMPTS, TOKENS, TURNS, TEMPERATURES = 4, 24, 48, 3, (0.0, 1.0)
REPEATS = 4  # of our decoder for a turn of the engine, so that chance is the engine's alone
THREADS, SEED, BATCH = 1, 0, 16
PLAIN = "plain"
RESULTS = Path("docs") / "results"

Turns = dict[str, list[dict[float, list[Answer]]]]  # by way to draft: a turn, by temperature
Prompts = list[list[int]]


def held_out(root: Path, target: Path, draft: Path, count: int) -> tuple[Prompts, list[str]]:
    """Prompts of the corpus, and the document of each."""
    given = [f"{key}.path={path}" for key, path in (("target", target), ("draft", draft))]
    text = ["data.max_rows=200", "data.domains=[python]", "tracker=none"]
    examples = read_splits(texts.ensure(compose_config([f"root={root}", *given, *text]))).test
    return [list(one.prompt_ids) for one in examples[:count]], [
        one.document for one in examples[:count]
    ]


def export_for(engine: str, folder: Path, target: ModelConfig, draft: ModelConfig) -> None:
    """The pair as `engine` loads it: a plain folder, and what is made of it."""
    if not (folder / "hf").is_dir():
        write_plain_folder(draft, target, folder / "hf", gamma=GAMMA, dtype="float32")
    plain = ModelConfig(path=str(folder / "hf"))
    if engine == "llamacpp" and not (folder / "llamacpp").is_dir():
        (folder / "llamacpp").mkdir()
        for key, model in (("target", target), ("draft", plain)):
            write_gguf(model, folder / "llamacpp" / f"{key}-f32.gguf", kind="f32", key=key)
    if engine == "onnx" and not (folder / "onnx").is_dir():
        write_onnx_pair(
            target,
            folder / "hf",
            folder / "onnx",
            python=environment_of("onnx").absolute() / "bin" / "python",
            precision="fp32",
            gamma=GAMMA,
            sampling=SamplingConfig(),
        )


def at_each(
    prompts: Prompts, temperatures: Sequence[float], answer: Callable[..., list[Answer]], turn: int
) -> dict[float, list[Answer]]:
    """What `answer` makes of the prompts at each temperature."""
    return {t: answer(prompts, temperature=t, limit=TOKENS, seed=SEED + turn) for t in temperatures}


def predicted(
    engine: str, folder: Path, target: ModelConfig, prompts: Prompts, temperatures: Sequence[float]
) -> Turns:
    """Our decoder, in every way in which the engine drafts; greedy texts are always the same."""
    driver, hardware = DRIVERS[engine], HardwareConfig(device="cpu", threads=THREADS)
    side = load_target(target, hardware, dtype=torch.float32)
    draft = load_draft(ModelConfig(path=str(folder / "hf")), side, dtype=torch.float32)
    material = Material(lambda: draft, list, side.adapter.vocab_size, side.adapter.device)
    turns: Turns = defaultdict(list)
    for way in driver.drafts:
        decoder = OurDecoder(
            target=side.adapter,
            proposer=PROPOSERS[way](material),
            ends=side.eos_token_ids,
            gamma=GAMMA,
            counting=driver.counting,
            batch_size=BATCH,
        )
        for turn in range(REPEATS * TURNS):
            sampled = [t for t in temperatures if t > 0 or turn == 0]
            turns[way].append(at_each(prompts, sampled, decoder.answers, turn))
    return turns


def counted(
    launches: dict[str, Launch],
    start: Callable[..., Any],
    prompts: Prompts,
    temperatures: Sequence[float],
) -> tuple[Turns, str]:
    """The engine's answers on each side, in turns, and its version.

    All sides run at once, so that machine and moment are the same for them; one answers at a time.
    """
    turns: Turns = defaultdict(list)
    with ExitStack() as stack:
        sessions = {side: stack.enter_context(start(one)) for side, one in launches.items()}
        for session in sessions.values():
            session.answers(prompts[:1], temperature=0, limit=2 * GAMMA + 2, seed=0)
        for turn in range(TURNS):
            for side in rotated([*launches], turn):
                turns[side].append(at_each(prompts, temperatures, sessions[side].answers, turn))
        return turns, sessions[PLAIN].version


def measure(
    engine: str,
    folder: Path,
    target: Path,
    draft: Path,
    *,
    plugin: str | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    count: int = PROMPTS,
) -> dict[str, Any]:
    """One engine on one pair. Raises ValueError where it is not installed, or fails."""
    driver, environment = DRIVERS[engine], environment_of(engine)
    models = [ModelConfig(path=str(path.absolute())) for path in (target, draft)]
    prompts, documents = held_out(folder / "texts", target, draft, count)
    export_for(engine, folder, *models)
    ours = predicted(engine, folder, models[0], prompts, temperatures)
    launches = {
        side: Launch(
            folder=folder.absolute(),
            target=str(target.absolute()),
            gamma=GAMMA,
            length=max(map(len, prompts)) + TOKENS + GAMMA + 2,
            environment=environment,
            log=folder / f"{engine}.log",
            drafts=None if side == PLAIN else side,
            threads=THREADS,
            plugin=plugin,
        )
        for side in (PLAIN, *driver.drafts)
    }
    turns, version = counted(launches, driver.start, prompts, temperatures)

    def at(side: list[dict[float, list[Answer]]], temperature: float) -> list[list[Answer]]:
        return [turn[temperature] for turn in side if temperature in turn]

    cells = [
        Cell(
            drafts=way,
            temperature=temperature,
            drafted=at(turns[way], temperature),
            plain=at(turns[PLAIN], temperature),
            ours=at(ours[way], temperature),
            documents=documents,
        )
        for way in driver.drafts
        for temperature in temperatures
    ]
    about = {"engine": engine, "title": driver.title, "version": version, "plugin": plugin}
    return about | {
        **{"machine": machine(gpu=False), "threads": THREADS, "dtype": "float32", "gamma": GAMMA},
        **{"prompts": len(prompts), "max_new_tokens": TOKENS, "turns": TURNS},
        **{"greedy": greedy(cells), "cells": compared(cells)},
    }


def keep(summary: dict[str, Any], pair: str, note: str, results: Path = RESULTS) -> Path:
    """Store a measurement beside the others, and write the page of all, by pair and engine."""
    plugin = f"-{summary['plugin']}" if summary["plugin"] else ""
    stored = results / "engines"
    stored.mkdir(parents=True, exist_ok=True)
    file = stored / f"{pair}-{summary['engine']}{plugin}.json"
    write_json(file, summary | {"pair": pair, "note": note})
    summaries = [json.loads(file.read_text()) for file in sorted(stored.glob("*.json"))]
    summaries.sort(key=lambda one: ([*DRIVERS].index(one["engine"]), one["plugin"] or ""))
    groups = defaultdict(list)
    for one in summaries:
        groups[one["pair"]].append((one, one["note"]))
    write_text(results / "engines.md", page(dict(sorted(groups.items()))))
    return file


def main() -> None:
    """Measure the engines that are installed, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.study")
    for name in ("folder", "target", "draft"):
        parser.add_argument(name, type=Path)
    parser.add_argument("engines", nargs="*", default=[*DRIVERS])
    parser.add_argument("--plugin", help="of vLLM")
    parser.add_argument("--name", help="of the pair, in docs/results/engines")
    parser.add_argument("--note", default="", help="what to know of these numbers")
    given, console = parser.parse_args(), Console(width=80, highlight=False)
    given.folder.mkdir(parents=True, exist_ok=True)
    for engine in given.engines:
        file = given.folder / f"{engine}{f'-{given.plugin}' if given.plugin else ''}.json"
        try:
            if not file.is_file():
                made = measure(engine, given.folder, given.target, given.draft, plugin=given.plugin)
                write_json(file, made)
        except ValueError as error:
            console.print(f"{engine}: {error}")
            continue
        summary = read_json(file)
        console.print(measured_table(summary))
        for line in measured_lines(summary):
            console.print(line)
        if given.name:
            console.print(str(keep(summary, given.name, given.note)))


if __name__ == "__main__":
    main()
