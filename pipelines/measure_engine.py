"""`python -m pipelines.measure_engine`: what an engine accepts of the drafter, by its own counters.

Exports the pair, starts the engine on it (`engine=vllm`, `onnx`, `llamacpp` or `transformers`; or
sends to a server that runs, `engine.url=...`), lets it answer held-out prompts with and without the
drafter in turns, and holds its counts against our decoder's on the same prompts, at the same gamma.
Sampling is by temperature alone. What was answered is kept turn by turn, so a kill costs one turn.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from draftkit.artifacts import machine, read_json, write_json
from draftkit.config import Config, ExportConfig
from draftkit.data.prompts import read_splits
from draftkit.decoding.catalogue import PROPOSERS, Material
from draftkit.engines.comparison import Cell, compared, greedy
from draftkit.engines.counts import Answer, OurDecoder
from draftkit.engines.drivers import DRIVERS, Launch, Session, environment_of
from draftkit.engines.tables import measured_lines, measured_table
from draftkit.evaluation.walltime import rotated
from draftkit.models.devices import resolve_device
from draftkit.models.loading import load_draft, load_target, with_path

from .export import PLAIN, export
from .plan import SUMMARY, Given, StageFolder, Step
from .prepare import models
from .run import stage
from .texts import context_of, texts
from .train import train

EXPORTED, WITHOUT = "exported", "plain"
ANSWERS = "answers"  # a folder: what each side answered in each turn
LOG = "engine.log"
REPEATS = 4  # of our decoder for a turn of the engine, so that chance is the engine's alone

Turns = dict[str, list[dict[str, list[Answer]]]]  # by way to draft: a turn, by temperature


class Task(NamedTuple):
    """What every side is to answer."""

    prompts: list[list[int]]
    limit: int  # tokens of an answer
    length: int  # tokens of a text with the proposals beyond its end


def within(config: Config) -> str:
    """Each engine is a measurement of its own, beside the others of the experiment."""
    plugin = f"-{config.engine.plugin}" if config.engine.plugin else ""
    return f"engine={config.engine.name}{plugin}"


def exported(config: Config) -> Step:
    """The pair as the engine loads it, in the precision of the comparison."""
    options, engine = config.engine, DRIVERS[config.engine.name]
    python = engine.program_in(Path(options.environment)) if options.environment else None
    written = ExportConfig(
        engines=[PLAIN if options.url else engine.exports],
        gguf_types=["bf16" if dtype_of(config) == "bfloat16" else "f32"],
        onnx_precision="fp32",
        onnx_python=str(python) if python and options.name == "onnx" else None,
    )
    job = ",".join(filter(None, (config.job, within(config))))
    step = export.step(replace(config, export=written, job=job))
    if "trained" in step.needs:  # of this experiment: another job would train its own
        step.needs["trained"] = train.step(config)
    return step


def dtype_of(config: Config) -> str:
    """Of weights and caches on every side."""
    if config.engine.dtype != "auto":
        return config.engine.dtype
    return "bfloat16" if on_gpu(config) else "float32"


def on_gpu(config: Config) -> bool:
    return resolve_device(config.hardware).type == "cuda"


def ways(config: Config) -> list[str]:
    """How the engine drafts in this measurement."""
    return config.engine.drafts or list(DRIVERS[config.engine.name].drafts)


def needs(config: Config) -> Mapping[str, Given | Step]:
    """The pair, the text, and the exported drafter."""
    return {**models(config), "texts": texts.step(config), EXPORTED: exported(config)}


def check(config: Config) -> None:
    """Raise ValueError for what cannot be measured, before anything is made for it."""
    name, options = config.engine.name, config.engine
    wrong = [way for way in ways(config) if way not in DRIVERS[name].drafts]
    if wrong:
        able = ", ".join(DRIVERS[name].drafts)
        raise ValueError(f"engine.drafts: {name} drafts {able}, not {', '.join(wrong)}")
    if config.proposals == 0:
        raise ValueError("decode.gamma=0 proposes nothing: use 1 or more")
    if options.url is None:
        environment_of(name, options.environment)


def task_of(config: Config, folder: StageFolder) -> Task:
    """The held-out prompts and how far they are continued. Raises ValueError for fewer than 2."""
    examples = read_splits(folder.input("texts")).test[: config.engine.prompts]
    prompts = [list(example.prompt_ids) for example in examples]
    if len(prompts) < 2:
        raise ValueError("data: fewer than 2 held-out prompts: raise data.test_fraction")
    longest, spare = max(map(len, prompts)), config.proposals + 2
    limit = min(config.engine.max_new_tokens, context_of(config) - longest - spare)
    if limit < 2:
        raise ValueError(
            "data.max_prompt_tokens: the models' context leaves no room for an answer behind the "
            "longest prompt: lower it"
        )
    return Task(prompts, limit, longest + limit + spare)


def kept(folder: StageFolder, name: str, make: Callable[[], dict[str, list[Answer]]]) -> Any:
    """The answers of one side in one turn: those that are stored, or what `make` returns."""
    file = folder.path / ANSWERS / f"{name}.json"
    if not file.is_file():
        made = make()
        write_json(file, {key: [vars(one) for one in row] for key, row in made.items()})
    return {key: [Answer(**one) for one in row] for key, row in read_json(file).items()}


def predicted(config: Config, folder: StageFolder, task: Task) -> Turns:
    """Our decoder on the same prompts, in every way in which the engine drafts.

    Sampled texts many times, greedy ones once: these are always the same.
    """
    driver, hardware = DRIVERS[config.engine.name], config.hardware
    turns = REPEATS * config.engine.turns
    todo = [f"ours-{way}-{turn}" for way in ways(config) for turn in range(turns)]
    answered: Turns = {way: [] for way in ways(config)}
    dtype = getattr(torch, dtype_of(config))
    if all((folder.path / ANSWERS / f"{name}.json").is_file() for name in todo):
        side = None
    else:
        target = load_target(folder.model(config, "target"), hardware, dtype=dtype)
        plain = with_path(config.draft, folder.input(EXPORTED) / PLAIN)
        draft = load_draft(plain, target, dtype=dtype)
        side = (target, draft)
    for way in ways(config):
        for turn in range(turns):

            def answers(way: str = way, turn: int = turn) -> dict[str, list[Answer]]:
                assert side is not None
                target, draft = side
                adapter = target.adapter
                material = Material(lambda: draft, list, adapter.vocab_size, adapter.device)
                decoder = OurDecoder(
                    target=adapter,
                    proposer=PROPOSERS[way](material),
                    ends=target.eos_token_ids,
                    gamma=config.proposals,
                    counting=driver.counting,
                    batch_size=config.evaluate.batch_size,
                )
                if turn == 0:
                    folder.note(f"our decoder, {way} drafts, {turns} times")
                temperatures = [t for t in config.engine.temperatures if t > 0 or turn == 0]
                return at_each(temperatures, task, decoder.answers, seed=config.seed + turn)

            answered[way].append(kept(folder, f"ours-{way}-{turn}", answers))
    return answered


def at_each(
    temperatures: Sequence[float], task: Task, answer: Callable[..., list[Answer]], *, seed: int
) -> dict[str, list[Answer]]:
    """What `answer` makes of the prompts at each temperature."""
    return {
        f"{temperature:g}": answer(
            task.prompts, temperature=temperature, limit=task.limit, seed=seed
        )
        for temperature in temperatures
    }


def launch_of(config: Config, folder: StageFolder, task: Task, way: str) -> Launch:
    """How the engine is started for one side."""
    options, target = config.engine, folder.model(config, "target")
    local = Path(target.location).is_dir()
    environment = Path()
    if options.url is None:
        environment = environment_of(options.name, options.environment)
    return Launch(
        folder=folder.input(EXPORTED).absolute(),
        target=str(Path(target.location).absolute()) if local else target.location,
        revision=None if local else target.revision,
        gamma=config.proposals,
        length=task.length,
        dtype=dtype_of(config),
        environment=environment,
        log=folder.path / LOG,
        drafts=None if way == WITHOUT else way,
        threads=config.hardware.threads,
        arguments=options.arguments,
        plugin=options.plugin,
        on_gpu=on_gpu(config),
        url=options.plain_url if way == WITHOUT else options.url,
    )


def counted(config: Config, folder: StageFolder, task: Task) -> tuple[Turns, str]:
    """The engine's answers on each side, in turns, and its version.

    All sides run at once, so that machine and moment are the same for them; one answers at a time.
    """
    options, driver = config.engine, DRIVERS[config.engine.name]
    sides = [*ways(config)]
    if options.url is None or options.plain_url is not None:
        sides.insert(0, WITHOUT)
    answered: Turns = {side: [] for side in sides}
    about = folder.path / ANSWERS / "engine.json"
    with ExitStack() as stack:
        sessions: dict[str, Session] = {}

        def session(side: str) -> Session:
            if side not in sessions:
                folder.note(
                    f"starting {driver.title}, {side} {'' if side == WITHOUT else 'drafts'}"
                )
                launch = launch_of(config, folder, task, side)
                sessions[side] = stack.enter_context(driver.start(launch))
                short = min(task.limit, 2 * config.proposals + 2)
                sessions[side].answers(task.prompts[:1], temperature=0, limit=short, seed=0)
                write_json(about, {"version": sessions[side].version})
            return sessions[side]

        missing = [
            side
            for side in sides
            for turn in range(options.turns)
            if not (folder.path / ANSWERS / f"{side}-{turn}.json").is_file()
        ]
        for side in dict.fromkeys(missing):
            session(side)
        for turn in range(options.turns):
            turned = {}
            for side in rotated(sides, turn):

                def answers(side: str = side, turn: int = turn) -> dict[str, list[Answer]]:
                    folder.note(f"{driver.title}, {side}, turn {turn + 1} of {options.turns}")
                    answer, temperatures = session(side).answers, options.temperatures
                    return at_each(temperatures, task, answer, seed=config.seed + turn)

                turned[side] = kept(folder, f"{side}-{turn}", answers)
            for side in sides:
                answered[side].append(turned[side])
    return answered, read_json(about)["version"]


def cells_of(config: Config, engine: Turns, ours: Turns, documents: list[str]) -> list[Cell]:
    """Each way to draft at each temperature."""

    def at(turns: list[dict[str, list[Answer]]], temperature: float) -> list[list[Answer]]:
        key = f"{temperature:g}"
        return [turn[key] for turn in turns if key in turn]

    return [
        Cell(
            drafts=way,
            temperature=temperature,
            drafted=at(engine[way], temperature),
            plain=at(engine.get(WITHOUT, []), temperature),
            ours=at(ours[way], temperature),
            documents=documents,
        )
        for way in ways(config)
        for temperature in config.engine.temperatures
    ]


def show(config: Config, folder: Path) -> None:
    """Print the table of a complete measurement."""
    summary, console = read_json(folder / SUMMARY), Console(width=80, highlight=False)
    console.print(measured_table(summary))
    for line in measured_lines(summary):
        console.print(line)


@stage(
    sections=("seed", "data", "decode.gamma", "engine"),
    needs=needs,
    check=check,
    within=within,
    product=None,
    after=show,
)
def measure_engine(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Measure both sides, and compare."""
    task, driver = task_of(config, folder), DRIVERS[config.engine.name]
    (folder.path / ANSWERS).mkdir(exist_ok=True)
    ours = predicted(config, folder, task)
    gc.collect()  # models stand in reference cycles, and the engine needs the memory
    torch.cuda.empty_cache()
    engine, version = counted(config, folder, task)
    held_out = read_splits(folder.input("texts")).test[: len(task.prompts)]
    cells = cells_of(config, engine, ours, [example.document for example in held_out])
    return {
        "engine": config.engine.name,
        "title": driver.title,
        "version": version,
        "plugin": config.engine.plugin,
        "pair": config.target.path or "fresh",
        "machine": machine(gpu=on_gpu(config)),
        "threads": config.hardware.threads,
        "dtype": dtype_of(config),
        "gamma": config.proposals,
        "prompts": len(task.prompts),
        "max_new_tokens": task.limit,
        "turns": config.engine.turns,
        "greedy": greedy(cells),
        "cells": compared(cells),
    }


if __name__ == "__main__":
    measure_engine.main()
