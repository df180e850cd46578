"""From a configuration to a fitted drafter: teacher, texts, validation, and the learning rate."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config, ModelConfig, OptimConfig
from draftkit.distillation.loop import Outcome, Progress, train
from draftkit.distillation.sources import Shard, Source
from draftkit.distillation.teacher import StoredTeacher, TargetTeacher, Teacher
from draftkit.distillation.trainer import Trainer, learning_rate_for
from draftkit.evaluation.alpha import estimates, score_contexts, score_stored
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import (
    Outline,
    Target,
    load_draft,
    load_outline,
    load_target,
    outline_of,
)
from draftkit.models.lora import with_lora
from draftkit.models.sharding import shard_layers
from pipelines.contexts import contexts, read_contexts
from pipelines.inputs import models
from pipelines.progress import progress
from pipelines.scores import read_validation, scores
from pipelines.sources import make_source
from pipelines.stage import StageFolder, agree

TRAIN = "train"  # what metrics of the run itself are called
TRIALS = "rates"  # folder of the runs that choose a rate
TRIAL_SHARE = 4  # they take a quarter of the steps


@dataclass(frozen=True)
class Models:
    """What training has in memory: the target only where its scores are not stored."""

    target: Target | None
    outline: Outline
    draft: CausalAdapter


class TrainingFailed(ValueError):
    """A step could not be taken: the loss was not finite, or no token counted."""


def load_models(config: Config) -> Models:
    """The pair, the draft in float32, with updates to train where LoRA is asked for."""
    target_config, draft_config = models(config)
    target = None
    if config.generate.top_k == 0:
        target = load_target(target_config, config.hardware)
    outline = outline_of(target) if target else load_outline(target_config, config.hardware)
    return Models(target, outline, load_learner(config, draft_config, outline))


def load_learner(config: Config, start: ModelConfig, outline: Outline) -> CausalAdapter:
    """The draft of `start`, in float32 and with all that `draft` says of how it learns."""
    loaded = load_draft(start, outline, dtype=torch.float32)
    draft = with_lora(loaded, config.draft.lora, seed=config.seed)
    if config.draft.freeze_head:
        head: Any = draft.model.get_output_embeddings()
        head.requires_grad_(False)
    if config.optim.activation_checkpointing:
        checkpoint_activations(draft.model)
    return draft


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let the backward pass of `model` make its activations again instead of keeping them."""
    # Later transformers have another name for it, and warn of the older.
    name = "activation_checkpointing_enable"
    enable: Any = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def make_trainer(config: Config, loaded: Models, optim: OptimConfig) -> Trainer:
    """The trainer of the draft towards whoever knows what the target says."""
    target, outline, divergence = loaded.target, loaded.outline, config.divergence
    teacher: Teacher | None = TargetTeacher(target.adapter) if target else StoredTeacher()
    reference = None
    if divergence.reference is not None:
        reference = load_draft(ModelConfig(path=divergence.reference), outline)
    trainer = Trainer(
        loaded.draft,
        teacher if divergence.names != {"next_token"} else None,
        optim=optim,
        divergence=divergence,
        sampling=config.sampling,
        temperature=config.training_temperature,
        autocast=outline.dtype if outline.dtype != torch.float32 else None,
        reference=reference,
        compiled=config.optim.compiles,
        seed=config.seed,
    )
    if config.hardware.shard_target and target:  # not before the processes know each other
        shard_layers(target.adapter.model)
    return trainer


def validation_alpha(
    config: Config,
    target: Target | None,
    draft: CausalAdapter,
    folder: StageFolder,
    section: str = "validation",
) -> Callable[[int], float]:
    """A function that measures what chooses the weights on the validation contexts: alpha.

    It is logged as `section`. For `ce_argmax`, whose drafts propose their argmax, it is the
    acceptance of that. Without a target, from its stored scores: then alpha counts what is
    certain, and the most that may be missing is logged beside it.
    """
    options = {"sampling": config.sampling, "batch_size": config.evaluate.batch_size}
    if target is None:
        records = read_validation(scores.ensure(config))
    else:
        records = read_contexts(contexts.ensure(config), "validation")

    def measure(step: int) -> float:
        metrics: dict[str, float] = {}
        if target is None:
            scored, missing = score_stored(draft, records, **options)
            metrics["alpha_error_bound"] = float(missing.sum() / scored.counts.sum())
        else:
            scored = score_contexts(target.adapter, draft, records, **options)
        found = estimates(scored, seed=config.seed, resamples=config.evaluate.bootstrap)
        alpha = found["alpha"]
        metrics |= {"alpha": alpha.mean, "low": alpha.low, "high": alpha.high}
        chosen = found.get(chosen_by(config), alpha).mean
        if chosen != alpha.mean:
            metrics[chosen_by(config)] = chosen
        folder.tracker.log(section, step, metrics)
        return chosen

    return measure


