"""From a configuration to a fitted drafter: trainer, validation, and the learning rate.

Of the target one copy is in memory, which the caller has loaded: all trials of a learning rate
and the run itself read it. Everything that a resumed run needs lies in the job's folder.
"""

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config, HardwareConfig, ModelConfig, OptimConfig
from draftkit.data.rollouts import Record
from draftkit.distillation.loop import Outcome, discard_state
from draftkit.distillation.progress import train_logged
from draftkit.distillation.ranks import agree, join_group
from draftkit.distillation.sources import TrainingTexts, make_source
from draftkit.distillation.teacher import StoredTeacher, TargetTeacher, Teacher
from draftkit.distillation.trainer import Trainer, learning_rate_for
from draftkit.evaluation.alpha import estimates, score_contexts, score_stored
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import (
    Outline,
    Target,
    dtype_named,
    load_draft,
    load_outline,
    load_target,
    outline_of,
    save_draft,
    width_of,
)
from draftkit.models.lora import with_lora
from draftkit.models.parallel import PARD, PLAIN, Parallel, check_unused, declare, free_id
from draftkit.models.remembered import RememberedAdapter
from draftkit.models.sharding import load_sharded_target
from draftkit.theory.divergences import Divergence
from draftkit.tracking import Tracker

TRAIN = "train"  # what metrics of the run itself are called
TRIALS = "rates"  # folder of the runs that choose a rate
TRIAL_SHARE = 4  # they take a quarter of the steps
WARMUP_SHARE = 5  # and the first of a cold drafter a fifth
VANISHING = {"tvd", "jsd"}  # without a gradient where the drafter agrees on nothing
COLD = 0.05  # alpha below which that is so


class TrainingFailed(ValueError):
    """A step could not be taken: the loss was not finite, or no token counted."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a drafter is fitted by, on what, and where.

    target: its outline alone where its scores are stored with the texts. start: the drafter to
    begin with. validation: what chooses the weights: answers of the target to held-out prompts,
    with its scores where it is not in memory. loss: a function to minimise instead of
    `divergence.name`. `is_main` is false on the other ranks of a distributed launch, which read
    and never write.
    """

    config: Config
    target: Target | Outline
    start: ModelConfig
    texts: TrainingTexts
    validation: Sequence[Record]
    folder: Path
    tracker: Tracker
    note: Callable[[str], None]
    is_main: bool = True
    loss: Divergence | None = None


