"""Running a plan: what all stages share, so that a stage is one function `run(config, folder)`.

    train = stage(sections=("seed", "optim"), needs=inputs)(run)
    train.step(config)      # in the plan of another stage
    train.main()            # as a command: Hydra, one clear line for bad input, exit code

Steps run in order and never call each other: each is given the folders of its inputs. Relaunching
the same goes on where it stopped, something else is refused. Never sees Hydra.
"""

import gc
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from draftkit.artifacts import provenance, write_json, write_text
from draftkit.config import Config
from draftkit.distillation.ranks import agree, leave_group, processes
from draftkit.models.devices import resolve_device
from draftkit.models.memory import give_back_freed_memory, keep_freed_memory, reset_peak
from draftkit.tracking import Tracker

from .command import disk_is_full, run_command
from .folder import CONFIG, claim, discard_if_empty, locked, product_digest
from .plan import (
    MANIFEST,
    SUMMARY,
    Given,
    Recipe,
    Run,
    StageFolder,
    Step,
    complete_summary,
    ordered,
    pending,
    refuse_other_processes,
    table,
)
from .weights import on_a_card, refuse_too_large

POLL_SECONDS = 1.0


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _print(text: str) -> None:
    if _rank() == 0:
        print(text, flush=True)


def tracker_of(config: Config, path: Path, stage_name: str, manifest: Mapping[str, Any]) -> Tracker:
    """The tracker of a stage in `path`, labelled as people look for it."""
    tags = {"divergence": config.divergence.name, "source": config.source.name}
    for key, model in (("target", config.target), ("draft", config.draft)):
        tags[key] = Path(model.path).name if model.path else "fresh"
    return Tracker(
        path,
        mode=config.tracker,
        group=config.name,
        job_type=stage_name,
        name="-".join(filter(None, (config.name, stage_name, config.job))),
        tags=[f"{key}={value}"[:64] for key, value in tags.items()],
        config=asdict(config)
        | {"provenance": manifest["provenance"], "inputs": manifest["inputs"]},
    )


def counted(goals: Iterable[Step], to_do: Iterable[Step] = ()) -> str:
    """How many steps a plan has, and how many processes train where that is to do."""
    count, ranks = len(ordered(goals)), processes()
    steps = f"{count} step{'s' * (count != 1)}"
    if any(step.stage.everywhere for step in to_do):
        return f"{steps}, training in {ranks} process{'es' * (ranks != 1)}"
    return steps


def show_plan(name: str, goals: Iterable[Given | Step], redo: str = "") -> None:
    """Print what a command would do, and what weights take on a card that may not be here."""
    steps = [goal for goal in goals if isinstance(goal, Step)]
    to_do = pending(steps, redo)
    _print(f"{name}: {counted(steps, to_do)}\n{table(steps, to_do)}")
    if line := on_a_card(to_do):
        _print(line)


def make_all(name: str, goals: Sequence[Step], *, redo: str = "", mine: str = "") -> bool:
    """Print the plan for `goals` and run what has to; whether anything had to.

    `redo`: the command whose steps run in any case. `mine`: the command whose steps are refused,
    not waited for, where another process is making them.
    """
    to_do = pending(goals, redo)
    if to_do:
        _print(f"{name}: {counted(goals, to_do)}\n{table(goals, to_do)}")
    for step in ordered(goals):
        concerned = step in to_do or step.command == mine
        if step.stage.everywhere and concerned and step.command != redo:
            refuse_other_processes(step)
    for step in to_do:
        if step.stage.check is not None:
            step.stage.check(step.config)
    refuse_too_large(to_do)
    unchecked = list(to_do)
    for step in to_do:
        unchecked = [later for later in unchecked if not check_texts(later)]
        run_step(step, overwrite=bool(redo) and step.command == redo, wait=step.command != mine)
    return bool(to_do)


def check_texts(step: Step) -> bool:
    """Whether the text of `step` was there to be checked. Raises ValueError where it is refused."""
    if step.stage.check_texts is None:
        return True
    texts = step.needs["texts"]
    if texts.digest and (line := step.stage.check_texts(step.config, Path(texts.path))):
        _print(f"{step.name}: {line}")
    return bool(texts.digest)


def run_step(step: Step, *, overwrite: bool = False, wait: bool = True) -> None:
    """Make the product of one step whose inputs are complete, unless it is there already.

    In a distributed launch the first process makes it, or all do (`everywhere`).
    """
    ready = not overwrite and complete_summary(step) is not None
    if step.stage.everywhere:
        ready = agree(ready)
    if ready:
        return
    if step.config.hardware.threads is not None:  # before the records name the machine
        torch.set_num_threads(step.config.hardware.threads)
    if _rank() == 0:
        _make(step, overwrite=overwrite, wait=wait)
    elif step.stage.everywhere:
        resumed = agree(None)
        _compute(step, Tracker(None), resumed=resumed, is_main=False)
    else:
        while complete_summary(step) is None:  # the launcher ends us if the first process fails
            time.sleep(POLL_SECONDS)


