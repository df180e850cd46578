"""`python -m pipelines.generate`: rollouts of the target on training prompts, in Parquet.

They carry the target's most likely ids of every token where `generate.top_k` wants some: it had
them in its hands. Beside them what else the target says, as stages that other commands run:
`contexts`, held-out prompts that it has continued, and `scores`, its most likely ids at every token
of training texts. All are shared by the experiments with the same target, text and sampling, so
that drafts are compared on the same positions. Rollouts and scores are written in parts: a kill
costs one part.
"""

from functools import partial
from pathlib import Path
from typing import Any

from draftkit.artifacts import fingerprint
from draftkit.config import Config
from draftkit.data.lengths import Room
from draftkit.data.prompts import read_splits
from draftkit.data.rollouts import (
    Record,
    document_of,
    read_parts,
    read_records,
    write_parts,
    write_records,
)
from draftkit.distillation.engines import RETOKENISED, engine_sampler
from draftkit.distillation.progress import Countdown
from draftkit.distillation.samplers import (
    ROLLOUTS,
    TEST,
    VALIDATION,
    Sampler,
    answered,
    noise_seed,
    target_sampler,
)
from draftkit.distillation.sources import TrainingTexts, scored_by, texts_to_score
from draftkit.models.loading import load_target

from .plan import Given, StageFolder, Step
from .run import stage
from .target import text_and_target
from .texts import answer_tokens


def scored_rollouts(config: Config) -> dict[str, Given | Step]:
    """The text and the target, and how many ids the rollouts carry, where they do."""
    options, inputs = config.generate, text_and_target(config)
    if options.top_k and options.engine == "decoder" and config.source.name == "target":
        inputs["likeliest"] = Given(fingerprint(["top_k", options.top_k]))
    return inputs


# Where an engine answers, and to how many at a time, is no part of what it answers.
ROLLOUT_SETTINGS = tuple(f"generate.{key}" for key in ("rollouts", "batch_size", "engine", "model"))
SCORED_PART = 1024  # texts of a file


@stage(
    sections=("seed", "data", "sampling", *ROLLOUT_SETTINGS),
    version=2,
    shared=True,
    needs=scored_rollouts,
)
def generate(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Let the target continue the prompts of the training split.

    Under the served distribution, by our decoder or by an engine that serves the target over HTTP
    (`generate.engine=openai`).
    """
    size, total = config.generate.batch_size, config.generate.rollouts
    splits, target = read_splits(folder.input("texts")), folder.model(config, "target")
    rollouts = tokens = retokenised = 0
    countdown = Countdown(total, folder.note)

    def watch(done: float, new: int) -> None:  # of the lot in hand
        count = tokens + new
        countdown(
            rollouts + done, f"{rollouts + int(done):,} of {total:,} answers, {count:,} tokens"
        )

    sampler: Sampler
    if config.generate.engine == "openai":
        sampler = engine_sampler(target, config, splits.room)
    else:
        sampler = target_sampler(
            load_target(target, config.hardware),
            config.sampling,
            splits.room,
            seed=noise_seed(config.seed, ROLLOUTS),
            batch_size=size,
            top_k=config.generate.top_k if "likeliest" in folder.needs else 0,
            watch=watch,
        )
    folder.mark("loaded")
    prompts = splits.train

    def answer(rows: range) -> list[Record]:
        lot = [prompts[row % len(prompts)] for row in rows]
        return answered(sampler, lot, rows=rows, version=folder.needs["target"].digest)

    for records in write_parts(folder.path, total, size=size, make=answer):
        rollouts += len(records)
        tokens += sum(len(record.output_ids) for record in records)
        retokenised += sum(record.sampler == RETOKENISED for record in records)
        watch(0, 0)
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
    folder.mark("loaded")
    summary, before = {}, 0
    parts = (
        (VALIDATION, splits.validation[: options.validation_prompts]),
        (TEST, splits.test[: options.prompts]),
    )
    total = sum(len(prompts) for _, prompts in parts)
    countdown = Countdown(total, folder.note)

    def watch(done: float, tokens: int) -> None:
        countdown(before + done, f"{before + int(done)} of {total} answers to held-out prompts")

    for name, prompts in parts:
        sampler = target_sampler(
            target,
            config.sampling,
            Room(new, target.adapter.max_positions),
            seed=noise_seed(config.seed, name),
            batch_size=options.batch_size,
            watch=watch,
        )
        records = answered(
            sampler, prompts, rows=range(len(prompts)), version=folder.needs["target"].digest
        )
        write_records(folder.path / f"{name}.parquet", records)
        before += len(records)
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
    folder.mark("loaded")
    held_out = read_contexts(folder.input("contexts"), "validation")
    write_records(folder.path / "validation.parquet", score(held_out))
    tail, tokens, done = 0.0, 0, 0
    countdown = Countdown(len(records), folder.note)

    def watch(new: int) -> None:
        countdown(done + new, f"{done + new:,} of {len(records):,} texts scored")

    for part in write_parts(
        folder.path,
        len(records),
        size=SCORED_PART,
        make=lambda rows: score(records[rows.start : rows.stop], watch=watch),
    ):
        tail += sum(sum(record.loss_tail_mass or []) for record in part)
        tokens += sum(len(record.output_ids) for record in part)
        done += len(part)
    return {"texts": len(records), "tokens": tokens, "mean_tail_mass": tail / tokens}


if __name__ == "__main__":
    generate.main()
