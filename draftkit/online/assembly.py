"""The refit of a route put together: its trainer, its judge, and how they learn and save."""

from dataclasses import replace
from pathlib import Path

from draftkit.config import Config, DraftConfig, OptimConfig
from draftkit.decoding.catalogue import served_mode
from draftkit.distillation.assembly import load_learner, make_trainer
from draftkit.distillation.trainer import Trainer
from draftkit.models.loading import Outline, Target, load_draft, save_draft, with_path
from draftkit.online.buffer import Buffer
from draftkit.online.gate import Judge
from draftkit.online.refit import Anchors, Refit
from draftkit.online.registry import Registry


def make_refit(
    config: Config,
    *,
    route: str,
    start: DraftConfig,
    target: Outline,
    buffer: Buffer,
    registry: Registry,
    anchors: Anchors,
    folder: Path,
) -> Refit:
    """The refit of `route`, as its last update left it in `folder`.

    start: how the drafter of a version is loaded. target: its outline alone where the buffer's
    stored scores stand for it. The registry has a version.
    """
    current = registry.current()
    assert current is not None
    optim = optim_of_update(config)
    # Of the hybrid's proposals, those that the drafter makes are sampled.
    proposer = "sampled" if config.decode.proposer == "hybrid" else config.decode.proposer
    mode = served_mode(replace(config.decode, proposer=proposer)) or "alpha"
    knows = target.adapter if isinstance(target, Target) else None

    def trainer_of(path: Path) -> Trainer:
        draft = load_learner(with_path(start, path), target)
        return make_trainer(config, draft, target, optim=optim)

    return Refit(
        route=route,
        buffer=buffer,
        registry=registry,
        make_trainer=trainer_of,
        save=lambda trainer, path: save_draft(trainer.draft, target.tokenizer, path),
        judge=Judge(
            load_draft(with_path(start, current.path), target),
            knows,
            batch_size=config.evaluate.batch_size,
            acceptance=mode,
        ),
        anchors=anchors,
        settings=config.online,
        folder=folder,
        seed=config.seed,
        stored_at=config.training_temperature if knows is None else None,
    )


def optim_of_update(config: Config) -> OptimConfig:
    """`optim` for updates: the rate falls to 0 in each of them, without a warm-up.

    At a constant rate what is served would be as far from its optimum as the last step was long.
    """
    steps = config.online.steps
    return replace(config.optim, lr_scheduler_type="linear", max_steps=steps, warmup_steps=0)