@dataclass(frozen=True)
class Fitted:
    """The drafter with its best weights, and how training ended.

    alpha_by_rate: validation alpha of the learning rates that were tried, None where training
    diverged.
    """

    draft: CausalAdapter
    tokenizer: PreTrainedTokenizerBase
    outcome: Outcome
    alpha_by_rate: dict[float, float | None] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write the drafter as a plain `save_pretrained` folder."""
        save_draft(self.draft, self.tokenizer, folder)


@dataclass(frozen=True)
class Trial:
    """How a learning rate did: its last validation alpha, None where training diverged."""

    alpha: float | None
    error: str = "alpha was not a number: lower optim.learning_rate"


def with_warmup(config: Config) -> Config:
    """`config` with the steps of forward KL that `divergence.warmup_steps=null` stands for.

    A drafter that was cut and not trained agrees with its target on nothing.
    """
    divergence, cut = config.divergence, config.draft.shrink
    is_cold = config.draft.path is None and cut.layers and not cut.steps
    if divergence.warmup_steps is not None or not is_cold or not divergence.names <= VANISHING:
        return config
    steps = config.optim.max_steps // WARMUP_SHARE
    return replace(config, divergence=replace(divergence, warmup_steps=steps))


def fit(job: Job) -> Fitted:
    """Train by the best of the rates that are to be tried, or by the one that is given."""
    optim = job.config.optim
    if not optim.rate_factors:
        return fit_once(job, optim, job.folder, TRAIN)
    tried = choose_rate(job)
    best = max(tried, key=lambda rate: -1.0 if (alpha := tried[rate]) is None else alpha)
    fitted = fit_once(job, replace(optim, learning_rate=best), job.folder, TRAIN)
    return replace(fitted, alpha_by_rate=tried)


def load_teaching_target(
    target: ModelConfig, hardware: HardwareConfig, *, stored: bool
) -> Target | Outline:
    """The target to learn from, its outline alone where its scores are `stored` with the texts.

    Split over the processes of a distributed launch where `hardware.shard_target` says so.
    """
    if stored:
        return load_outline(target, hardware)
    if not hardware.shard_target:
        return load_target(target, hardware)
    join_group()
    return load_sharded_target(target, hardware)


def make_trainer(
    config: Config,
    start: ModelConfig,
    target: Target | Outline,
    optim: OptimConfig,
    *,
    loss: Divergence | None = None,
    reader: RememberedAdapter | None = None,
    texts: Iterable[Sequence[int]] = (),
) -> Trainer:
    """A trainer of the drafter in `start`, in float32, with all that `draft` says of how it learns.

    It learns from `target`, which `reader` may stand for, or from scores that are stored with its
    texts. texts: none of which may use the id of the masks, where the drafter is a parallel one.
    """
    outline = target if isinstance(target, Outline) else outline_of(target)
    served = dtype_named(start) or outline.dtype
    draft = load_draft(replace(start, kind=PLAIN), outline, dtype=torch.float32)
    if start.kind == PARD:
        draft = made_parallel(draft, start.pard.tokens, outline.tokenizer, texts)
    if draft.parallel is not None:
        check_unused(draft.parallel, texts)
    draft = with_lora(draft, config.draft.lora, seed=config.seed)
    if config.draft.freeze_head:
        head: Any = draft.model.get_output_embeddings()
        head.requires_grad_(False)
    if config.optim.activation_checkpointing:
        checkpoint_activations(draft.model)
    divergence, reference = config.divergence, None
    if divergence.reference is not None:
        reference = load_draft(ModelConfig(path=divergence.reference), outline)
    teacher: Teacher | None = None
    if loss is not None or divergence.names != {"next_token"}:
        known = isinstance(target, Target)
        teacher = TargetTeacher(reader or target.adapter) if known else StoredTeacher()
    return Trainer(
        draft,
        teacher,
        optim=optim,
        divergence=divergence,
        sampling=config.sampling,
        temperature=config.training_temperature,
        autocast=served if served != torch.float32 else None,
        reference=reference,
        compiled=config.optim.compiles,
        seed=config.seed,
        loss=loss,
    )


def made_parallel(
    draft: CausalAdapter,
    blocks: int,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[Sequence[int]],
) -> CausalAdapter:
    """`draft` as one that proposes `blocks` tokens in one pass; the id of its masks, if it has one,
    stays. ValueError where the vocabulary has none to give."""
    token = None if draft.parallel is None else draft.parallel.token
    if token is None:
        rows: Any = draft.model.get_input_embeddings()
        token = free_id(tokenizer, len(rows.weight), texts)
    declare(draft.model.config, Parallel(token, blocks))
    return CausalAdapter(draft.model, vocab_size=draft.vocab_size, kept_ids=draft.kept_ids)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let the backward pass of `model` make its activations again instead of keeping them."""
    # Later transformers have another name for it, and warn of the older.
    name = "activation_checkpointing_enable"
    enable: Any = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def validation_alpha(job: Job, draft: CausalAdapter, section: str, step: int) -> float:
    """What chooses the weights, of `draft` on the validation records: alpha, logged as `section`.

    For a parallel draft it is the tokens a pass of the target at the number of proposals that it is
    trained for: alpha is that of the first proposal alone. For `ce_argmax`, whose drafts propose
    their argmax, it is the acceptance of that. Without a target, from its stored scores: then alpha
    counts what is certain, and the most that may be missing is logged beside it.
    """
    config, metrics = job.config, {}
    sampling, size = config.sampling, config.evaluate.batch_size
    if isinstance(job.target, Outline):
        scored, missing = score_stored(draft, job.validation, sampling=sampling, batch_size=size)
        metrics["alpha_error_bound"] = float(missing.sum() / scored.counts.sum())
    else:
        scored = score_contexts(
            job.target.adapter, draft, job.validation, sampling=sampling, batch_size=size
        )
    by_mode = estimates(scored)
    alpha = by_mode["alpha"]
    metrics["alpha"] = alpha.mean
    if alpha.ci95:
        metrics |= {"low": alpha.low, "high": alpha.high}
    chosen = "alpha"
    if draft.parallel is not None:
        chosen = "acceptance_length"
        metrics[chosen] = scored.tokens_a_pass("alpha", draft.parallel.blocks).mean
    elif config.divergence.names == {"ce_argmax"} and "alpha_greedy_draft" in by_mode:
        chosen = "alpha_greedy_draft"
        metrics[chosen] = by_mode[chosen].mean
    job.tracker.log(section, step, metrics)
    if step == 0 and alpha.mean < COLD and config.divergence.names <= VANISHING:
        job.note(
            f"validation alpha is {alpha.mean:.3f} at the start, where {config.divergence.name} has"
            " next to no gradient: begin with some divergence.warmup_steps of forward KL"
        )
    return metrics[chosen]


