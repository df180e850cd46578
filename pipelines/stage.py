"""One stage: its folder is locked, resumed or refused; records come first, the summary last.

    <root>/<name>/<stage>/   config.yaml  manifest.json  metrics.jsonl  the product  summary.json
    <root>/shared/<stage>/<fingerprint>/     the same, for stages that experiments share

`manifest.json` holds the settings and inputs that the product is made of; `summary.json` means
complete. Stages run in order and never call each other: each is given the folders of its inputs.
Relaunching the same goes on where it stopped, something else is refused; a process killed between
any two lines leaves a folder that the next one can use. Never sees Hydra.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml

from draftkit.artifacts import (
    LOCK,
    locked,
    provenance,
    recover,
    recover_tree,
    remove,
    sha256_tree,
    write_json,
    write_text,
)
from draftkit.config import Config, ModelConfig
from draftkit.distillation.ranks import agree, is_first, processes
from draftkit.models.devices import keep_freed_memory, reset_peak, resolve_device
from draftkit.tracking import FILE_NAME, Tracker

from .product import (
    MANIFEST,
    SUMMARY,
    Product,
    Stage,
    changed_inputs,
    complete_summary,
    digest_of_model,
    foreign,
    ordered,
    pending,
    plan,
    stored_manifest,
    table,
)
from .weights import on_a_card, refuse_too_large

CONFIG = "config.yaml"
RECORDS = (CONFIG, MANIFEST, FILE_NAME, SUMMARY, "wandb")
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class StageFolder:
    """What a stage is given: its folder, its tracker, and its inputs by name, made by now.

    inputs, digests: where they lie, and their checksums. Of a distributed launch the first process
    alone writes there.
    """

    path: Path
    tracker: Tracker
    stage: str = ""
    inputs: Mapping[str, Path] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Print one line to the person who started the stage."""
        say(f"{self.stage}: {text}" if self.stage else text)

    def model(self, config: Config, key: str) -> Any:
        """The model of section `key` (`target` or `draft`): as it is given, or as it was made.

        One of the hub at the commit that the plan has seen, whatever is uploaded since.
        """
        section: ModelConfig = getattr(config, key)
        if section.path is None:
            return replace(section, path=str(self.inputs[key]), revision=None)
        name, _, commit = self.digests[key].rpartition("@")
        return replace(section, revision=commit) if name == section.path else section


def module_of(stage: Stage) -> Any:
    """The module whose function of the stage's name makes the product."""
    if isinstance(stage.code, str):
        return import_module(f".{stage.code or stage.name}", __package__)
    return stage.code


def is_record(name: str) -> bool:
    """Whether a name directly inside a stage folder is ours to write and no part of the product."""
    return name in RECORDS or name.startswith(".")


def say(text: str) -> None:
    """Print a line once a launch."""
    if is_first():
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


# A whole plan


def announce(name: str, goals: Sequence[Product], to_do: Sequence[Product]) -> None:
    """Print the stages of a plan, and how many processes train where that is to do."""
    count, ranks = len(ordered(goals)), processes()
    line = f"{name}: {count} step{'s' * (count != 1)}"
    if any(product.stage.everywhere for product in to_do):
        line += f", training in {ranks} process{'es' * (ranks != 1)}"
    say(f"{line}\n{table(goals, to_do)}")


def show_plan(name: str, goals: Sequence[Product], redo: str = "") -> None:
    """Print what a command would do, and what weights take on a card that may not be here."""
    to_do = pending(goals, redo)
    announce(name, goals, to_do)
    if line := on_a_card(to_do):
        say(line)


def checked_plan(name: str, goals: Sequence[Product], redo: str = "") -> list[Product]:
    """What is to do for `goals`, printed. ValueError for what can be refused before it runs."""
    to_do = pending(goals, redo)
    if to_do:
        announce(name, goals, to_do)
    for product in to_do:
        refuse = getattr(module_of(product.stage), "check", None)
        if refuse is not None:
            refuse(product.config)
    refuse_too_large(to_do)
    return to_do


def make_all(name: str, goals: Sequence[Product], *, redo: str = "", mine: str = "") -> bool:
    """Print the plan for `goals` and make what is missing or stale; whether anything was.

    `redo`: the command whose stages run in any case. `mine`: the command whose stages are refused,
    not waited for, where another process is making them.
    """
    to_do = checked_plan(name, goals, redo)
    for product in to_do:
        overwrite = bool(redo) and product.command == redo
        make(product, overwrite=overwrite, wait=product.command != mine)
    return bool(to_do)


def ensure(stage: Stage, config: Config) -> Path:
    """The complete folder: what is missing or stale is made first. `overwrite` does not apply.

    Raises ValueError when the folder was made with other settings.
    """
    product = plan(stage, config)
    make_all(stage.name, [product])
    return product.folder


def inputs_of(stage: Stage, config: Config) -> StageFolder:
    """The inputs of a service, which has no product of its own, made where they are missing."""
    service = plan(stage, config)
    make_all(stage.name, service.made())
    return StageFolder(
        Path(), Tracker(None), stage=stage.name, inputs=service.paths, digests=service.digests
    )


