"""`python -m pipelines.distill`: train a drafter towards its target, judge it, print one table.

Starts from `draft.path` (or the base drafter of `prepare`), learns by `divergence` on the
sequences of `source`, keeps the weights with the best validation alpha, and ends with `evaluate`.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftkit.artifacts import read_json
from draftkit.config import Config, ModelConfig
from draftkit.distillation.loop import Outcome, Progress, train
from draftkit.distillation.sources import Shard
from draftkit.distillation.teacher import StoredTeacher, TargetTeacher, Teacher
from draftkit.distillation.trainer import Trainer
from draftkit.evaluation.alpha import MODES, estimates, score_contexts, score_stored
from draftkit.evaluation.report import evaluation_table, training_figure
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import (
    Outline,
    Target,
    load_draft,
    load_outline,
    load_target,
    outline_of,
    save_model,
)
from draftkit.models.lora import with_lora
from draftkit.tracking import FILE_NAME, read_metrics
from pipelines.contexts import contexts, read_contexts
from pipelines.evaluate import evaluate
from pipelines.generate import ROLLOUT_SETTINGS
from pipelines.inputs import models, pair_hashes
from pipelines.memory import peak_memory_bytes
from pipelines.progress import progress
from pipelines.scores import read_validation, scores
from pipelines.sources import decoding_hash, make_source
from pipelines.stage import StageFolder, stage

DRAFT = "draft"


def inputs(config: Config) -> dict[str, str]:
    """Checksums of the pair and the text, after a look at what no single section can check."""
    temperature, served = config.training_temperature, config.sampling.temperature
    if temperature != served and config.divergence.name != "ce_argmax":
        print(f"distill: the loss is taken at temperature {temperature:g}, served is {served:g}")
    return {**decoding_hash(config), **pair_hashes(config)}


def validation_alpha(
    config: Config, target: Target | None, draft: CausalAdapter, folder: StageFolder
) -> Callable[[int], float]:
    """A function that measures, and logs, alpha on the validation contexts.

    Without a target, from its stored scores: then alpha counts what is certain, and the most that
    may be missing is logged beside it.
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
        alpha = estimates(scored, seed=config.seed, resamples=config.evaluate.bootstrap)["alpha"]
        metrics |= {"alpha": alpha.mean, "low": alpha.low, "high": alpha.high}
        folder.tracker.log("validation", step, metrics)
        return alpha.mean

    return measure


def reference_draft(config: Config, target: Outline) -> CausalAdapter | None:
    """The draft that `divergence.tokens=top` compares with, where one is named."""
    path = config.divergence.reference
    return None if path is None else load_draft(ModelConfig(path=path), target)


def fit(config: Config, folder: StageFolder) -> Outcome:
    """Train, leave the best drafter in `<folder>/draft`, and draw the curves."""
    target_config, draft_config = models(config)
    target = None
    if config.generate.top_k == 0:
        target = load_target(target_config, config.hardware)
    outline = outline_of(target) if target else load_outline(target_config, config.hardware)
    start = load_draft(draft_config, outline, dtype=torch.float32)
    draft = with_lora(start, config.draft.lora, seed=config.seed)
    teacher: Teacher | None = TargetTeacher(target.adapter) if target else StoredTeacher()
    trainer = Trainer(
        draft,
        teacher if config.divergence.names != {"next_token"} else None,
        optim=config.optim,
        divergence=config.divergence,
        sampling=config.sampling,
        temperature=config.training_temperature,
        autocast=outline.dtype if outline.dtype != torch.float32 else None,
        reference=reference_draft(config, outline),
        compiled=config.optim.compiles,
    )
    ranks = trainer.accelerator
    shard = Shard(ranks.process_index, ranks.num_processes)
    source = make_source(config, target, draft, folder, shard)
    with progress("distilling", config.optim.max_steps) as show:

        def log(step: Progress) -> None:
            show(step)
            metrics = {name: v for name, v in vars(step.metrics).items() if v is not None}
            metrics |= {"total_tokens": step.tokens, "tokens_per_second": step.tokens_per_second}
            folder.tracker.log("train", step.steps, metrics)

        measure = validation_alpha(config, target, draft, folder)
        outcome = train(trainer, source, folder.path, evaluate=measure, log=log)
    save_model(draft.model, outline.tokenizer, folder.path / DRAFT, kept_ids=draft.kept_ids)
    training_figure(read_metrics(folder.path / FILE_NAME), folder.path / "training.png")
    folder.tracker.figure("train/curves", folder.path / "training.png")
    return outcome


def judge(config: Config) -> dict[str, Any]:
    """Evaluate what was trained beside what it started from; the keys of `distill`'s summary."""
    judged = read_json(evaluate.ensure(config) / "summary.json")
    summary: dict[str, Any] = {"verdict": judged["verdict"]}
    for mode in MODES:
        summary[f"{mode}_before"] = judged["before"][mode]
        summary[f"{mode}_after"] = judged[mode]
        summary[f"{mode}_gain"] = judged[f"{mode}_gain"]
    return summary


def show(config: Config, folder: Path) -> None:
    """Print the table of the evaluation that ended the run."""
    Console(width=80).print(evaluation_table(read_json(evaluate.ensure(config) / "summary.json")))


@stage(
    sections=(
        "seed",
        "data",
        "sampling",
        "divergence",
        "source",
        *ROLLOUT_SETTINGS,
        "generate.top_k",
        "optim",
        "draft.lora",
        "evaluate.validation_prompts",
        "evaluate.max_new_tokens",
    ),
    inputs=inputs,
    after=show,
)
def distill(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Train, then judge against the starting drafter on the test split."""
    outcome = fit(config, folder)
    if outcome.best_step == 0:
        folder.note("no step beat the starting drafter on validation: it is kept as it was")
    summary = {
        **judge(config),
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "best_step": outcome.best_step,
        "tokens_per_second": mean_pace(read_metrics(folder.path / FILE_NAME)),
        "peak_memory_bytes": peak_memory_bytes(),
        **stored_error(read_metrics(folder.path / FILE_NAME)),
        "divergence": config.divergence.name,
        "source": config.source.name,
    }
    folder.tracker.artifact(f"{config.name}-draft", "model", folder.path / DRAFT, summary)
    return summary


def stored_error(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The most by which stored scores may have understated the last validation alpha, if any."""
    found = [line["alpha_error_bound"] for line in lines if "alpha_error_bound" in line]
    return {"alpha_error_bound": found[-1]} if found else {}


def mean_pace(lines: list[dict[str, Any]]) -> float:
    """Generated tokens trained on per second, sampling included, over all logged steps."""
    steps = [line for line in lines if line["section"] == "train"]
    tokens = [
        b["total_tokens"] - a["total_tokens"] for a, b in pairwise([{"total_tokens": 0}, *steps])
    ]
    seconds = [count / line["tokens_per_second"] for count, line in zip(tokens, steps, strict=True)]
    return sum(tokens) / sum(seconds)


if __name__ == "__main__":
    distill.main()
