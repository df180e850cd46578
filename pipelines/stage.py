"""`@stage`: what all commands share, so that a stage is one function `run(config, folder)`.

    distill = stage(sections=("seed", "data", "optim"), inputs=hashes, after=report)(run)
    distill.main()          # the command: Hydra, one clear line for bad input, exit code
    distill.ensure(config)  # from another stage: the complete folder, made first if missing

A stage is identified by the settings it declares and the hashes of its inputs; relaunching the
same resumes it, something else is refused. This module computes nothing and never sees Hydra.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from draftkit.artifacts import fingerprint, provenance, read_json, write_json, write_text
from draftkit.config import Config, flatten
from draftkit.distillation.ranks import agree, leave_group
from draftkit.tracking import Tracker
from pipelines.command import disk_is_full, run_command
from pipelines.folder import (
    CONFIG,
    MANIFEST,
    SUMMARY,
    Identity,
    StageFolder,
    claim,
    complete_summary,
    discard_if_empty,
    locked,
    product_digest,
    wait_until_complete,
)

__all__ = ["Stage", "StageFolder", "stage"]

NEVER_COUNT = ("name", "root", "overwrite", "runs", "hardware", "tracker")


@dataclass
class _Running:
    """A stage at work in this process, and the seconds that stages it needed have taken."""

    name: str
    upstream_seconds: float = 0.0


_running: ContextVar[tuple[_Running, ...]] = ContextVar("running", default=())
_swept: ContextVar[str] = ContextVar("swept", default="")  # the job's folder in a sweep

Run = Callable[[Config, StageFolder], dict[str, Any]]
Inputs = Callable[[Config], dict[str, str]]
After = Callable[[Config, Path], None]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def tracker_of(
    config: Config, path: Path, stage_name: str, manifest: dict[str, Any], swept: str = ""
) -> Tracker:
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
        name=f"{config.name}-{stage_name}{f'-{swept}' if swept else ''}",
        tags=[f"{key}={value}"[:64] for key, value in tags.items()],
        config=asdict(config)
        | {"provenance": manifest["provenance"], "inputs": manifest["inputs"]},
    )


class Stage:
    """One command of the pipeline. Make it by the decorator `stage`."""

    def __init__(
        self,
        run: Run,
        *,
        name: str,
        sections: Sequence[str],
        shared: bool,
        inputs: Inputs | None,
        after: After | None,
    ) -> None:
        known = flatten(Config())
        for section in sections:
            counted = section.split(".")[0] not in NEVER_COUNT
            assert counted, f"{section} is never part of a stage's identity"
            found = any(key == section or key.startswith(f"{section}.") for key in known)
            assert found, f"no setting begins with {section}"
        self.run = run
        self.name = name
        self.sections = tuple(sections)
        self.shared = shared
        self._inputs = inputs
        self._after = after

    def identity(self, config: Config) -> Identity:
        """Folder, declared settings and input hashes; runs missing upstream stages for the hashes.

        Raises ValueError when an upstream folder was made with other settings.
        """
        settings = {
            key: value
            for key, value in flatten(config).items()
            if any(key == section or key.startswith(f"{section}.") for section in self.sections)
        }
        inputs = self._inputs(config) if self._inputs is not None else {}
        if self.shared:
            mark = fingerprint({"settings": settings, "inputs": inputs})
            path = Path(config.root) / "shared" / self.name / mark
        else:
            path = Path(config.root) / config.name / _swept.get() / self.name
        return Identity(self.name, path, settings, inputs)

    @property
    def is_at_work(self) -> bool:
        """Whether this process is running the stage, and whoever asks is a part of that."""
        return any(running.name == self.name for running in _running.get())

    def path(self, config: Config) -> Path:
        """The stage folder of `config`, complete or not."""
        return self.identity(config).path

    def ensure(self, config: Config) -> Path:
        """The complete folder; where it is missing or stale the stage runs first, and says so.

        `overwrite` does not apply here. In a distributed launch the first rank makes it alone.
        Raises ValueError when the folder was made with other settings.
        """
        identity = self.identity(config)
        if complete_summary(identity) is not None:
            return identity.path
        if _rank() > 0:
            wait_until_complete(identity)
            return identity.path
        running = _running.get()
        if running:
            print(f"{running[-1].name} needs {self.name}: running it first", flush=True)
        else:
            self._print("running")
        started = time.perf_counter()
        self._make(config, identity, overwrite=False, upstream=True)
        if running:
            running[-1].upstream_seconds += time.perf_counter() - started
        return identity.path

    def digest(self, config: Config) -> str:
        """SHA-256 of the complete product (`ensure`s it): what a downstream stage has as input."""
        return read_json(self.ensure(config) / MANIFEST)["product"]

    def launch(self, config: Config) -> dict[str, Any]:
        """Run, resume or find complete, as the command does; then `after`. Returns the summary.

        Raises ValueError, one line, for everything that the user can put right.
        """
        mark = _running.set((_Running(self.name),))
        try:
            identity = self.identity(config)
        finally:
            _running.reset(mark)
        done = None if config.overwrite else complete_summary(identity)
        if agree(done is not None):
            assert done is not None
            where = f"{identity.path} is complete, nothing to do"
            self._print(f"{where} (overwrite=true redoes it)")
        elif _rank() == 0:
            done = self._make(config, identity, overwrite=config.overwrite, upstream=False)
        else:
            resumed = agree(None)
            follower = StageFolder(identity.path, Tracker(None), resumed, False, self.name)
            return self._compute(config, follower)
        if self._after is not None and _rank() == 0:
            self._after(config, identity.path)
        return done

    def _print(self, text: str) -> None:
        if _rank() == 0:
            print(f"{self.name}: {text}", flush=True)

    def _make(
        self, config: Config, identity: Identity, *, overwrite: bool, upstream: bool
    ) -> dict[str, Any]:
        """Lock, claim and run; a refused run that has stored nothing leaves no folder."""
        path = identity.path
        try:
            with locked(path, wait=upstream):
                if upstream and (done := complete_summary(identity)) is not None:
                    return done  # the process that we waited for has made it
                stored, said = claim(identity, overwrite=overwrite)
                if said:
                    self._print(said)
                try:
                    return self._run_in(config, identity, stored, alone=upstream)
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

    def _run_in(
        self, config: Config, identity: Identity, stored: dict[str, Any] | None, *, alone: bool
    ) -> dict[str, Any]:
        """Write the records around the computation, the summary last."""
        path, origin = identity.path, provenance()
        manifest = stored or {
            "stage": self.name,
            "experiment": config.name,
            "seed": config.seed,
            "settings": identity.settings,
            "inputs": identity.inputs,
            "provenance": origin,
            "resumed": [],
        }
        if stored is not None:
            manifest["resumed"].append(origin)
        write_json(path / MANIFEST, manifest)
        write_text(path / CONFIG, yaml.safe_dump(asdict(config), sort_keys=False))
        tracker = tracker_of(config, path, self.name, manifest, _swept.get())
        resumed = stored is not None
        if not alone:
            agree(resumed)
        exit_code = 1
        try:
            summary = self._compute(config, StageFolder(path, tracker, resumed, True, self.name))
            tracker.summary(summary)
            exit_code = 0
        finally:
            tracker.finish(exit_code)
        write_json(path / MANIFEST, manifest | {"product": product_digest(path)})
        write_json(path / SUMMARY, summary)
        return summary

    def _compute(self, config: Config, folder: StageFolder) -> dict[str, Any]:
        """The stage's own function, seeded; random state outside stays as it was."""
        import torch

        from pipelines.memory import keep_freed_memory

        keep_freed_memory()
        if config.hardware.threads is not None:
            torch.set_num_threads(config.hardware.threads)
        me = _Running(self.name)
        mark = _running.set((*_running.get(), me))
        started = time.perf_counter()
        try:
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                torch.manual_seed(config.seed)
                summary = dict(self.run(config, folder))
        finally:
            _running.reset(mark)
            gc.collect()  # models stand in cycles, and the next job of a sweep needs the room
        seconds = time.perf_counter() - started - me.upstream_seconds
        summary.setdefault("seconds", round(seconds, 2))
        return summary

    def main(self) -> None:
        """The command `python -m pipelines.<name>`: see `pipelines/command.py`."""

        def launch(config: Config, swept: str) -> None:
            mark = _swept.set(swept)
            try:
                if swept:
                    self._print(f"sweep job {swept}")
                self.launch(config)
            finally:
                _swept.reset(mark)

        try:
            run_command(self.name, launch)
        finally:
            leave_group()


def stage(
    *,
    sections: Sequence[str],
    shared: bool = False,
    inputs: Inputs | None = None,
    after: After | None = None,
    name: str | None = None,
) -> Callable[[Run], Stage]:
    """Make a `Stage` of `run(config, folder) -> summary`.

    `sections`: dotted prefixes of the settings that the product depends on (`optim`,
    `target.pretrain`, `seed`); `name`, `root`, `hardware` and `tracker` never count.
    `inputs(config)`: name -> sha256 of what it reads, e.g. `{"prepare": prepare.digest(config)}`,
    asked before the run. `after(config, path)`: what the command does once the folder is complete,
    also when it already was; `ensure` skips it. `shared`: one folder for all experiments.
    `name`: the module's, unless given.
    """

    def decorate(run: Run) -> Stage:
        return Stage(
            run,
            name=name or Path(run.__code__.co_filename).stem,
            sections=sections,
            shared=shared,
            inputs=inputs,
            after=after,
        )

    return decorate
