"""Running a plan: what all stages share, so that a stage is one function `run(config, folder)`.

    train = stage(sections=("seed", "optim"), needs=inputs)(run)
    train.step(config)      # in the plan of another stage
    train.main()            # as a command: Hydra, one clear line for bad input, exit code

Steps run in order and never call each other: each is given the folders of its inputs. Relaunching
the same goes on where it stopped, something else is refused. Never sees Hydra.
"""

import gc
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from draftkit.artifacts import provenance, write_json, write_text
from draftkit.config import Config, flatten
from draftkit.distillation.ranks import agree, leave_group
from draftkit.tracking import Tracker
from pipelines.command import disk_is_full, run_command
from pipelines.folder import CONFIG, claim, discard_if_empty, locked, product_digest
from pipelines.plan import (
    MANIFEST,
    NEVER_COUNT,
    SUMMARY,
    Given,
    Run,
    StageFolder,
    Step,
    complete_summary,
    ordered,
    pending,
    settings_of,
    table,
)

POLL_SECONDS = 1.0

Needs = Callable[[Config], Mapping[str, Given | Step]]
After = Callable[[Config, Path], None]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _print(text: str) -> None:
    if _rank() == 0:
        print(text, flush=True)


def tracker_of(config: Config, path: Path, stage_name: str, manifest: Mapping[str, Any]) -> Tracker:
    """The tracker of a stage in `path`, labelled as people look for it."""

    def short(model: str | None) -> str:
        return Path(model).name if model else "embedded"

    tags = {
        "target": short(config.target.path),
        "draft": short(config.draft.path),
        "divergence": config.divergence.name,
        "source": config.source.name,
    }
    return Tracker(
        path,
        mode=config.tracker.mode,
        project=config.tracker.project,
        entity=config.tracker.entity,
        group=config.name,
        job_type=stage_name,
        name="-".join(filter(None, (config.name, stage_name, config.job))),
        tags=[f"{key}={value}"[:64] for key, value in tags.items()],
        config=asdict(config)
        | {"provenance": manifest["provenance"], "inputs": manifest["inputs"]},
    )


def show_plan(name: str, goals: Iterable[Given | Step], redo: str = "") -> None:
    """Print what a command would do."""
    steps = [goal for goal in goals if isinstance(goal, Step)]
    _print(f"{name}: {len(ordered(steps))} steps\n{table(steps, pending(steps, redo))}")


def make_all(name: str, goals: Sequence[Step], *, redo: str = "", mine: str = "") -> bool:
    """Print the plan for `goals` and run what has to; whether anything had to.

    `redo`: the command whose steps run in any case. `mine`: the command whose steps are refused,
    not waited for, where another process is making them.
    """
    to_do = pending(goals, redo)
    if to_do:
        _print(f"{name}: {len(ordered(goals))} steps\n{table(goals, to_do)}")
    for step in to_do:
        if step.check is not None:
            step.check(step.config)
    unchecked = [step for step in to_do if step.check_texts is not None]
    for step in to_do:
        unchecked = [later for later in unchecked if not check_texts(later)]
        run_step(step, overwrite=bool(redo) and step.command == redo, wait=step.command != mine)
    return bool(to_do)


def check_texts(step: Step) -> bool:
    """Whether the text of `step` was there to be checked. Raises ValueError where it is refused."""
    texts = step.needs["texts"]
    if not texts.digest:
        return False
    assert step.check_texts is not None
    step.check_texts(step.config, Path(texts.path))
    return True


def run_step(step: Step, *, overwrite: bool = False, wait: bool = True) -> None:
    """Make the product of one step whose inputs are complete, unless it is there already.

    In a distributed launch the first process makes it, or all do (`step.everywhere`).
    """
    ready = not overwrite and complete_summary(step) is not None
    if step.everywhere:
        ready = agree(ready)
    if ready:
        return
    if _rank() == 0:
        _make(step, overwrite=overwrite, wait=wait)
    elif step.everywhere:
        folder = folder_of(step, Tracker(None), resumed=agree(None), is_main=False)
        _compute(step, folder)
    else:
        while complete_summary(step) is None:  # the launcher ends us if the first process fails
            time.sleep(POLL_SECONDS)


