"""`python -m pipelines.online`: refit the drafter from served traffic.

`online.task`: `daemon` runs beside a server until it is told to stop (and, with
`online.most_updates`, until those are done), `rollback` takes a version back, `serve_and_refit` is
an experiment with a server and a daemon as two processes.
"""

from dataclasses import replace
from typing import Any

from draftkit.config import DRAFTED_NAMES, Config

from .command import run_command
from .experiments.serve_and_refit import serve_and_refit
from .generate import ROLLOUT_SETTINGS
from .plan import Given, StageFolder, Step
from .prepare import check_pair, pair_and_text
from .refitting import daemon, daemon_needs, rollback
from .run import stage

SERVICE = {"daemon": daemon, "rollback": rollback}  # go on for ever, or change what is there


def needs(config: Config) -> dict[str, Given | Step]:
    """The pair, its text and the anchors."""
    return {**pair_and_text(config), **daemon_needs(config)}


@stage(
    sections=(
        "seed",
        "data",
        "sampling",
        "divergence",
        "optim",
        "decode",
        "serve",
        "online",
        "draft.pretrain",
        "draft.lora",
        *ROLLOUT_SETTINGS,
        "evaluate.prompts",
        "evaluate.validation_prompts",
        "evaluate.max_new_tokens",
        "evaluate.batch_size",
    ),
    version=2,
    needs=needs,
    check=check_pair,
    product=None,
)
def online(config: Config, folder: StageFolder) -> dict[str, Any]:
    """The experiment, which is complete one day."""
    return serve_and_refit(config, folder)


def check_drafter(config: Config) -> None:
    """Raise ValueError where `decode.proposer` leaves nothing to refit, or nothing to judge by."""
    proposer = config.decode.proposer
    if config.online.task == "rollback":
        return
    if not config.decode.has_drafter:
        names = ", ".join(DRAFTED_NAMES)
        raise ValueError(f"decode.proposer={proposer} has no drafter to refit: use one of {names}")
    match = config.decode.verification == "match"
    if (proposer == "argmax" or match) and config.online.teacher == "stored":
        key = "decode.verification=match" if match else "decode.proposer=argmax"
        raise ValueError(
            f"{key} needs online.teacher=target: stored scores do not tell how often its proposals"
            " are accepted"
        )


def main() -> None:
    """The command: a service has no folder to be complete, an experiment is a stage."""

    def launch(config: Config, swept: str) -> None:
        check_drafter(config)
        task = SERVICE.get(config.online.task)
        if task is None:
            online.launch(replace(config, job=swept or None))
        else:
            task(config)

    run_command("online", launch)


if __name__ == "__main__":
    main()
