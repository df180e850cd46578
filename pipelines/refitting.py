"""The daemon's side of a service: what it loads, its trainers, its judge, what it tells."""

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import torch

from draftkit.artifacts import provenance, write_json
from draftkit.config import Config, OptimConfig
from draftkit.distillation.trainer import Trainer
from draftkit.evaluation.judge import SERVED_ALPHA
from draftkit.models.loading import (
    Outline,
    Target,
    load_draft,
    load_outline,
    load_target,
    outline_of,
    save_model,
    with_path,
)
from draftkit.online.daemon import Daemon
from draftkit.online.gate import Judge
from draftkit.online.refit import Anchors, Refit, Update
from pipelines.contexts import contexts, read_contexts
from pipelines.fitting import Models, load_learner, make_trainer
from pipelines.folder import SUMMARY, locked
from pipelines.generate import generate, read_rollouts
from pipelines.inputs import draft_of, model_hashes
from pipelines.scores import read_scores, read_validation, scores
from pipelines.service import (
    SERVER,
    STATE,
    buffer_of,
    clear_service,
    daemon_folder,
    registry_of,
    seeded_registry,
    service_folder,
)
from pipelines.stage import tracker_of
from pipelines.target import target_of


def rollback(config: Config) -> None:
    """Make another version of a route current; the server takes it at its next look."""
    options = config.online
    registry = registry_of(config, options.route)
    version = registry.rollback(options.version, reason="by command")
    print(f"online: {options.route} is back at {version.name}")


