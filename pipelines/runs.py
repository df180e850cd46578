"""Finished experiments as `compare` reads them: from their folders, or from Weights & Biases.

Both know the same numbers by the same names, as the tracker flattens a summary (`alpha`,
`alpha/low`). A folder has besides what they are made of, by prompt and by chunk.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from draftkit.artifacts import read_json
from draftkit.config import flatten
from draftkit.evaluation.choice import HYBRID
from draftkit.evaluation.ranking import Difference, Entry
from draftkit.evaluation.walltime import PLAIN
from draftkit.theory.acceptance import Rate
from draftkit.theory.forecast import DEVIATION
from draftkit.theory.speedup import expected_tokens
from draftkit.tracking import FILE_NAME, read_metrics, scalars

from .evaluate import PROMPTS, TIMING
from .product import MANIFEST, SUMMARY
from .stage import CONFIG

TRAIN, EVALUATE = STAGES = ("train", "evaluate")  # that tell of an experiment
REMOTE = "wandb:"
_NOT_SHOWN = ("name", "root", "overwrite", "runs", "tracker", "provenance", "inputs", "job")
_CONTENT = ("target", "data")  # inputs of which the settings do not tell all: a seed makes a target


@dataclass(frozen=True)
class Run:
    """An experiment at one temperature, and how it stands beside others.

    settings: machine and checksums among them. unfinished: stages it waits for. minutes: of
    training. curve: tokens and alpha on validation prompts. entries: by measure, as far as known:
    `alpha`, `gain` of it over the drafter before, `tau` (tokens a pass), and `speedup` (end to end,
    of the drafter's best use). gaps: to the best run by measure, and of alpha to the best run of
    plain training. weights: the checksum of the drafter that was judged.
    """

    name: str
    settings: dict[str, Any]
    unfinished: list[str]
    minutes: float | None = None
    curve: list[tuple[float, float]] = field(default_factory=list)
    label: str = ""
    temperature: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    verdict: str = "no verdict"
    gamma: float | None = None
    cost_ratio: float | None = None
    gaps: dict[str, Difference] = field(default_factory=dict)
    weights: str = ""


def stages_of(folder: Path) -> list[str]:
    """The stages that have begun in the folder of an experiment."""
    return [name for name in STAGES if (folder / name / MANIFEST).is_file()]


def expand(run: str) -> list[Path]:
    """The experiments that `run` stands for: itself, that of a stage, or the jobs of a sweep.

    Raises ValueError when there is no such folder or nothing in it was trained or judged.
    """
    folder = Path(run)
    if not folder.is_dir():
        raise ValueError(f"runs: there is no folder {run}; give experiment folders, outputs/NAME")
    if (folder / MANIFEST).is_file():
        folder = folder.parent
    jobs = [folder] if stages_of(folder) else [*filter(stages_of, sorted(folder.iterdir()))]
    if not jobs:
        raise ValueError(f"runs: {run} holds no train or evaluate folder: run one of them first")
    return jobs


def judged(
    run: Run,
    flat: Mapping[str, Any],
    prompts: Mapping[str, Any] | None = None,
    timing: Mapping[str, Any] | None = None,
) -> Run:
    """The run with what a flattened summary says, and what that is made of where it was kept.

    prompts, timing: of this temperature, as `evaluate` keeps them.
    """
    use = draft = "after" if prompts and "after" in prompts else "given"
    keys = {"alpha": "alpha", "gain": "alpha_gain", "tau": "acceptance_length"}
    keys["speedup"] = "speedup/end_to_end"
    if flat.get("use") == HYBRID:
        use, keys["speedup"] = HYBRID, f"ways/{HYBRID}/speedup/end_to_end"
    rates, texts, timed = {}, "", ""
    if prompts and timing:
        texts, scores, batch = prompts["contexts"], prompts[draft], flat["batch_size"]
        timed = f"{texts} in batches of {batch}"

        def rate(way: str, *columns: str) -> Rate:
            tokens = timing[way]["tokens"]
            counts = [sum(row) for row in zip(*(timing[way][key] for key in columns), strict=True)]
            alone = scores["documents"][: len(tokens)] if batch == 1 else ()
            return Rate.of(zip(tokens, counts, strict=True), alone)

        positions = zip(scores["alpha"], scores["positions"], strict=True)
        rates["alpha"] = (Rate.of(positions, scores["documents"]),)
        rates["tau"] = (rate(draft, "rounds"),)
        rates["speedup"] = tuple(rate(way, "prefill_seconds", "seconds") for way in (use, PLAIN))
    # What a seed does to alpha it does to tokens a pass, and so to their speed.
    alpha, gamma = flat.get("alpha", 0.0), int(flat.get("gamma", 0))
    tau = expected_tokens(alpha, gamma)
    deviations = {"tau": expected_tokens(alpha + DEVIATION, gamma) - tau}
    deviations["speedup"] = flat.get(keys["speedup"], 0.0) * deviations["tau"] / tau
    entries = {}
    for name, key in keys.items():
        if key in flat:
            limits = (flat.get(f"{key}/low", -math.inf), flat.get(f"{key}/high", math.inf))
            same = texts if name == "alpha" else timed
            entries[name] = Entry(
                *(flat[key], *limits, rates.get(name, ()), same),
                weights=run.weights,
                deviation=deviations.get(name, DEVIATION),
            )
    facts = {key: flat[key] for key in ("verdict", "gamma", "cost_ratio") if key in flat}
    return replace(run, temperature=f"{flat.get('temperature', 1):g}", entries=entries, **facts)


def begun(name: str, config: Mapping[str, Any], origin: Mapping[str, Any], **facts: Any) -> Run:
    """A run before it is judged: settings that may differ, the machine, beginnings of checksums.

    origin: `inputs` and `provenance`, as manifests hold them.
    """
    settings = {k: v for k, v in flatten(config).items() if k.split(".")[0] not in _NOT_SHOWN}
    inputs, hardware = origin.get("inputs", {}), origin.get("provenance", {}).get("hardware", {})
    settings |= {f"{key}.sha256": inputs[key][:12] for key in _CONTENT if key in inputs}
    settings |= {f"machine.{key}": value for key, value in hardware.items()}
    weights = str(inputs.get(TRAIN, inputs.get("draft", "")))
    return Run(name=name, settings=settings, weights=weights, **facts)


def read_run(folder: Path) -> list[Run]:
    """The experiment in `folder` at every temperature, or as far as it is finished."""
    stages, trained = stages_of(folder), folder / TRAIN
    last = folder / stages[-1]
    paths = (last / PROMPTS, last / TIMING, last / SUMMARY, trained / SUMMARY)
    prompts, timing, summary, training = (read_json(one) if one.is_file() else {} for one in paths)
    config = last / CONFIG  # a kill may have left none
    settings = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    lines = read_metrics(trained / FILE_NAME)
    tokens = {0: 0.0} | {one["step"]: one["total_tokens"] for one in lines if "total_tokens" in one}
    held_out = [one for one in lines if one["section"] == "validation" and one["step"] in tokens]
    done = [name for name in stages if (folder / name / SUMMARY).is_file()]
    run = begun(
        str(folder),
        settings,
        read_json(last / MANIFEST),
        unfinished=[name for name in dict.fromkeys((*stages, EVALUATE)) if name not in done],
        minutes=training["seconds"] / 60 if "seconds" in training else None,
        curve=[(tokens[one["step"]], one["alpha"]) for one in held_out],
    )
    parts = summary.get("by_temperature", {}).items()
    return [
        judged(run, dict(scalars(part)), prompts.get(at), timing.get(at)) for at, part in parts
    ] or [run]


def read_remote(run: str) -> list[Run]:
    """Evaluations of the W&B group `wandb:[ENTITY/]PROJECT/GROUP`, from its scalars.

    Raises ValueError when W&B cannot be asked or the group has none.
    """
    import wandb

    name = run.removeprefix(REMOTE)
    project, _, group = name.rpartition("/")
    try:
        filters = {"group": group, "jobType": EVALUATE}
        uploaded = list(wandb.Api().runs(project, filters=filters, lazy=False))
    except (wandb.Error, ValueError) as error:
        raise ValueError(f"runs: W&B does not answer for {name} ({error})") from error
    if not uploaded:
        raise ValueError(f"runs: W&B has no evaluation in the group {name}")
    made = []
    for one in uploaded:
        unfinished = [EVALUATE] * (one.state != "finished")
        at = f"{REMOTE}{project}/{one.name}"
        known = begun(at, one.config, one.config, unfinished=unfinished)
        made.append(judged(known, dict(one.summary)))
    return made


def read_runs(runs: list[str]) -> list[Run]:
    """All `runs`, each once, labelled by the last part of its name, of a sweep by values alone.

    Raises ValueError naming the one that cannot be read.
    """
    if not runs:
        raise ValueError("runs must name what to compare: 'runs=[outputs/a,outputs/b]'")
    read: list[Run] = []
    for run in runs:
        if run.startswith(REMOTE):
            read += read_remote(run)
        else:
            read += [one for folder in expand(run) for one in read_run(folder)]
    once = {(run.name, run.temperature): run for run in read}
    names = dict.fromkeys(name for name, _ in once)
    parts = {name: name.rpartition("/")[2].split(",") for name in names}
    short = {name: " / ".join(one.rpartition("=")[2] for one in parts[name]) for name in names}
    unique = {name for name in names if [*short.values()].count(short[name]) == 1}
    labels = {name: short[name] if name in unique else name for name in names}
    return [replace(run, label=labels[run.name]) for run in once.values()]
