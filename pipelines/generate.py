"""`python -m pipelines.generate`: rollouts of the target on training prompts, in Parquet.

Beside them what else the target says, as stages that other commands run: `contexts`, held-out
prompts that it has continued, and `scores`, its most likely ids at every token of training texts.
All are shared by the experiments with the same target, text and sampling, so that drafts are
compared on the same positions. Rollouts and scores are written in parts: a kill costs one part.
"""

from functools import partial
from pathlib import Path
from typing import Any

from draftkit.config import Config
from draftkit.data.prompts import read_splits
from draftkit.data.rollouts import (
    Record,
    document_of,
    read_parts,
    read_records,
    write_parts,
    write_records,
)
from draftkit.distillation.engines import RETOKENISED
from draftkit.distillation.samplers import Sampler
from draftkit.models.loading import load_target
from draftkit.workflow.sampling import (
    ROLLOUTS,
    TEST,
    VALIDATION,
    answered,
    engine_sampler,
    noise_seed,
    target_sampler,
)
from draftkit.workflow.sources import TrainingTexts, scored_by, texts_to_score

from .plan import Given, StageFolder, Step
from .prepare import text_and_target
from .run import stage
from .texts import answer_tokens

# Where an engine answers, and to how many at a time, is no part of what it answers.
ROLLOUT_SETTINGS = tuple(f"generate.{key}" for key in ("rollouts", "batch_size", "engine", "model"))
SCORED_PART = 1024  # texts of a file


@stage(
    sections=("seed", "data", "sampling", *ROLLOUT_SETTINGS),
    version=2,
    shared=True,
    needs=text_and_target,
)
def generate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue the prompts of the training split.

    Under the served distribution, by our decoder or by an engine that serves the target over HTTP
    (`generate.engine=openai`).
    """
    size, total = config.generate.batch_size, config.generate.rollouts
    splits, target = read_splits(folder.input("texts")), folder.model(config, "target")
    sampler: Sampler
    if config.generate.engine == "openai":
        sampler = engine_sampler(target, config, splits.room)
    else:
        sampler = target_sampler(
            load_target(target, config.hardware),
            sampling=config.sampling,
            seed=noise_seed(config.seed, ROLLOUTS),
            max_new_tokens=splits.room.new,
            batch_size=size,
            max_length=splits.room.total,
        )
    rollouts = tokens = retokenised = 0
    prompts = splits.train

    def answer(rows: range) -> list[Record]:
        lot = [prompts[row % len(prompts)] for row in rows]
        return answered(sampler, lot, rows=rows, version=folder.needs["target"].digest)

    for records in write_parts(folder.path, total, size=size, make=answer):
        rollouts += len(records)
        tokens += sum(len(record.output_ids) for record in records)
        retokenised += sum(record.sampler == RETOKENISED for record in records)
        folder.note(f"{rollouts}/{total} rollouts, {tokens:,} tokens")
    if retokenised:
        folder.note(f"{retokenised} answers came as text: their tokens may not be those sampled")
    return {"rollouts": total, "tokens": tokens, "retokenised": retokenised}


def prompts_to_continue(config: Config) -> dict[str, Given | Step]:
    """The text and the target, and how many tokens it adds to a prompt."""
    return {**text_and_target(config), "answers": Given(str(answer_tokens(config)))}


@stage(
    name="contexts",
    sections=(
        *("seed", "data", "sampling", "evaluate.prompts", "evaluate.validation_prompts"),
        "evaluate.max_new_tokens",
    ),
    version=2,
    shared=True,
    needs=prompts_to_continue,
)
def contexts(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue held-out prompts of both splits, once, for every draft.

    Validation contexts choose the weights in `train`; test contexts are for the tables alone.
    """
    options, splits = config.evaluate, read_splits(folder.input("texts"))
    if (new := answer_tokens(config)) < options.max_new_tokens:
        folder.note(f"{new} tokens an answer, all that the models' context leaves after a prompt")
    target = load_target(folder.model(config, "target"), config.hardware)
    summary = {}
    for name, examples, count in (
        (VALIDATION, splits.validation, options.validation_prompts),
        (TEST, splits.test, options.prompts),
    ):
        sampler = target_sampler(
            target,
            sampling=config.sampling,
            seed=noise_seed(config.seed, name),
            max_new_tokens=new,
            batch_size=options.batch_size,
        )
        prompts = examples[:count]
        records = answered(
            sampler, prompts, rows=range(len(prompts)), version=folder.needs["target"].digest
        )
        write_records(folder.path / f"{name}.parquet", records)
        tokens = sum(len(record.output_ids) for record in records)
        documents = len({document_of(record) for record in records})
        summary[name] = {"prompts": len(records), "documents": documents, "tokens": tokens}
    return summary


def read_contexts(folder: Path, split: str) -> list[Record]:
    """The contexts of `split` in a complete folder of `contexts`, or of `scores` (validation)."""
    return read_records(folder / f"{split}.parquet")


def scored_texts(config: Config) -> dict[str, Given | Step]:
    """The texts to score, the validation contexts and the target."""
    inputs = {**text_and_target(config), "contexts": contexts.step(config)}
    if config.source.name == "target":
        inputs["rollouts"] = generate.step(config)
    return inputs


@stage(
    name="scores",
    sections=(
        *("seed", "data", "sampling", "generate.top_k", "divergence.temperature"),
        *("source.name", "evaluate.validation_prompts", "evaluate.max_new_tokens"),
        *ROLLOUT_SETTINGS,
    ),
    version=2,
    shared=True,
    needs=scored_texts,
)
def scores(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Score the texts that `source` names, and the validation contexts.

    With `generate.top_k` above 0 a draft learns from these, and the target is not in memory while
    it does.
    """
    rollouts = read_parts(folder.input("rollouts")) if "rollouts" in folder.needs else None
    splits = read_splits(folder.input("texts"))
    records = texts_to_score(config, TrainingTexts(splits.train, splits.room, rollouts))
    score = partial(
        scored_by,
        load_target(folder.model(config, "target"), config.hardware).adapter,
        top_k=config.generate.top_k,
        temperature=config.training_temperature,
    )
    held_out = read_contexts(folder.input("contexts"), "validation")
    write_records(folder.path / "validation.parquet", score(held_out))
    tail, tokens, done = 0.0, 0, 0
    for part in write_parts(
        folder.path,
        len(records),
        size=SCORED_PART,
        make=lambda rows: score(records[rows.start : rows.stop]),
    ):
        tail += sum(sum(record.loss_tail_mass or []) for record in part)
        tokens += sum(len(record.output_ids) for record in part)
        done += len(part)
        folder.note(f"{done}/{len(records)} texts scored")
    return {"texts": len(records), "tokens": tokens, "mean_tail_mass": tail / tokens}


if __name__ == "__main__":
    generate.main()
