"""What the target makes of training texts, stored: its most likely ids at every token.

With `generate.top_k` above 0 a draft learns from these, and the target is not in memory while it
does; any number of experiments share them. Written in parts, so that a kill costs one part.
"""

from functools import partial
from pathlib import Path
from typing import Any

from draftkit.config import Config
from draftkit.data.prompts import read_splits
from draftkit.data.rollouts import Record, read_parts, read_records, write_parts, write_records
from draftkit.models.loading import load_target
from draftkit.workflow.sources import TrainingTexts, scored_by, texts_to_score
from pipelines.contexts import contexts, read_contexts
from pipelines.generate import ROLLOUT_SETTINGS, generate
from pipelines.inputs import text_and_target
from pipelines.plan import Given, StageFolder, Step
from pipelines.run import stage

VALIDATION = "validation"
PART = 1024  # texts of a file


def needs(config: Config) -> dict[str, Given | Step]:
    """The texts to score, the validation contexts and the target."""
    inputs = {**text_and_target(config), "contexts": contexts.step(config)}
    if config.source.name == "target":
        inputs["rollouts"] = generate.step(config)
    return inputs


@stage(
    sections=(
        *("seed", "data", "sampling", "generate.top_k", "divergence.temperature"),
        *("source.name", "evaluate.validation_prompts", "evaluate.max_new_tokens"),
        *ROLLOUT_SETTINGS,
    ),
    shared=True,
    needs=needs,
)
def scores(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Score the texts that `source` names, and the validation contexts."""
    rollouts = read_parts(folder.input("rollouts")) if "rollouts" in folder.inputs else None
    examples = read_splits(folder.input("texts")).train
    records = texts_to_score(config, TrainingTexts(examples, rollouts))
    held_out = read_contexts(folder.input("contexts"), VALIDATION)
    score = partial(
        scored_by,
        load_target(folder.model(config, "target"), config.hardware).adapter,
        top_k=config.generate.top_k,
        temperature=config.training_temperature,
    )
    write_records(folder.path / f"{VALIDATION}.parquet", score(held_out))
    tail, tokens, done = 0.0, 0, 0
    for part in write_parts(
        folder.path,
        len(records),
        size=PART,
        make=lambda rows: score(records[rows.start : rows.stop]),
    ):
        tail += sum(sum(record.loss_tail_mass or []) for record in part)
        tokens += sum(len(record.output_ids) for record in part)
        done += len(part)
        folder.note(f"{done}/{len(records)} texts scored")
    return {"texts": len(records), "tokens": tokens, "mean_tail_mass": tail / tokens}


def read_validation(folder: Path) -> list[Record]:
    """The scored validation contexts of a complete folder."""
    return read_records(folder / f"{VALIDATION}.parquet")
