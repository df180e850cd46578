"""From `source` to the sequences of a training run: who samples, after which prompts, and where
the texts are kept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path

from draftkit.config import Config
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.data.store import Mapped, Picked
from draftkit.distillation.batch import (
    TokenSequence,
    block_of_record,
    sequence_of_example,
    sequence_of_record,
    with_stored_scores,
)
from draftkit.distillation.batch_sources import (
    WHOLE,
    Grouping,
    RolloutFiles,
    SampledSource,
    Shard,
    Source,
    cut_texts,
    shuffled,
    some_rows,
)
from draftkit.distillation.sampling import source_sampler
from draftkit.distillation.teacher import sampled_scores, stored_scores
from draftkit.models.adapter import CausalAdapter
from draftkit.models.loading import Target

ROLLOUTS = "rollouts"
SCORED_AT_ONCE = 16  # texts that the target reads for its scores


@dataclass(frozen=True)
class TrainingTexts:
    """What a draft may learn on.

    examples: the training split of the data. room: of sampled answers to its prompts. rollouts:
    the target's answers to them, where `reads_rollouts`. scored: the texts of `source` with the
    target's scores, where `generate.top_k` stores some.
    """

    examples: Sequence[Example]
    room: Room
    rollouts: Sequence[Record] | None = None
    scored: Sequence[Record] | None = None

    @property
    def token_ids(self) -> Iterable[Sequence[int]]:
        """Every text that the draft may be fed."""
        records = [*(self.rollouts or ()), *(self.scored or ())]
        answers = ([*record.prompt_ids, *record.output_ids] for record in records)
        return chain((example.token_ids for example in self.examples), answers)


def reads_rollouts(config: Config) -> bool:
    """Whether `source` takes the target's stored rollouts, and not those that carry its scores."""
    source = config.source
    if source.name == "mix":
        return not source.mixes_tokens and source.other == "target"
    return source.name == "block" or (source.name == "target" and config.generate.top_k == 0)


def make_source(
    config: Config,
    target: Target | None,
    draft: CausalAdapter,
    texts: TrainingTexts,
    folder: Path,
    shard: Shard = WHOLE,
) -> Source:
    """The sequences that `source` names; what the draft has a part in is kept in `folder`.

    Texts that do not change need no target.
    """
    source, seed = config.source, config.seed
    batch_size = config.optim.rows_of_a_process * shard.count
    packed_length = texts.room.total if config.data.packing else None

    def grouping(lengths: Iterable[int]) -> Grouping | None:
        return Grouping([*lengths], batch_size) if config.optim.group_by_length else None

    if source.name in ("fixed", "target"):
        sequences = stored_sequences(texts, source.name)
        lengths = (len(text.token_ids) for text in sequences)
        return Source(
            shuffled(sequences, seed, grouping(lengths)),
            version="target" if source.name == "target" else "",
            batch_size=batch_size,
            device=draft.device,
            packed_length=packed_length,
            shard=shard,
        )
    assert target is not None, source.name
    if config.hardware.shard_target and (source.name == "replay" or source.mixes_tokens):
        raise ValueError(
            f"hardware.shard_target: with source={source.name} the target decodes, which it cannot "
            "in parts: use another source, or hardware.shard_target=false"
        )
    proposes = config.proposals > 0 or draft.parallel is not None
    if not proposes and source.name in ("block", "replay"):
        raise ValueError(
            f"decode.gamma=0 proposes nothing, and source={source.name} learns from proposals: "
            "use 1 or more"
        )
    read, text_of = sequence_of_record, None
    if source.name == "block":
        assert texts.rollouts is not None
        prompt_of, read = cut_texts(texts.rollouts, seed), block_of_record
    else:
        prompts = Mapped(attrgetter("prompt_ids"), texts.examples)
        prompt_of = shuffled(prompts, seed, grouping(map(len, prompts)))
        if source.name == "mix" and not source.mixes_tokens:
            text_of = shuffled(stored_sequences(texts, source.other, "source.other"), seed)
            prompt_of = some_rows(prompt_of, fraction=source.fraction, seed=seed)
    return SampledSource(
        prompt_of,
        source_sampler(config, target, draft, texts.room),
        RolloutFiles(
            folder=folder / ROLLOUTS,
            refresh_steps=source.refresh_steps,
            optim=config.optim,
            suffix="" if shard.count == 1 else f"-{shard.index}",
        ),
        read=read,
        text_of=text_of,
        batch_size=batch_size,
        device=draft.device,
        packed_length=packed_length,
        shard=shard,
    )


def completed(examples: Sequence[Example], key: str = "source") -> Sequence[Example]:
    """Those that have something to learn. Raises ValueError where none has."""
    rows = [row for row, example in enumerate(examples) if example.has_completion]
    if not rows:
        raise ValueError(f"{key}=fixed: the data hold prompts only; use target")
    return Picked(examples, rows)


def stored_sequences(
    texts: TrainingTexts, name: str, key: str = "source"
) -> Sequence[TokenSequence]:
    """The target's rollouts (`target`), or the completions of the data (`fixed`).

    With the target's scores where they are stored.
    """
    scored = texts.scored
    if name == "target":
        records = texts.rollouts if scored is None else scored
        assert records is not None
        return Mapped(sequence_of_record, records)
    examples = completed(texts.examples, key)
    if scored is None:
        return Mapped(sequence_of_example, examples)
    assert len(scored) == len(examples)

    def with_scores(row: int) -> TokenSequence:
        return with_stored_scores(sequence_of_example(examples[row]), scored[row])

    return Mapped(with_scores, range(len(examples)))


def texts_to_score(config: Config, texts: TrainingTexts) -> Sequence[Record]:
    """What carries the target's scores (`generate.top_k`): its rollouts, or the data's own texts.

    Raises ValueError for a source whose texts change as the draft learns.
    """
    if config.source.name == "target":
        assert texts.rollouts is not None
        return texts.rollouts
    if config.source.name != "fixed":
        raise ValueError(
            f"generate.top_k: source={config.source.name} makes new texts, which have no scores: "
            "use source=target or fixed, or generate.top_k=0"
        )
    examples = completed(texts.examples)

    def record(row: int) -> Record:  # a text of the data as if it had been sampled
        prompt = examples[row].prompt_ids
        return Record(
            prompt_ids=prompt,
            output_ids=examples[row].token_ids[len(prompt) :],
            sampler="data",
            sampler_version="",
            sampling=dict(vars(config.sampling)),
            seed=config.seed,
            row=row,
            document=examples[row].document,
            domain=examples[row].domain,
        )

    return Mapped(record, range(len(examples)))


def scored_by(
    target: CausalAdapter,
    records: Sequence[Record],
    *,
    top_k: int,
    temperature: float,
    watch: Callable[[int], None] = lambda done: None,
) -> list[Record]:
    """`records` with the target's `top_k` most likely ids, for a loss at `temperature`.

    Those that carry them need no pass of the target. `watch` hears how many are done.
    """
    scored: list[Record] = []
    for first in range(0, len(records), SCORED_AT_ONCE):
        lot = records[first : first + SCORED_AT_ONCE]
        scored += sampled_scores(lot, loss_temperature=temperature) or stored_scores(
            target, lot, k=top_k, loss_temperature=temperature
        )
        watch(len(scored))
    return scored