def daemon(config: Config) -> None:
    """Refit until told to stop. Raises ValueError where a daemon of this service runs already."""
    os.nice(config.online.nice)
    if config.hardware.threads is not None:
        torch.set_num_threads(config.hardware.threads)
    folder = service_folder(config)
    stop, heard = Event(), []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        stop.set()

    previous = {name: signal.signal(name, hear) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        with locked(folder / STATE, wait=False):
            watch(config, folder, stop)
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
    print("online: told to stop" if heard else "online: all updates done", flush=True)


def watch(config: Config, folder: Path, stop: Event) -> None:
    """Load what refitting needs, and run the loop; with `overwrite` from an empty folder on."""
    fingerprints = model_hashes(config)
    if config.overwrite:
        print(f"online: clearing {folder} (overwrite=true)", flush=True)
        clear_service(config, SERVER)
    buffer = buffer_of(config, fingerprints)
    target, outline = load_teacher(config)
    anchors = load_anchors(config)
    refits = [
        make_refit(config, route, target, outline, anchors, fingerprints)
        for route in config.online.routes
    ]
    place = daemon_folder(config)
    tracker = tracker_of(config, place, "online", {"provenance": provenance(), "inputs": {}})

    def log(refit: Refit, update: Update) -> None:
        section = "online" if len(refits) == 1 else f"online_{refit.route}"
        tracker.log(section, update.number, numbers_of(refit, update))
        print(f"online: {said(refit, update)}", flush=True)
        write_json(place / SUMMARY, summary_of(refits))

    loop = Daemon(refits, buffer=buffer, settings=config.online, log=log, stop=stop)
    print(f"online: watching {folder}", flush=True)
    try:
        loop.run()
        write_json(place / SUMMARY, summary_of(refits))
    finally:
        tracker.finish()
        buffer.close()


def load_teacher(config: Config) -> tuple[Target | None, Outline]:
    """The target, where the buffer's stored scores shall not stand for it."""
    named = target_of(config)
    if config.online.teacher == "target":
        target = load_target(named, config.hardware)
        return target, outline_of(target)
    if config.online.buffer.top_k == 0:
        raise ValueError(
            "online.teacher=stored learns from the scores in the buffer: set online.buffer.top_k "
            "above 0, or online.teacher=target"
        )
    return None, load_outline(named, config.hardware)


def load_anchors(config: Config) -> Anchors:
    """Answers of the target to prompts of `data`: some to mix in, held-out ones for the gate."""
    options = config.online
    if options.anchor_fraction == 0 and options.gate.anchors == 0:
        return Anchors()
    if options.teacher == "target":
        train = read_rollouts(generate.ensure(config))
        held_out = read_contexts(contexts.ensure(config), "validation")
    else:
        stored = replace(
            config,
            source=replace(config.source, name="target"),
            generate=replace(config.generate, top_k=options.buffer.top_k),
        )
        folder = scores.ensure(stored)
        train, held_out = read_scores(folder), read_validation(folder)
    return Anchors(
        train if options.anchor_fraction > 0 else (), list(held_out[: options.gate.anchors])
    )


def make_refit(
    config: Config,
    route: str,
    target: Target | None,
    outline: Outline,
    anchors: Anchors,
    fingerprints: Mapping[str, str],
) -> Refit:
    """The refit of one route, as its last update left it."""
    registry = seeded_registry(config, route, outline, fingerprints)
    start = draft_of(config)

    def trainer_of(folder: Path) -> Trainer:
        draft = load_learner(config, with_path(start, folder), outline)
        return make_trainer(config, Models(target, outline, draft), optim_of_update(config))

    current = registry.current()
    assert current is not None
    return Refit(
        route=route,
        buffer=buffer_of(config, fingerprints),
        registry=registry,
        make_trainer=trainer_of,
        save=partial(save_trained, outline),
        judge=Judge(
            load_draft(with_path(start, current.path), outline),
            target.adapter if target else None,
            batch_size=config.evaluate.batch_size,
            acceptance=SERVED_ALPHA.get(config.decode.proposer, "alpha"),
        ),
        anchors=anchors,
        settings=config.online,
        folder=service_folder(config) / STATE / route,
        gamma=config.decode.gamma,
        seed=config.seed,
        stored_at=None if target else config.training_temperature,
    )


def optim_of_update(config: Config) -> OptimConfig:
    """`optim` for updates: the rate falls to 0 in each of them, without a warm-up.

    At a constant rate what is served would be as far from its optimum as the last step was long.
    """
    steps = config.online.steps
    return replace(config.optim, lr_scheduler_type="linear", max_steps=steps, warmup_steps=0)


def save_trained(outline: Outline, trainer: Trainer, folder: Path) -> None:
    """Write the trained draft as a folder that serving can load."""
    draft = trainer.draft
    save_model(draft.model, outline.tokenizer, folder, kept_ids=draft.kept_ids)


def numbers_of(refit: Refit, update: Update) -> dict[str, float]:
    """What is logged of an update."""
    change = update.verdict.anchor_change
    return {
        "loss": update.loss,
        "alpha_before": update.before.mean,
        "alpha_after": update.after.mean,
        "gain": update.verdict.gain.mean,
        "records": update.records,
        "tokens": update.tokens,
        "seconds": update.seconds,
        "published": float(update.version is not None),
        "seconds_spent": refit.state["seconds"],
        "seconds_saved": refit.seconds_saved(),
        **({} if change is None else {"anchor_change": change.mean}),
    }


def said(refit: Refit, update: Update) -> str:
    """An update in one line."""
    outcome = f"published {update.version}" if update.version else "not published"
    return (
        f"{refit.route} update {update.number}: {update.records} new records, "
        f"{update.seconds:.1f} s, {outcome}: {update.verdict.reason}"
    )


def summary_of(refits: Sequence[Refit]) -> dict[str, Any]:
    """Totals so far: the keys of `online`'s summary, over all routes."""
    states = [refit.state for refit in refits]
    published = sum(len(state["chosen"]) for state in states)
    return {
        "versions_published": published,
        "versions_rejected": sum(state["update"] for state in states) - published,
        "alpha_by_version": {
            f"{refit.route}/{name}": refit.state["alphas"].get(name)
            for refit in refits
            for name in refit.state["chosen"]
        },
        "records_seen": sum(refit.records_seen() for refit in refits),
        "recovered_fraction": None,
        "anchor_alpha_change": {refit.route: refit.state["anchor_change"] for refit in refits},
        "seconds_spent": sum(state["seconds"] for state in states),
        "seconds_saved": sum(refit.seconds_saved() for refit in refits),
        "tokens_spent": sum(state["tokens"] for state in states),
    }
