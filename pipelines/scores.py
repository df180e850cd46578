"""`python -m pipelines.scores`: the target's most likely ids at every token of training texts.

With `generate.top_k` above 0 a draft learns from these, and the target is not in memory while it
does. Shared by the experiments with the same target, text and sampling, and written in parts: a
kill costs one part.
"""

from functools import partial
from typing import Any

from draftkit.config import Config
from draftkit.data.rollouts import read_parts, write_parts, write_records
from draftkit.data.splits import read_splits
from draftkit.distillation.progress import Countdown
from draftkit.distillation.scores import scored_by, texts_to_score
from draftkit.distillation.sources import TrainingTexts
from draftkit.models.loading import load_target

from .command import main
from .contexts import read_contexts
from .plan import SCORES
from .stage import StageFolder

PART = 1024  # texts of a file


def check(config: Config) -> None:
    """Raise ValueError for a source whose texts change as the draft learns."""
    if config.source.name not in ("target", "fixed"):
        raise ValueError(
            f"generate.top_k: source={config.source.name} makes new texts, which have no scores: "
            "use source=target or fixed, or generate.top_k=0"
        )


def scores(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Score the texts that `source` names, and the validation contexts."""
    rollouts = read_parts(folder.inputs["generate"]) if "generate" in folder.inputs else None
    splits = read_splits(folder.inputs["texts"])
    records = texts_to_score(config, TrainingTexts(splits.train, splits.room, rollouts))
    score = partial(
        scored_by,
        load_target(folder.model(config, "target"), config.hardware).adapter,
        top_k=config.generate.top_k,
        temperature=config.training_temperature,
    )
    folder.mark("loaded")
    held_out = read_contexts(folder.inputs["contexts"], "validation")
    write_records(folder.path / "validation.parquet", score(held_out))
    tail, tokens, done = 0.0, 0, 0
    countdown = Countdown(len(records), folder.note)

    def watch(new: int) -> None:
        countdown(done + new, f"{done + new:,} of {len(records):,} texts scored")

    for part in write_parts(
        folder.path,
        len(records),
        size=PART,
        make=lambda rows: score(records[rows.start : rows.stop], watch=watch),
    ):
        tail += sum(sum(record.loss_tail_mass or []) for record in part)
        tokens += sum(len(record.output_ids) for record in part)
        done += len(part)
    return {"texts": len(records), "tokens": tokens, "mean_tail_mass": tail / tokens}


if __name__ == "__main__":
    main(SCORES)
