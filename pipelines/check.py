"""`python -m pipelines.check`: will it fit, and how long will it take? Before anything is trained.

Looks at the pair (`checking.rules`) and at what engines do with its folders (`checking.engines`),
reads the texts, which the run then uses, and probes every step that is to do: a few real steps in a
process of their own (`checking.probes`), for memory and time on this machine. With
`check.device={memory: 80, bandwidth: 3350, flops: 990}` (GB, GB/s, TFLOP/s) no text is read and
nothing is run: bounds from below for that device, from the shapes of the models alone.

Exit code 0: it fits. 2: it does not, with the setting that helps, or an engine that
`check.engines` names refuses the pair.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from draftkit.artifacts import write_text
from draftkit.checking.engines import VERSIONS, Pair, engine_findings
from draftkit.checking.folders import read_pair
from draftkit.checking.rules import WRONG, Finding, findings
from draftkit.checking.shapes import DEMANDS, Demand, TextLengths
from draftkit.config import Config
from draftkit.workflow.progress import duration

from .command import run_command
from .distill import distill
from .evaluate import evaluate
from .folder import CONFIG
from .limits import case_of, gigabytes, lengths_in, remedy, too_large
from .plan import SUMMARY, Step, ordered, pending
from .run import run_step
from .texts import lengths_of, texts

RESULTS, LAST = "results.jsonl", 12  # lines of a failed probe that are shown


def goal_of(config: Config) -> Step:
    """What is to be made: a drafter that is trained and judged, or one that is judged as it is."""
    return (evaluate if config.evaluate.draft == "given" else distill).step(config)


def check(config: Config) -> None:
    """Print what there is to say. Raises ValueError for what does not fit."""
    wrong = say_pair(config)
    refused = say_engines(config)
    if config.check.engines and refused:
        wrong += [f"check.engines: {'; '.join(refused)}"]
    goal = goal_of(config)
    if wrong:
        raise ValueError("; ".join(wrong))
    computed = config.check.device.memory is not None
    if not computed:
        run_step(texts.step(config))
    steps = ordered([goal])
    to_do = pending([goal])
    for step in to_do:
        if step.stage.check is not None:
            step.stage.check(step.config)
    lengths = lengths_in(next(step for step in steps if step.name == "texts"))
    case = case_of(config, lengths or longest(config), here=not computed)
    demands = {step.name: DEMANDS[step.name](case) for step in to_do if step.name in DEMANDS}
    refuse_full_disk(config, demands)
    (computed_table if computed else measured_table)(config, steps, to_do, demands)


def say_pair(config: Config) -> list[str]:
    """Print what there is to say of the pair; return what is wrong with it."""
    wrong = []
    for one in findings(config):
        say(one, 9)
        if one.level == WRONG:
            wrong.append(one.text)
    return wrong


def say_engines(config: Config) -> list[str]:
    """Print what engines do with the pair; return what is wrong with it there."""
    folders = read_pair(config)
    if folders is None:
        return []
    wrong, last = [], ""
    print(_filled(f"engines, and what they do with these folders (by {VERSIONS}):", "", ""))
    pair = Pair(*folders, config.check.tensor_parallel)
    for one in engine_findings(pair, config.check.engines or ()):
        say(replace(one, subject="") if one.subject == last else one, 12)
        last = one.subject
        if one.level == WRONG:
            wrong.append(f"{one.subject}: {one.text}")
    return wrong


def say(one: Finding, width: int) -> None:
    """Print a finding in columns, its subject in one of that width."""
    print(_filled(one.text, f"  {one.level:<5} {one.subject:<{width}} ", " " * (width + 9)))


def _filled(text: str, first: str, other: str) -> str:
    return textwrap.fill(text, 79, initial_indent=first, subsequent_indent=other)


def longest(config: Config) -> TextLengths:
    """Of texts that are not read: all as long as they may get."""
    lengths, data = lengths_of(config), config.data
    prompt, answer = lengths.prompt, lengths.completion
    if data.name == "installed":
        prompt, answer = data.prompt_tokens, lengths.window - data.prompt_tokens
    return TextLengths(prompt, answer, prompt, answer, data.max_rows or 0)


def refuse_full_disk(config: Config, demands: Mapping[str, Demand]) -> None:
    """Raise ValueError where files of the steps would not fit beside each other."""
    needed, root = sum(one.files for one in demands.values()), Path(config.root).absolute()
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ValueError(
            f"drafters and checkpoints take {gigabytes(needed)}, and {gigabytes(free)} are free "
            f"on the device of {there}: use root=... on another device"
        )


def computed_table(
    config: Config, steps: Sequence[Step], to_do: Sequence[Step], demands: Mapping[str, Demand]
) -> None:
    """Bounds from below for `check.device`."""
    device = config.check.device
    assert device.memory is not None
    memory = {name: demand.bytes for name, demand in demands.items()}
    seconds = {name: demand.seconds(device) for name, demand in demands.items()}
    show(steps, to_do, memory, seconds)
    free = device.memory * 1e9
    for name, demand in demands.items():
        if demand.bytes > free:
            raise ValueError(too_large(name, demand, free))
    print(
        f"at least {gigabytes(max(memory.values(), default=0))} of {device.memory:g} GB, and "
        f"{duration(total(to_do, seconds))}: computed from shapes, not run"
    )


def measured_table(
    config: Config, steps: Sequence[Step], to_do: Sequence[Step], demands: Mapping[str, Demand]
) -> None:
    """What the probes of this machine say."""
    names = [*dict.fromkeys(step.name for step in to_do if step.name in DEMANDS)]
    begun, measured, failure = probed(config, names)
    free = begun.get("free", 0)
    memory = {name: one["peak"] - begun["baseline"] for name, one in measured.items()}
    wall = {name: one["wall"] for name, one in measured.items()}
    processor = {name: one["processor"] for name, one in measured.items()}
    show(steps, to_do, memory, wall)
    if failure:
        name = next(name for name in names if name not in measured)
        raise ValueError(
            f"{name} does not fit: {failure} with {gigabytes(free)} free: "
            f"{remedy(demands[name].memory)}; check=off begins anyway"
        )
    seconds = total(to_do, wall) + begun["start"]
    cores = total(to_do, processor) + begun["start"]
    print(
        f"fits: {gigabytes(max(memory.values(), default=0))} of {gigabytes(free)}, about "
        f"{duration(seconds)} ({duration(cores)} of processor time)"
    )


def total(to_do: Sequence[Step], seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(step.name, 0) for step in to_do)


def show(
    steps: Sequence[Step],
    to_do: Sequence[Step],
    memory: Mapping[str, float],
    seconds: Mapping[str, float],
) -> None:
    """Print the plan with what each step takes, at 80 columns."""
    print(f"  {'step':<9} {'':<9} {'memory':>8} {'time':>13}  folder")
    waiting = {step.folder for step in to_do}
    for step in steps:
        state, folder = "complete", step.folder.relative_to(step.config.root)
        room = taken = ""
        if step.folder in waiting:
            state = "to do"
            room = gigabytes(memory[step.name]) if step.name in memory else ""
            taken = duration(seconds[step.name]) if step.name in seconds else ""
        elif not (step.folder / SUMMARY).is_file():
            state = "not needed"
        print(f"  {step.name:<9} {state:<10}{room:>8} {taken:>13}  {folder}"[:80])


def probed(
    config: Config, names: Sequence[str]
) -> tuple[dict[str, float], dict[str, dict[str, float]], str]:
    """What a process that probes the steps of those names says: of its start, and of each.

    The last value tells why it ended early; empty where it did not. Raises ValueError for what it
    refuses, and RuntimeError for a bug.
    """
    with tempfile.TemporaryDirectory(prefix="draftkit-check-") as name:
        folder = Path(name)
        write_config(config, folder / CONFIG)
        code = f"from {__package__}.probing import main; main({str(folder)!r}, {list(names)!r})"
        child = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [*_lines(folder / RESULTS)]
    begun = lines[0] if lines else {}
    measured = {line["step"]: line for line in lines[1:] if "peak" in line}
    refused = next((line["refused"] for line in lines if "refused" in line), "")
    if refused:
        raise ValueError(refused)
    failed = next((line["failed"] for line in lines if "failed" in line), "")
    if child.returncode < 0 and not failed:  # as a control group ends it
        failed = "the system ended the process"
    if child.returncode != 0 and not failed:
        raise RuntimeError("a probe failed:\n" + "\n".join(child.stderr.splitlines()[-LAST:]))
    return begun, measured, failed


def write_config(config: Config, path: Path) -> None:
    """Leave `config` for another process, as a stage does in its folder."""
    write_text(path, yaml.safe_dump(asdict(config), sort_keys=False))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def main() -> None:
    run_command("check", lambda config, job: check(config))


if __name__ == "__main__":
    main()