def fit_once(job: Job, optim: OptimConfig, folder: Path, name: str) -> Fitted:
    """Train from the starting draft, resuming what lies in `folder`.

    `name` is that of the metrics. Raises `TrainingFailed` where a step could not be taken, on all
    ranks: the loss is that of all.
    """
    config = job.config
    trainer = make_trainer(
        config, job.start, job.target, optim, loss=job.loss, texts=job.texts.token_ids
    )
    ranks = trainer.accelerator
    target = None if isinstance(job.target, Outline) else job.target
    source = make_source(
        replace(config, optim=optim),
        target,
        trainer.draft,
        job.texts,
        rank=ranks.process_index,
        ranks=ranks.num_processes,
    )
    section = "validation" if name == TRAIN else f"{name}_validation"
    try:
        outcome = train_logged(
            trainer,
            source,
            folder,
            title="distilling" if name == TRAIN else name,
            section=name,
            tracker=job.tracker,
            note=job.note,
            evaluate=partial(validation_alpha, job, trainer.draft, section),
            tokenizer=job.target.tokenizer if name == TRAIN else None,
        )
    except ValueError as error:
        raise TrainingFailed(str(error)) from error
    return Fitted(trainer.draft, job.target.tokenizer, outcome)


def tried_rate(job: Job, optim: OptimConfig, factor: float) -> Trial:
    """How the trial of `factor` times the learning rate of `optim` ended, the same on all ranks.

    A trial that has ended is not run again.
    """
    folder = job.folder / TRIALS / f"{factor:g}"
    result = folder / "alpha.json"
    ended = agree(Trial(**read_json(result)) if job.is_main and result.exists() else None)
    if ended is not None:
        return ended
    if job.is_main:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        alpha = fit_once(job, optim, folder, f"rate_{factor:g}").outcome.last_alpha
        trial = Trial(alpha if alpha is not None and math.isfinite(alpha) else None)
    except TrainingFailed as error:
        job.note(f"the trial at learning rate {optim.learning_rate:.2e} failed: {error}")
        trial = Trial(None, str(error))
    gc.collect()  # trainers stand in cycles, and the next one needs the room
    if job.is_main:
        write_json(result, vars(trial))
        discard_state(folder)
    return agree(trial)


def choose_rate(job: Job) -> dict[float, float | None]:
    """Validation alpha by learning rate, each tried on a quarter of the steps.

    Rates are multiples (`optim.rate_factors`) of `optim.learning_rate`; alpha is None where
    training diverged. Raises ValueError where it did at every rate.
    """
    optim = job.config.optim
    base = optim.learning_rate or learning_rate_for(width_of(job.start))
    steps = max(1, optim.max_steps // TRIAL_SHARE)
    short = replace(
        optim,
        max_steps=steps,
        eval_steps=steps,
        warmup_steps=min(optim.warmup_steps, max(1, steps // 10)),
    )
    trials = {
        base * factor: tried_rate(job, replace(short, learning_rate=base * factor), factor)
        for factor in optim.rate_factors
    }
    if all(trial.alpha is None for trial in trials.values()):
        rates, last = ", ".join(f"{rate:.2e}" for rate in trials), [*trials.values()][-1]
        raise ValueError(
            f"optim.rate_factors: training failed at every rate ({rates}): {last.error}"
        )
    return {rate: trial.alpha for rate, trial in trials.items()}