def folder_of(step: Step, tracker: Tracker, *, resumed: bool, is_main: bool = True) -> StageFolder:
    """What the stage of `step` is given."""
    paths = {name: need.path for name, need in step.needs.items()}
    return StageFolder(
        step.folder, tracker, resumed, is_main, step.name, inputs=paths, checksums=step.inputs
    )


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
        "settings": step.settings,
        "inputs": step.inputs,
        "addresses": step.addresses,
        "provenance": origin,
        "resumed": [],
    }
    if stored is not None:
        manifest["resumed"].append(origin)
    write_json(path / MANIFEST, manifest)
    write_text(path / CONFIG, yaml.safe_dump(asdict(step.config), sort_keys=False))
    tracker = tracker_of(step.config, path, step.name, manifest)
    resumed = stored is not None
    if step.everywhere:
        agree(resumed)
    exit_code = 1
    try:
        summary = _compute(step, folder_of(step, tracker, resumed=resumed))
        tracker.summary(summary)
        exit_code = 0
    finally:
        tracker.finish(exit_code)
    if step.product is not None:
        write_json(path / MANIFEST, manifest | {"product": product_digest(path, step.product)})
    write_json(path / SUMMARY, summary)


def _compute(step: Step, folder: StageFolder) -> dict[str, Any]:
    """The stage's own function, seeded; random state outside stays as it was."""
    import torch

    from pipelines.memory import keep_freed_memory

    keep_freed_memory()
    if step.config.hardware.threads is not None:
        torch.set_num_threads(step.config.hardware.threads)
    started = time.perf_counter()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(step.config.seed)
            summary = dict(step.run(step.config, folder))
    finally:
        gc.collect()  # models stand in reference cycles, and the next step needs the memory
        torch.cuda.empty_cache()
    summary.setdefault("seconds", round(time.perf_counter() - started, 2))
    return summary


def products(name: str, needs: Mapping[str, Given | Step]) -> StageFolder:
    """Make what a command needs that has no product of its own; the inputs it is then given."""
    make_all(name, [need for need in needs.values() if isinstance(need, Step)])
    paths = {key: need.path for key, need in needs.items()}
    checksums = {key: need.digest for key, need in needs.items()}
    return StageFolder(Path(), Tracker(None), stage=name, inputs=paths, checksums=checksums)


class Stage:
    """One kind of step, and the command of its name. Make it by the decorator `stage`."""

    def __init__(
        self,
        run: Run,
        *,
        name: str,
        sections: Sequence[str],
        needs: Needs | None,
        after: After | None,
        options: Mapping[str, Any],
    ) -> None:
        known = flatten(Config())
        for section in sections:
            counted = section.split(".")[0] not in NEVER_COUNT
            assert counted, f"{section} is never part of a stage's identity"
            exists = any(key == section or key.startswith(f"{section}.") for key in known)
            assert exists, f"no setting begins with {section}"
        self.run = run
        self.name = name
        self.sections = tuple(sections)
        self._needs = needs
        self._after = after
        self._options = dict(options)

    def step(self, config: Config) -> Step:
        """The stage under `config`, with all that it needs; nothing is made.

        Raises ValueError for settings that do not fit together.
        """
        options: dict[str, Any] = {"command": self.name, **self._options}
        return Step(
            name=self.name,
            config=config,
            settings=settings_of(config, self.sections),
            needs={} if self._needs is None else dict(self._needs(config)),
            run=self.run,
            **options,
        )

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
        if not make_all(self.name, [step], redo=redo, mine=self.name):
            _print(
                f"{self.name}: {step.folder} is complete, nothing to do (overwrite=true redoes it)"
            )
        if _rank() > 0:
            return {}
        summary = complete_summary(step)
        assert summary is not None
        if self._after is not None:
            self._after(config, step.folder)
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


def stage(
    *,
    sections: Sequence[str],
    needs: Needs | None = None,
    after: After | None = None,
    name: str | None = None,
    **options: Any,
) -> Callable[[Run], Stage]:
    """Make a `Stage` of `run(config, folder) -> summary`.

    `sections`: dotted prefixes of the settings that the product depends on (`optim`,
    `target.pretrain`, `seed`); those of `NEVER_COUNT` cannot be. `needs(config)`: inputs by name,
    steps or what is given; it makes nothing. `after(config, path)`: what the command does once the
    folder is complete, also when it already was. `name`: the module's, unless given. `options`:
    `shared` (one folder for all experiments), `product`, `everywhere`, `command`, `check` and
    `check_texts` of `Step`.
    """

    def decorate(run: Run) -> Stage:
        return Stage(
            run,
            name=name or Path(run.__code__.co_filename).stem,
            sections=sections,
            needs=needs,
            after=after,
            options=options,
        )

    return decorate