# One product


def make(product: Product, *, overwrite: bool = False, wait: bool = True) -> None:
    """Make one product whose inputs are complete, unless it is there already.

    In a distributed launch the first process makes it, or all do (`Stage.everywhere`).
    """
    ready = not overwrite and complete_summary(product) is not None
    if product.stage.everywhere:
        ready = agree(ready)
    if ready:
        return
    if product.config.hardware.threads is not None:  # before the records name the machine
        torch.set_num_threads(product.config.hardware.threads)
    if not is_first():
        if product.stage.everywhere:
            agree(None)
            _compute(product, Tracker(None))
            return
        while complete_summary(product) is None:  # the launcher ends us if the first process fails
            time.sleep(POLL_SECONDS)
        return
    path = product.folder
    with locked(path, wait=say if wait else None):
        if not overwrite and complete_summary(product) is not None:
            return  # the process that we waited for has made it
        stored, message = _claim(product, overwrite=overwrite)
        say(f"{product.name}: {message or 'running'}")
        try:
            _run(product, stored)
        except (ValueError, OSError):  # a refused run that has stored nothing leaves no folder
            if all(is_record(child.name) for child in path.iterdir()):
                remove(path)
                if not any(path.parent.iterdir()):
                    path.parent.rmdir()
            raise


def _claim(product: Product, *, overwrite: bool) -> tuple[dict[str, Any] | None, str]:
    """Make the locked folder usable: its manifest if an interrupted run goes on, and what was done.

    The second value is a line for the person, or empty. Raises ValueError when the folder was made
    with other settings (unless `overwrite`), or holds the files of somebody else.
    """
    path = product.folder
    recover(path)
    recover_tree(path)
    if not (path / MANIFEST).is_file():
        strangers = sorted({child.name for child in path.iterdir()} - {*RECORDS, LOCK})
        if strangers:
            raise foreign(product, strangers[0])
        return None, ""
    stored = stored_manifest(product, overwrite=overwrite)
    if stored is None or overwrite:
        _clear(product)
        return None, f"redoing {path} (overwrite=true)" if overwrite else ""
    if changed := changed_inputs(product, stored):
        _clear(product)
        return None, f"{path} is stale, redoing it (changed: {', '.join(sorted(changed))})"
    before, launched = stored["processes"], processes()
    if product.stage.everywhere and before != launched:
        # Each brings rows of its own to a step, so another number is another training.
        raise ValueError(
            f"{path} was begun with {before} processes, and this launch has {launched}, whose "
            f"steps have other rows: launch {before}, use name=... for another experiment, or "
            f"`draftkit {product.command} ... overwrite=true` to redo this one"
        )
    return stored, f"going on in {path}"


def _clear(product: Product) -> None:
    """Empty the folder but for its lock. A kill inside leaves a manifest that says so."""
    path = product.folder
    remove(path / SUMMARY)
    write_json(path / MANIFEST, {"stage": product.name, "cleared": True})
    for child in [*path.iterdir()]:
        if child.name not in (LOCK, MANIFEST):
            remove(child)


def _run(product: Product, stored: dict[str, Any] | None) -> None:
    """Write the records around the computation, the summary last."""
    path, stage, config, origin = product.folder, product.stage, product.config, provenance()
    manifest = stored or {
        "stage": product.name,
        "experiment": config.name,
        "seed": config.seed,
        "version": stage.version,
        "settings": product.settings,
        "inputs": product.digests,
        "addresses": product.addresses,
        "provenance": origin,
        "processes": processes(),
        "resumed": [],
    }
    if stored is not None:
        manifest["resumed"].append(origin)
    write_json(path / MANIFEST, manifest)
    write_text(path / CONFIG, yaml.safe_dump(asdict(config), sort_keys=False))
    tracker = tracker_of(config, path, product.name, manifest)
    if stage.everywhere:
        agree(None)  # on that the folder is claimed: the others begin
    exit_code = 1
    try:
        summary = _compute(product, tracker)
        tracker.summary(summary)
        exit_code = 0
    finally:
        tracker.finish(exit_code)
    if stage.product is not None:
        made = sha256_tree(path, skip=is_record)
        if stage.product:
            made = digest_of_model(product.path, config.root)
        write_json(path / MANIFEST, manifest | {"product": made})
    write_json(path / SUMMARY, summary)
    for pattern in stage.scratch:
        for file in path.glob(pattern):
            file.unlink()


def _compute(product: Product, tracker: Tracker) -> dict[str, Any]:
    """The stage's own function, seeded; random state outside stays as it was."""
    keep_freed_memory()
    reset_peak(resolve_device(product.config.hardware))
    name = product.name
    folder = StageFolder(product.folder, tracker, name, product.paths, product.digests)
    started = time.perf_counter()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(product.config.seed)
            summary = dict(getattr(module_of(product.stage), name)(product.config, folder))
    finally:
        gc.collect()  # models stand in reference cycles, and the next stage needs the memory
        torch.cuda.empty_cache()
    summary.setdefault("seconds", round(time.perf_counter() - started, 2))
    return summary