def _make(step: Step, *, overwrite: bool, wait: bool) -> None:
    """Lock, claim and run; a refused run that has stored nothing leaves no folder."""
    path = step.folder
    try:
        with locked(path, wait=wait):
            if not overwrite and complete_summary(step) is not None:
                return  # the process that we waited for has made it
            stored, message = claim(step, overwrite=overwrite)
            _print(f"{step.name}: {message or 'running'}")
            try:
                _run_in(step, stored)
            except (ValueError, OSError):
                discard_if_empty(path)
                raise
    except Exception as error:
        if not disk_is_full(error):
            raise
        raise ValueError(
            f"no space left on the device of {path}: free some and run the same command again"
            " (what was complete is intact), or use root=... on another device"
        ) from error


def _run_in(step: Step, stored: dict[str, Any] | None) -> None:
    """Write the records around the computation, the summary last."""
    path, origin = step.folder, provenance()
    manifest = stored or {
        "stage": step.name,
        "experiment": step.config.name,
        "seed": step.config.seed,
        "version": step.stage.version,
        "settings": step.settings,
        "inputs": step.inputs,
        "addresses": step.addresses,
        "provenance": origin,
        "resumed": [],
        **({"processes": processes()} if step.stage.everywhere else {}),
    }
    if stored is not None:
        manifest["resumed"].append(origin)
    write_json(path / MANIFEST, manifest)
    write_text(path / CONFIG, yaml.safe_dump(asdict(step.config), sort_keys=False))
    tracker = tracker_of(step.config, path, step.name, manifest)
    resumed = stored is not None
    if step.stage.everywhere:
        agree(resumed)
    exit_code = 1
    try:
        summary = _compute(step, tracker, resumed=resumed)
        tracker.summary(summary)
        exit_code = 0
    finally:
        tracker.finish(exit_code)
    if step.stage.product is not None:
        made = step.model_digest() if step.stage.product else product_digest(path)
        write_json(path / MANIFEST, manifest | {"product": made})
    write_json(path / SUMMARY, summary)
    if step.stage.discard is not None:
        step.stage.discard(path)


def _compute(
    step: Step, tracker: Tracker, *, resumed: bool, is_main: bool = True
) -> dict[str, Any]:
    """The stage's own function, seeded; random state outside stays as it was."""
    keep_freed_memory()
    reset_peak(resolve_device(step.config.hardware))
    folder = StageFolder(
        step.folder, tracker, stage=step.name, needs=step.needs, resumed=resumed, is_main=is_main
    )
    started = time.perf_counter()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(step.config.seed)
            summary = dict(step.stage.run(step.config, folder))
    finally:
        gc.collect()  # models stand in reference cycles, and the next step needs the memory
        torch.cuda.empty_cache()
        give_back_freed_memory()
    summary.setdefault("seconds", round(time.perf_counter() - started, 2))
    return summary


def peak_memory_bytes() -> int:
    """Peak of this process so far: device memory where it used any, else resident memory."""
    on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return int(on_device) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def products(name: str, needs: Mapping[str, Given | Step]) -> StageFolder:
    """Make what a command needs that has no product of its own; the inputs it is then given."""
    make_all(name, [need for need in needs.values() if isinstance(need, Step)])
    return StageFolder(Path(), Tracker(None), stage=name, needs=needs)


class Stage(Recipe):
    """A recipe, and the command of its name. Make it by the decorator `stage`."""

    def path(self, config: Config) -> Path:
        """The stage folder of `config`, complete or not."""
        return self.step(config).folder

    def ensure(self, config: Config) -> Path:
        """The complete folder: what is missing or stale runs first. `overwrite` does not apply.

        Raises ValueError when the folder was made with other settings.
        """
        step = self.step(config)
        make_all(self.name, [step])
        return step.folder

    def launch(self, config: Config) -> dict[str, Any]:
        """Print the plan, run it, then what follows a launch; the summary. As the command does.

        Raises ValueError, one line, for everything that the user can put right.
        """
        step = self.step(config)
        redo = self.name if config.overwrite else ""
        if config.plan:
            show_plan(self.name, [step], redo)
            return {}
        if config.limit is not None:
            from .dry import dry_run  # which runs the stages that are defined by this module

            dry_run(self.name, [step], config.limit)
            return {}
        if not make_all(self.name, [step], redo=redo, mine=self.name):
            _print(
                f"{self.name}: {step.folder} is complete, nothing to do (overwrite=true redoes it)"
            )
        if _rank() > 0:
            return {}
        summary = complete_summary(step)
        assert summary is not None
        if self.after is not None:
            self.after(config, step.folder)
        return summary

    def main(self) -> None:
        """The command `python -m pipelines.<name>`: see `pipelines/command.py`."""

        def launch(config: Config, job: str) -> None:
            if job:
                _print(f"{self.name}: sweep job {job}")
            self.launch(replace(config, job=job or None))

        try:
            run_command(self.name, launch)
        finally:
            leave_group()


def stage(*, name: str | None = None, **options: Any) -> Callable[[Run], Stage]:
    """Make a `Stage` of `run(config, folder) -> summary`, called after its file unless named.

    `options` are those of `Recipe`.
    """

    def decorate(run: Run) -> Stage:
        return Stage(name=name or Path(run.__code__.co_filename).stem, run=run, **options)

    return decorate