def chosen_by(config: Config) -> str:
    """The acceptance mode in which a draft of this objective is served."""
    return "alpha_greedy_draft" if config.divergence.names == {"ce_argmax"} else "alpha"


def run(config: Config, folder: StageFolder, optim: OptimConfig, path: Path, name: str) -> Any:
    """Train from the starting draft, resuming what lies in `path`; the models and the outcome.

    `name` is that of the metrics. Raises `TrainingFailed` where a step could not be taken, on all
    ranks: the loss is that of all.
    """
    loaded = load_models(config)
    trainer = make_trainer(config, loaded, optim)
    ranks = trainer.accelerator
    shard = Shard(ranks.process_index, ranks.num_processes)
    source: Source = make_source(config, loaded.target, loaded.draft, path, shard)
    with progress("distilling" if name == TRAIN else name, optim.max_steps) as show:

        def log(step: Progress) -> None:
            show(step)
            metrics = {key: v for key, v in vars(step.metrics).items() if v is not None}
            metrics |= {"total_tokens": step.tokens, "tokens_per_second": step.tokens_per_second}
            folder.tracker.log(name, step.steps, metrics)

        section = "validation" if name == TRAIN else f"{name}_validation"
        measure = validation_alpha(config, loaded.target, loaded.draft, folder, section)
        try:
            outcome: Outcome = train(trainer, source, path, evaluate=measure, log=log)
        except ValueError as error:
            raise TrainingFailed(str(error)) from error
    return loaded, outcome


def tried_rate(config: Config, folder: StageFolder, optim: OptimConfig, factor: float) -> Any:
    """How the trial of `factor` times the learning rate of `optim` ended, the same on all ranks.

    `alpha` is that of the last validation; null or not a number where training diverged, and
    `error` then says how. A trial that has ended is not run again.
    """
    path = folder.path / TRIALS / f"{factor:g}"
    result = path / "alpha.json"
    ended = agree(read_json(result) if folder.is_main and result.exists() else None)
    if ended is not None:
        return ended
    if folder.is_main:
        path.mkdir(parents=True, exist_ok=True)
    try:
        _, outcome = run(config, folder, optim, path, f"rate_{factor:g}")
        ended = {"alpha": outcome.last_alpha}
    except TrainingFailed as error:
        folder.note(f"the trial at learning rate {optim.learning_rate:.2e} failed: {error}")
        ended = {"alpha": None, "error": str(error)}
    if folder.is_main:
        write_json(result, ended)
    return agree(ended)


def choose_rate(config: Config, folder: StageFolder) -> dict[float, float | None]:
    """Validation alpha by learning rate, each tried on a quarter of the steps.

    Rates are multiples (`optim.rate_factors`) of `optim.learning_rate`; alpha is None where
    training diverged. Raises ValueError where it did at every rate.
    """
    optim = config.optim
    base = optim.learning_rate or learning_rate_for(load_models(config).draft.width)
    steps = max(1, optim.max_steps // TRIAL_SHARE)
    trial = replace(
        optim,
        max_steps=steps,
        eval_steps=steps,
        warmup_steps=min(optim.warmup_steps, max(1, steps // 10)),
    )
    found: dict[float, float | None] = {}
    reason = "alpha was not a number: lower optim.learning_rate"
    for factor in optim.rate_factors:
        rate = base * factor
        ended = tried_rate(config, folder, replace(trial, learning_rate=rate), factor)
        alpha, reason = ended["alpha"], ended.get("error", reason)
        found[rate] = alpha if alpha is not None and math.isfinite(alpha) else None
    if not finite(found):
        rates = ", ".join(f"{rate:.2e}" for rate in found)
        raise ValueError(f"optim.rate_factors: training failed at every rate ({rates}): {reason}")
    return found


def finite(found: dict[float, float | None]) -> dict[float, float]:
    """The rates that did not diverge."""
    return {rate: alpha for rate, alpha in found.items() if alpha is not None}


def fit(config: Config, folder: StageFolder) -> tuple[Models, Outcome, dict[float, float | None]]:
    """Train by the best of the rates that are to be tried, or by the one that is given.

    Returns the models with the best weights, how training ended, and alpha by tried rate.
    """
    optim, tried = config.optim, {}
    if optim.rate_factors:
        tried = choose_rate(config, folder)
        by_rate = finite(tried)
        optim = replace(optim, learning_rate=max(by_rate, key=lambda rate: by_rate[rate]))
    return *run(config, folder, optim, folder.path, TRAIN), tried
