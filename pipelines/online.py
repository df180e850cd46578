"""`python -m pipelines.online`: refit the drafter from served traffic.

Runs beside a server until it is told to stop (and, with `online.most_updates`, until those are
done).
"""

from draftkit.config import DRAFTED_NAMES, Config

from .command import run_command
from .refitting import daemon


def check_drafter(config: Config) -> None:
    """Raise ValueError where there is nothing to refit, to learn from, or to judge by."""
    if config.decode.is_lossy:
        raise ValueError(
            "decode.verification=typical is lossy, and a drafter is refitted to be lossless: use "
            "speculative, block or match"
        )
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
    if stored and (proposer == "argmax" or match):
        key = "decode.verification=match" if match else "decode.proposer=argmax"
        raise ValueError(
            f"{key} needs online.teacher=target: stored scores do not tell how often its proposals"
            " are accepted"
        )


def online(config: Config) -> None:
    """Run the daemon. There is one of a service, so the jobs of a sweep run in turn."""
    check_drafter(config)
    daemon(config)


if __name__ == "__main__":
    run_command("online", online)
