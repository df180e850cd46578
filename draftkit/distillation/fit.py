"""A drafter is fitted: trained from start to end, its weights chosen by alpha on validation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from draftkit.config import PARD, Config
from draftkit.data.rollouts import Record
from draftkit.distillation.assembly import make_trainer
from draftkit.distillation.batch import Batch
from draftkit.distillation.loop import Outcome, train
from draftkit.distillation.progress import CLOSING, OPENING, reporting, row_text
from draftkit.distillation.sources import TrainingTexts, make_source
from draftkit.evaluation.alpha import estimates, score_contexts, score_stored
from draftkit.evaluation.laws import is_chained
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Outline, Target, save_draft
from draftkit.theory.divergences import Divergence
from draftkit.tracking import Tracker

WARMUP_SHARE = 5  # of the steps of a cold drafter, the first fifth
PLAIN_SHARE = 0.6  # of the steps of a cold one that is to be parallel
VANISHING = {"tvd", "jsd"}  # without a gradient where the drafter agrees on nothing
COLD = 0.05  # alpha below which that is so


@dataclass(frozen=True)
class Fitted:
    """The drafter with its best weights, and how training ended."""

    draft: Adapter
    tokenizer: PreTrainedTokenizerBase
    outcome: Outcome

    def save(self, folder: Path) -> None:
        """Write the drafter as a plain `save_pretrained` folder."""
        save_draft(self.draft, self.tokenizer, folder)


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


def fit(
    config: Config,
    *,
    target: Outline,
    draft: Adapter,
    texts: TrainingTexts,
    validation: Sequence[Record],
    folder: Path,
    tracker: Tracker,
    note: Callable[[str], None],
    loss: Divergence | None = None,
) -> Fitted:
    """Train `draft`, in float32, towards `target`, which changes it in place.

    target: its outline alone where its scores are stored with the texts. loss: minimised instead of
    `divergence.name`. validation: what chooses the weights: answers of the target to held-out
    prompts, with its scores where it is not in memory. What lies in `folder` is resumed; of several
    processes that train together the first one writes there.
    """
    trainer = make_trainer(config, draft, target, loss=loss, texts=texts.token_ids)
    ranks = trainer.accelerator
    source = make_source(
        config,
        target,
        trainer.draft,
        texts,
        rank=ranks.process_index,
        ranks=ranks.num_processes,
    )

    def evaluate(step: int) -> float:
        chosen, metrics = validated(config, target, trainer.draft, validation)
        tracker.log("validation", step, metrics)
        divergence = config.divergence
        if step == 0 and metrics["alpha"] < COLD and divergence.names <= VANISHING:
            note(
                f"validation alpha is {metrics['alpha']:.3f} at the start, where "
                f"{divergence.name} has next to no gradient: begin with some "
                "divergence.warmup_steps of forward KL"
            )
        return metrics[chosen]

    def show(batch: Batch) -> None:
        note(f"the first row, {OPENING}what counts in the loss{CLOSING}:")
        note(row_text(batch, target.tokenizer))

    log = reporting("train", config.optim.max_steps, tracker, note)
    outcome = train(trainer, source, folder, evaluate=evaluate, log=log, show=show)
    return Fitted(trainer.draft, target.tokenizer, outcome)


def validated(
    config: Config, target: Outline, draft: Adapter, records: Sequence[Record]
) -> tuple[str, dict[str, float]]:
    """The name of what chooses the weights, and the metrics of `draft` on validation records.

    It is alpha. For a draft that proposes chains it is the tokens a pass of the target at the
    number of proposals that it is trained for: alpha is that of the first alone. For `ce_argmax`,
    whose drafts propose their argmax, it is the acceptance of that. Without a target, from its
    stored scores: then alpha counts what is certain, and the most that may be missing is beside it.
    """
    metrics: dict[str, float] = {}
    how = {"sampling": config.sampling, "batch_size": config.evaluate.batch_size}
    if isinstance(target, Target):
        scored = score_contexts(target.adapter, draft, records, **how)
    else:
        known = not config.scored_by_engine
        scored, missing = score_stored(draft, records, tails_known=known, **how)
        metrics["alpha_error_bound"] = float(missing.sum() / scored.counts.sum())
    by_mode = estimates(scored)
    alpha, chosen = by_mode["alpha"], "alpha"
    metrics["alpha"] = alpha.mean
    if alpha.ci95:
        metrics |= {"low": alpha.low, "high": alpha.high}
    if is_chained(draft):
        chosen = "acceptance_length"
        metrics[chosen] = scored.tokens_a_pass("alpha", draft.blocks).mean
        for gamma in range(1, draft.blocks + 1) if draft.reads else ():
            metrics[f"tau_{gamma}"] = scored.tokens_a_pass("alpha", gamma).mean
    elif config.divergence.names == {"ce_argmax"} and "alpha_greedy_draft" in by_mode:
        chosen = "alpha_greedy_draft"
        metrics[chosen] = by_mode[chosen].mean
    return chosen, metrics
