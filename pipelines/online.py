"""`python -m pipelines.online`: refit the drafter from served traffic.

Runs beside a server until it is told to stop (and, with `online.most_updates`, until those are
done).
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from draftkit.artifacts import locked, provenance, write_json
from draftkit.config import DRAFTED_NAMES, Config
from draftkit.data.rollouts import read_parts
from draftkit.distillation.remote import RemoteTarget
from draftkit.evaluation.page import REPORT
from draftkit.online.daemon import Daemon
from draftkit.online.page import ServicePage
from draftkit.online.refit import Anchors, Refit, Update, make_refit

from .command import run_command
from .contexts import check_teacher, read_contexts, teaching_target
from .plan import ONLINE
from .prepare import check_pair
from .product import SUMMARY, plan
from .push import bringing, check_pushed, let_go_on
from .service import (
    SERVER,
    STATE,
    buffer_of,
    checksums_of,
    clear_service,
    daemon_folder,
    seeded_registry,
    service_folder,
)
from .stage import StageFolder, inputs_of, show_plan, tracker_of

NICE = 10  # what serves comes first


def check_drafter(config: Config) -> None:
    """Raise ValueError where there is nothing to refit, to learn from, or to judge by."""
    if config.decode.is_lossy:
        raise ValueError(
            "decode.verification=typical is lossy, and a drafter is refitted to be lossless: use "
            "speculative, block or match"
        )
    _ = config.training_temperature  # which refuses a divergence that has no use when greedy
    proposer, stored = config.decode.proposer, config.online.teacher == "stored"
    if not config.decode.has_drafter:
        names = ", ".join(DRAFTED_NAMES)
        raise ValueError(f"decode.proposer={proposer} has no drafter to refit: use one of {names}")
    if stored and config.online.buffer.top_k == 0:
        raise ValueError(
            "online.teacher=stored learns from the scores in the buffer: set online.buffer.top_k "
            "above 0, or online.teacher=target"
        )
    if stored and config.draft.is_head:
        raise ValueError(
            f"draft.kind={config.draft.kind} needs online.teacher=target: a head reads the target's"
            " hidden states, and no record has them"
        )
    match = config.decode.verification == "match"
    if (stored or config.scored_by_engine) and (proposer == "argmax" or match):
        key = "decode.verification=match" if match else "decode.proposer=argmax"
        raise ValueError(
            f"{key} needs the target's weights (online.teacher=target without target.urls): scores "
            "of its likeliest ids do not tell how often such proposals are accepted"
        )


def online(config: Config) -> None:
    """Refit until told to stop. There is one daemon of a service: the jobs of a sweep run in turn.

    Raises ValueError for a drafter that cannot be refitted, and where a daemon runs already.
    """
    check_drafter(config)
    check_pushed(config)
    if config.plan:
        return show_plan("online", plan(ONLINE, config).made())
    os.nice(NICE)
    if config.hardware.threads is not None:
        torch.set_num_threads(config.hardware.threads)
    folder, stop = service_folder(config), Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # From a thread of its own: the main one may hold the lock of `stop` as it is interrupted.
        signal.signal(number, lambda *_: Thread(target=stop.set).start())
    with locked(folder / STATE):
        watch(config, folder, stop)
    why = "told to stop" if stop.is_set() else "all updates done"
    print(f"online: {why}; as a page: {folder / REPORT}", flush=True)


def watch(config: Config, folder: Path, stop: Event) -> None:
    """Load what refitting needs, and run the loop; with `overwrite` from an empty folder on."""
    check_pair(config)
    check_teacher(config, learns=config.online.teacher == "target")
    let_go_on(config)
    made = inputs_of(ONLINE, config)
    fingerprints = checksums_of(config, made)
    if config.overwrite:
        print(f"online: clearing {folder} (overwrite=true)", flush=True)
        clear_service(config, SERVER)
    buffer = buffer_of(config, fingerprints)
    target = teaching_target(config, made, stored=config.online.teacher == "stored")
    anchors = load_anchors(config, made)
    if isinstance(target, RemoteTarget):
        anchors = replace(anchors, held_out=target.scored(anchors.held_out))
    start = made.model(config, "draft")
    refits = [
        make_refit(
            config,
            route=route,
            start=start,
            target=target,
            buffer=buffer,
            registry=seeded_registry(config, route, start, target, fingerprints),
            anchors=anchors,
            folder=folder / STATE / route,
        )
        for route in config.online.routes
    ]
    account = daemon_folder(config)
    tracker = tracker_of(config, account, "online", {"provenance": provenance(), "inputs": {}})

    def note() -> None:
        write_json(account / SUMMARY, summary_of(refits))

    def begin(refit: Refit) -> None:
        print(
            f"online: {refit.route} learns: {config.online.steps} steps on {refit.new_records()} "
            "new records and older ones, then the gate",
            flush=True,
        )

    def log(refit: Refit, update: Update) -> None:
        section = "online" if len(refits) == 1 else f"online_{refit.route}"
        verdict = update.verdict
        numbers = {
            "loss": update.loss,
            "alpha_before": verdict.before.mean,
            "alpha_after": verdict.after.mean,
            "gain": verdict.gain.mean,
            "records": update.records,
            "tokens": update.tokens,
            "seconds": update.seconds,
            "published": float(update.version is not None),
        }
        if (served := refit.registry.served()) is not None:
            numbers["version_served"] = float(served.removeprefix("v"))
        if verdict.anchor_change is not None:
            numbers["anchor_change"] = verdict.anchor_change.mean
        tracker.log(section, update.number, numbers)
        outcome = f"published {update.version}" if update.version else "not published"
        print(
            f"online: {refit.route} update {update.number}: {update.records} new records, "
            f"{update.seconds:.1f} s, {outcome}: {verdict.reason}",
            flush=True,
        )
        note()

    page = ServicePage(config.name, folder, refits, buffer)
    try:
        registries = [refit.registry for refit in refits]
        with bringing(config, made, target, registries, note) as bring:
            loop = Daemon(refits, buffer, config.online, log, page.refresh, stop, bring, begin)
            least = config.online.min_records
            print(f"online: watching {folder}: an update takes {least:,} new records", flush=True)
            loop.run()
            note()
    finally:
        tracker.finish()
        buffer.close()


def load_anchors(config: Config, made: StageFolder) -> Anchors:
    """Answers of the target to prompts of `data`: some to mix in, held-out ones for the gate."""
    options = config.online
    train = made.inputs.get("scores") or made.inputs.get("generate")
    if train is None:
        return Anchors()
    held_out = read_contexts(made.inputs.get("contexts", train), "validation")
    mixed_in = read_parts(train) if options.anchor_fraction > 0 else ()
    return Anchors(mixed_in, held_out[: options.gate.anchors])


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
        "version_served": {refit.route: refit.registry.served() for refit in refits},
        "records_seen": sum(refit.state["records"] + refit.new_records() for refit in refits),
        "recovered_fraction": None,
        "anchor_alpha_change": {refit.route: refit.state["anchor_change"] for refit in refits},
    }


if __name__ == "__main__":
    run_command("online", online)
