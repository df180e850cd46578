"""What the target makes of training texts, stored: its most likely ids at every token.

With `generate.top_k` above 0 a draft learns from these, and the target is not in memory while it
does; any number of experiments share them. Written in parts, so that a kill costs one part.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftkit.config import Config
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record, RecordParts, read_records, write_records
from draftkit.data.store import Mapped, Picked
from draftkit.distillation.teacher import stored_scores
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import load_target
from pipelines.contexts import contexts, read_contexts
from pipelines.generate import ROLLOUT_SETTINGS, generate, read_rollouts
from pipelines.stage import StageFolder, stage
from pipelines.target import target_hashes, target_of
from pipelines.texts import splits_of

VALIDATION = "validation"
PART = 1024  # texts of a file
BATCH = 16  # of them that the target reads at once


def texts_of(config: Config) -> Sequence[Record]:
    """The texts to score: the target's rollouts (`source=target`), or the data's own (`fixed`).

    Raises ValueError for a source whose texts change as the draft learns.
    """
    if config.source.name not in ("target", "fixed"):
        raise ValueError(
            f"generate.top_k: source={config.source.name} makes new texts, which have no scores: "
            "use source=target or fixed, or generate.top_k=0"
        )
    if config.source.name == "target":
        return read_rollouts(generate.ensure(config))
    examples = completed(splits_of(config).train)
    return Mapped(lambda row: record_of(config, row, examples[row]), range(len(examples)))


def completed(examples: Sequence[Example], key: str = "source") -> Sequence[Example]:
    """Those that have something to learn. Raises ValueError where none has."""
    found = [place for place, example in enumerate(examples) if example.has_completion]
    if not found:
        raise ValueError(f"{key}=fixed: the data hold prompts only; use target")
    return Picked(examples, found)


def record_of(config: Config, row: int, example: Example) -> Record:
    """A text of the data as if it had been sampled."""
    prompt = example.prompt_ids
    return Record(
        prompt_ids=prompt,
        output_ids=example.token_ids[len(prompt) :],
        sampler="data",
        sampler_version="",
        sampling=dict(vars(config.sampling)),
        seed=config.seed,
        row=row,
        document=example.document,
        domain=example.domain,
    )


def scored_by(target: CausalAdapter, records: Sequence[Record], config: Config) -> list[Record]:
    """`records` with the target's scores."""
    found: list[Record] = []
    for first in range(0, len(records), BATCH):
        found += stored_scores(
            target,
            records[first : first + BATCH],
            k=config.generate.top_k,
            loss_temperature=config.training_temperature,
        )
    return found


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
    records = texts_of(config)
    held_out = read_contexts(contexts.ensure(config), VALIDATION)
    target = load_target(target_of(config), config.hardware).adapter
    write_records(folder.path / f"{VALIDATION}.parquet", scored_by(target, held_out, config))
    tail, tokens = 0.0, 0
    for first in range(0, len(records), PART):
        path = folder.path / f"part-{first:08d}.parquet"
        if not path.exists():
            write_records(path, scored_by(target, records[first : first + PART], config))
        part = read_records(path)
        tail += sum(sum(record.loss_tail_mass or []) for record in part)
        tokens += sum(len(record.output_ids) for record in part)
        folder.note(f"{min(first + PART, len(records))}/{len(records)} texts scored")
    return {"texts": len(records), "tokens": tokens, "mean_tail_mass": tail / tokens}


def read_scores(folder: Path) -> Sequence[Record]:
    """The scored texts of a complete folder, in order."""
    return RecordParts(sorted(folder.glob("part-*.parquet")))


def read_validation(folder: Path) -> list[Record]:
    """The scored validation contexts of a complete folder."""
    return read_records(folder / f"{VALIDATION}.parquet")
