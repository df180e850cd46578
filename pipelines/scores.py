"""What the target makes of training texts, stored: its most likely ids at every token.

With `generate.top_k` above 0 a draft learns from these, and the target is not in memory while it
does; any number of experiments share them. Written in parts, so that a kill costs one part.
"""

from functools import partial
from pathlib import Path
from typing import Any

from draftkit.config import Config
from draftkit.data.rollouts import Record, read_records, write_parts, write_records
from draftkit.data.rollouts import read_parts as read_scores
from draftkit.models.loading import load_target
from draftkit.workflow.scoring import scored_by, texts_to_score
from draftkit.workflow.sources import TrainingTexts
from pipelines.contexts import contexts, read_contexts
from pipelines.generate import ROLLOUT_SETTINGS, generate, read_rollouts
from pipelines.stage import StageFolder, stage
from pipelines.target import target_hashes, target_of
from pipelines.texts import splits_of

__all__ = ["read_scores", "read_validation", "scores"]

VALIDATION = "validation"
PART = 1024  # texts of a file


@stage(
    sections=(
        *("seed", "data", "sampling", "generate.top_k", "divergence.temperature"),
        *("source.name", "evaluate.validation_prompts", "evaluate.max_new_tokens"),
        *ROLLOUT_SETTINGS,
    ),
    shared=True,
    inputs=target_hashes,
)
def scores(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Score the texts that `source` names, and the validation contexts."""
    rollouts = read_rollouts(generate.ensure(config)) if config.source.name == "target" else None
    records = texts_to_score(config, TrainingTexts(splits_of(config).train, rollouts))
    held_out = read_contexts(contexts.ensure(config), VALIDATION)
    score = partial(
        scored_by,
        load_target(target_of(config), config.hardware).adapter,
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
