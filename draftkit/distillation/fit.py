"""A drafter is fitted: trials of a learning rate, then the run, chosen by alpha on validation.

One copy of either model is in memory, for all trials and the run: each begins with the weights that
the drafter had. Everything that a resumed run needs lies in a folder.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config, OptimConfig
from draftkit.data.rollouts import Record
from draftkit.distillation.assembly import make_trainer
from draftkit.distillation.batch import Batch
from draftkit.distillation.loop import Outcome, discard_state, train
from draftkit.distillation.progress import CLOSING, OPENING, reporting, row_text
from draftkit.distillation.ranks import agree
from draftkit.distillation.sources import TrainingTexts, make_source
from draftkit.distillation.trainer import Trainer, TrainingFailed
from draftkit.evaluation.alpha import estimates, is_chained, score_contexts, score_stored
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Outline, Target, save_draft
from draftkit.models.parallel import PARD
from draftkit.theory.divergences import Divergence
from draftkit.tracking import Tracker

TRAIN = "train"  # what metrics of the run itself are called
TRIALS = "rates"  # folder of the runs that choose a rate
TRIAL_SHARE = 4  # they take a quarter of the steps
WARMUP_SHARE = 5  # and the first of a cold drafter a fifth
PLAIN_SHARE = 0.6  # of the steps of a cold one that is to be parallel
VANISHING = {"tvd", "jsd"}  # without a gradient where the drafter agrees on nothing
COLD = 0.05  # alpha below which that is so


@dataclass(frozen=True)
class Fitted:
    """The drafter with its best weights, and how training ended.

    alpha_by_rate: validation alpha of the learning rates that were tried, None where training
    diverged.
    """

    draft: Adapter
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
    """`config` with what null stands for in `divergence.warmup_steps` and `draft.pard.plain_share`.

    A drafter that was cut and not trained agrees with its target on nothing: it begins with forward
    KL, and with the first of several proposals.
    """
    divergence, pard = config.divergence, config.draft.pard
    if not config.draft.is_untrained:
        return config
    if divergence.warmup_steps is None and divergence.names <= VANISHING:
        steps = config.optim.max_steps // WARMUP_SHARE
        config = replace(config, divergence=replace(divergence, warmup_steps=steps))
    if pard.plain_share is None and config.draft.kind == PARD:
        pard = replace(pard, plain_share=PLAIN_SHARE)
        config = replace(config, draft=replace(config.draft, pard=pard))
    return config


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """`draft`, in float32, on its way towards `target`, which changes it in place.

    target: its outline alone where its scores are stored with the texts. loss: minimised instead of
    `divergence.name`. validation: what chooses
    the weights: answers of the target to held-out prompts, with its scores where it is not in
    memory. Of several processes that train together the first one writes to `folder`.
    """

    config: Config
    target: Outline
    draft: Adapter
    texts: TrainingTexts
    validation: Sequence[Record]
    folder: Path
    tracker: Tracker
    note: Callable[[str], None]
    loss: Divergence | None = None

    @cached_property
    def trainer(self) -> Trainer:
        """One for all trials and the run."""
        config, texts = self.config, self.texts.token_ids
        return make_trainer(config, self.draft, self.target, loss=self.loss, texts=texts)

    def run(self) -> Fitted:
        """Train by the best of the rates that are to be tried, or by the one that is given."""
        optim, tried = self.config.optim, {}
        if optim.rate_factors:
            tried = self.choose_rate()
            best = max(tried, key=lambda rate: -1.0 if (alpha := tried[rate]) is None else alpha)
            optim = replace(optim, learning_rate=best)
        outcome = self.train(optim, self.folder, TRAIN)
        return Fitted(self.trainer.draft, self.target.tokenizer, outcome, tried)

    def choose_rate(self) -> dict[float, float | None]:
        """Validation alpha by learning rate, each tried on a quarter of the steps.

        Rates are multiples (`optim.rate_factors`) of `optim.learning_rate`; alpha is None where
        training diverged. The draft is left as it was. Raises ValueError where it did at every
        rate.
        """
        optim, base = self.config.optim, self.trainer.peak_rate
        steps = max(1, optim.max_steps // TRIAL_SHARE)
        short = replace(
            optim,
            max_steps=steps,
            eval_steps=steps,
            warmup_steps=min(optim.warmup_steps, max(1, steps // 10)),
        )
        weights = [weight for _, weight in self.trainer.trained()]
        start = [weight.detach().to("cpu", copy=True) for weight in weights]
        trials: dict[float, Trial] = {}
        for factor in optim.rate_factors:
            rate = base * factor
            trials[rate] = self.trial(replace(short, learning_rate=rate), f"{factor:g}")
            with torch.no_grad():
                for weight, value in zip(weights, start, strict=True):
                    weight.copy_(value)
            self.trainer.draft.renew()
        if all(trial.alpha is None for trial in trials.values()):
            rates, last = ", ".join(f"{rate:.2e}" for rate in trials), [*trials.values()][-1]
            raise ValueError(
                f"optim.rate_factors: training failed at every rate ({rates}): {last.error}"
            )
        return {rate: trial.alpha for rate, trial in trials.items()}

    def trial(self, optim: OptimConfig, name: str) -> Trial:
        """How the trial of a learning rate ended, the same on all ranks.

        A trial that has ended is not run again.
        """
        folder, is_main = self.folder / TRIALS / name, self.trainer.accelerator.is_main_process
        result = folder / "alpha.json"
        ended = agree(Trial(**read_json(result)) if is_main and result.exists() else None)
        if ended is not None:
            return ended
        if is_main:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            alpha = self.train(optim, folder, f"rate_{name}").last_alpha
            trial = Trial(alpha if alpha is not None and math.isfinite(alpha) else None)
        except TrainingFailed as error:
            self.note(f"the trial at learning rate {optim.learning_rate:.2e} failed: {error}")
            trial = Trial(None, str(error))
        self.trainer.accelerator.wait_for_everyone()  # who may still be reading the best weights
        if is_main:
            write_json(result, vars(trial))
            discard_state(folder)
        return agree(trial)

    def train(self, optim: OptimConfig, folder: Path, name: str) -> Outcome:
        """Train under `optim`, resuming what lies in `folder`. `name` is that of the metrics."""
        trainer, ranks, is_run = self.trainer, self.trainer.accelerator, name == TRAIN
        trainer.restart(optim)
        source = make_source(
            replace(self.config, optim=optim),
            self.target if isinstance(self.target, Target) else None,
            trainer.draft,
            self.texts,
            rank=ranks.process_index,
            ranks=ranks.num_processes,
        )
        return train(
            trainer,
            source,
            folder,
            evaluate=partial(self.alpha, "validation" if is_run else f"{name}_validation"),
            log=reporting(name, optim.max_steps, self.tracker, self.note),
            show=self.show_row if is_run else None,
        )

    def show_row(self, batch: Batch) -> None:
        """Note the first row of the first batch, and what is learned of it."""
        self.note(f"the first row, {OPENING}what counts in the loss{CLOSING}:")
        self.note(row_text(batch, self.target.tokenizer))

    def alpha(self, section: str, step: int) -> float:
        """What chooses the weights, of the draft on the validation records, logged as `section`.

        It is alpha. For a draft that proposes chains it is the tokens a pass of the target at the
        number of proposals that it is trained for: alpha is that of the first alone. For
        `ce_argmax`, whose drafts propose their argmax, it is the acceptance of that. Without a
        target, from its stored scores: then alpha counts what is certain, and the most that may be
        missing is logged beside it.
        """
        config, draft, metrics = self.config, self.trainer.draft, {}
        how = {"sampling": config.sampling, "batch_size": config.evaluate.batch_size}
        if not isinstance(self.target, Target):
            scored, missing = score_stored(draft, self.validation, **how)
            metrics["alpha_error_bound"] = float(missing.sum() / scored.counts.sum())
        else:
            scored = score_contexts(self.target.adapter, draft, self.validation, **how)
        by_mode = estimates(scored)
        alpha = by_mode["alpha"]
        metrics["alpha"] = alpha.mean
        if alpha.ci95:
            metrics |= {"low": alpha.low, "high": alpha.high}
        chosen = "alpha"
        if is_chained(draft):
            chosen = "acceptance_length"
            metrics[chosen] = scored.tokens_a_pass("alpha", draft.blocks).mean
            for gamma in range(1, draft.blocks + 1) if draft.reads else ():
                metrics[f"tau_{gamma}"] = scored.tokens_a_pass("alpha", gamma).mean
        elif config.divergence.names == {"ce_argmax"} and "alpha_greedy_draft" in by_mode:
            chosen = "alpha_greedy_draft"
            metrics[chosen] = by_mode[chosen].mean
        self.tracker.log(section, step, metrics)
        if step == 0 and alpha.mean < COLD and config.divergence.names <= VANISHING:
            self.note(
                f"validation alpha is {alpha.mean:.3f} at the start, where "
                f"{config.divergence.name} has next to no gradient: begin with some "
                "divergence.warmup_steps of forward KL"
            )
        return metrics[chosen]
