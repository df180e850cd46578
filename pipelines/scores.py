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
from draftkit.distillation.remote import RemoteTarget
from draftkit.distillation.scores import SCORED_AT_ONCE, scored_by, texts_to_score
from draftkit.distillation.sources import TrainingTexts
from draftkit.models.adapter import Adapter
from draftkit.models.heads import layers_read
from draftkit.models.loading import load_target
from draftkit.models.shapes import layer_count

from .command import main
from .contexts import read_contexts, teacher_of
from .plan import SCORES
from .stage import StageFolder
from .weights import gigabytes

PART, PART_OF_STATES = 1024, 32  # texts of a file; of one with hidden states
LOOKED_AT = 256  # texts by which the tokens of all are known before they are read


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
    layers: tuple[int, ...] = ()
    target: Adapter | RemoteTarget
    if config.scored_by_engine:
        target = teacher_of(config, folder)
        target.check_room(len(one.prompt_ids) + len(one.output_ids) for one in records)
    else:
        target = load_target(folder.model(config, "target"), config.hardware).adapter
    if config.generate.hidden_states:
        assert not isinstance(target, RemoteTarget)
        layers = layers_read(config.draft.kind, layer_count(target.model.config))
        some = records[:: max(1, len(records) // LOOKED_AT)]
        tokens = sum(len(one.prompt_ids) + len(one.output_ids) for one in some)
        tokens, size = round(tokens * len(records) / len(some)), 2 * len(layers) * target.width
        folder.note(
            f"hidden states take about {gigabytes(size * tokens)} on the disk: "
            f"{size:,} bytes for each of {tokens:,} tokens"
        )
    if config.limit is not None:
        records = records[: config.limit * SCORED_AT_ONCE]
    score = partial(
        scored_by,
        target,
        top_k=config.generate.top_k,
        temperature=config.training_temperature,
        layers=layers,
    )
    held_out = read_contexts(folder.inputs["contexts"], "validation")
    write_records(folder.path / "validation.parquet", score(held_out))
    tail, tokens, done = 0.0, 0, 0
    countdown = Countdown(len(records), folder.note)

    def watch(new: int) -> None:
        countdown(done + new, f"{done + new:,} of {len(records):,} texts scored")

    for part in write_parts(
        folder.path,
        len(records),
        size=PART_OF_STATES if layers else PART,
        make=lambda rows: score(records[rows.start : rows.stop], watch=watch),
    ):
        tail += sum(sum(record.loss_tail_mass or []) for record in part)
        tokens += sum(len(record.output_ids) for record in part)
        done += len(part)
    return {"texts": len(records), "tokens": tokens, "mean_tail_mass": tail / tokens}


if __name__ == "__main__":
    main(SCORES)
