"""Whose sequences the draft learns on: the data's, the target's, its own, or of both.

A source answers `batch(step)` and is a function of the step alone and, where the draft has a part
in the text, of its weights at the step that sampled it; so a resumed run sees what an
uninterrupted one sees. Rows are numbered through all steps: row r is place r % batch_size of step
r // batch_size, and what it becomes is a function of (seed, r).

`fixed`, `target`: stored texts. `draft`: the draft's own. `mix`: of either, row by row (GKD
2306.13649). `block`: a piece of the target's text and a round of drafted tokens, as a server sees
them. `replay`: texts of speculative decoding with what was refused in them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from draftkit.config import Config
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.data.store import Lazy
from draftkit.distillation.batch import (
    Batch,
    TokenSequence,
    block_of_record,
    collate,
    sequence_of_record,
)
from draftkit.distillation.remote import RemoteTarget
from draftkit.distillation.samplers import DecoderSampler, Sampler, noise_seed
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Outline, Target
from draftkit.theory.noise import ACCEPT, uniform

Item = TypeVar("Item")

GROUPED = 32  # batches among which items of like length are brought together


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
        return source.other == "target"
    return source.name == "block" or (source.name == "target" and config.generate.top_k == 0)


@dataclass
class Source:
    """Batches by step: of every row, numbered through all steps, a text.

    It is `text_of(row)`, or where there is a `sampler` what `read` makes of its answer to
    `prompt_of(row)`, if that is not None: a constant for the gradient. `batch_size` rows make a
    step; of several processes that train together each has every `ranks`-th of them. The rows of
    `refresh_steps` steps are sampled with the weights at the first of them, so none is older than
    `refresh_steps` - 1 steps. A run goes on only at such a first step, where it samples the same
    again.
    """

    text_of: Callable[[int], TokenSequence] | None
    _: KW_ONLY
    batch_size: int
    device: torch.device
    rank: int = 0
    ranks: int = 1
    sampler: Sampler | None = None
    prompt_of: Callable[[int], Sequence[int] | None] = lambda row: None
    read: Callable[[Record], TokenSequence] = sequence_of_record
    refresh_steps: int = 1
    max_steps: int = 0  # of the run, where it samples
    sampled: dict[int, Record] = field(default_factory=dict, init=False)  # by row
    _sampled_at: int = field(default=-1, init=False)

    def batch(self, step: int) -> Batch:
        """The batch of `step`, always the same for the same step and weights."""
        if self.sampler is not None:
            first = step - step % self.refresh_steps
            if step == first:
                end = max(step + 1, min(step + self.refresh_steps, self.max_steps))
                drawn = {row: self.prompt_of(row) for row in self._rows(step, end)}
                prompts = {row: prompt for row, prompt in drawn.items() if prompt is not None}
                version = f"step {step}"
                records = self.sampler.sample([*prompts.values()], rows=[*prompts], version=version)
                self.sampled, self._sampled_at = {record.row: record for record in records}, step
            assert self._sampled_at == first
        texts = []
        for row in self._rows(step, step + 1):
            if row in self.sampled:
                texts.append(self.read(self.sampled[row]))
            else:
                assert self.text_of is not None
                texts.append(self.text_of(row))
        return collate(texts, device=self.device)

    def _rows(self, first: int, end: int) -> range:
        """What this process has of the steps from `first` to before `end`."""
        size = self.batch_size
        return range(first * size, end * size)[self.rank :: self.ranks]


def make_source(
    config: Config,
    target: Outline,
    draft: Adapter,
    texts: TrainingTexts,
    *,
    rank: int = 0,
    ranks: int = 1,
) -> Source:
    """The sequences that `source` names, for which most need no weights of the target."""
    source, seed = config.source, config.seed
    shape: dict[str, Any] = {
        "batch_size": config.optim.rows_of_a_process * ranks,
        "device": draft.device,
        "rank": rank,
        "ranks": ranks,
    }

    def in_turn(items: Sequence[Item], length_of: Callable[[Item], int]) -> Callable[[int], Item]:
        lengths = [*map(length_of, items)] if config.optim.group_by_length else None
        return shuffled(items, seed, lengths=lengths, batch_size=shape["batch_size"])

    if source.name in ("fixed", "target"):
        return Source(
            in_turn(stored_sequences(texts, source.name), lambda text: len(text.token_ids)), **shape
        )
    check_sampled(config, draft)
    if source.name == "block":
        assert texts.rollouts is not None
        shape |= {"prompt_of": cut_texts(texts.rollouts, seed), "read": block_of_record}
    else:
        example_of = in_turn(texts.examples, lambda one: len(one.prompt_ids))
        shape["prompt_of"] = lambda row: example_of(row).prompt_ids
    others = None
    if source.name == "mix":
        others = shuffled(stored_sequences(texts, source.other, "source.other"), seed)
        always = shape["prompt_of"]
        shape["prompt_of"] = lambda row: (
            always(row) if row_uniform(seed, row) < source.fraction else None
        )
    return Source(
        others,
        sampler=source_sampler(config, target, draft, texts.room),
        refresh_steps=source.refresh_steps,
        max_steps=config.optim.max_steps,
        **shape,
    )


def check_source_of_head(config: Config) -> None:
    """Raise ValueError for a source in which a head would write text."""
    if config.source.name in ("draft", "mix"):
        raise ValueError(
            f"source={config.source.name}: a head reads the target's hidden states and writes no "
            "text alone: use source=target, block or replay"
        )


def check_sampled(config: Config, draft: Adapter) -> None:
    """Raise ValueError for a source that cannot sample under these settings."""
    source = config.source
    if draft.reads:
        check_source_of_head(config)
    decodes = source.name == "replay" or (source.name == "block" and draft.reads)
    if config.hardware.shard_target and decodes:
        raise ValueError(
            f"hardware.shard_target: with source={source.name} the target decodes, which it cannot "
            "in parts: use another source, or hardware.shard_target=false"
        )
    if config.decode.is_lossy and source.name == "replay":
        raise ValueError(
            "source=replay learns from what exact verification rejects, which typical does not: "
            "use decode.verification=speculative, block or match"
        )
    proposes = config.proposals > 0 or draft.blocks > 1
    if not proposes and source.name in ("block", "replay"):
        raise ValueError(
            f"decode.gamma=0 proposes nothing, and source={source.name} learns from proposals: "
            "use 1 or more"
        )


def source_sampler(config: Config, target: Outline, draft: Adapter, room: Room) -> Sampler:
    """Who samples for a source in which the draft has a part."""
    source = config.source
    rows = config.optim.rows_of_a_process * source.refresh_steps
    new = room.new
    if source.name == "block":
        new = draft.blocks if draft.blocks > 1 else config.proposals
    limits: dict[str, Any] = {
        "sampling": config.sampling,
        "eos_token_ids": target.eos_token_ids,
        "max_new_tokens": new,
        "max_length": room.total,
        "batch_size": min(config.generate.batch_size, rows),
        "seed": noise_seed(config.seed, "draft"),
    }
    if isinstance(target, RemoteTarget):
        limits["max_length"] = min(room.total, target.longest)
    if source.name == "replay":
        assert isinstance(target, Target)
        limits |= {"name": "speculative", "gamma": config.proposals}
        verification = config.decode.verification
        return DecoderSampler(
            model=target.adapter, draft=draft, verification=verification, **limits
        )
    if source.name == "block" and (draft.reads or draft.parallel is not None):
        limits |= {"name": "draft", "gamma": new, "is_block": True}
        verifier = target.adapter if isinstance(target, Target) and draft.reads else draft
        return DecoderSampler(model=verifier, draft=draft, **limits)
    return DecoderSampler(model=draft, name="draft", compiled=config.optim.compiles, **limits)


# Which item a row gets


def shuffled(
    items: Sequence[Item], seed: int, *, lengths: Sequence[int] | None = None, batch_size: int = 1
) -> Callable[[int], Item]:
    """A function from row to item: endless epochs over `items`, each in an order of its own.

    With `lengths`, of each item, the items of a batch are of like length.
    """

    @lru_cache(maxsize=1)
    def order_of(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(items), generator=generator)
        if lengths is None:
            return order
        # What fills up a batch that the epoch before began, and a last one that is not whole, stay.
        head = order[: -(epoch * len(items) % batch_size) % batch_size]
        whole = (len(order) - len(head)) // batch_size * batch_size
        body, tail = order[len(head) :].split([whole, len(order) - len(head) - whole])
        # `GROUPED` batches at a time are sorted, so that batches change from epoch to epoch.
        size_of = torch.tensor(lengths)
        parts = (lot[size_of[lot].argsort(stable=True)] for lot in body.split(GROUPED * batch_size))
        batches = torch.cat([torch.empty(0, dtype=torch.long), *parts]).view(-1, batch_size)
        batches = batches[torch.randperm(len(batches), generator=generator)]
        return torch.cat([head, batches.flatten(), tail])

    def item_of(row: int) -> Item:
        epoch, position = divmod(row, len(items))
        return items[int(order_of(epoch)[position])]

    return item_of


def row_uniform(seed: int, row: int) -> float:
    """A number in [0, 1) of a row, independent of all the noise that samples its tokens."""
    # No text has length 0, so no round ever has this key.
    key = [torch.tensor([number]) for number in (seed, row, 0)]
    return float(uniform(seed=key[0], row=key[1], length=key[2], count=1, purpose=ACCEPT))


def cut_texts(records: Sequence[Record], seed: int) -> Callable[[int], Sequence[int]]:
    """Prompts that are rollouts up to a position, uniform over the positions of their outputs."""
    record_of = shuffled(records, seed)

    def prompt_of(row: int) -> Sequence[int]:
        record = record_of(row)
        kept = int(row_uniform(seed, row) * len(record.output_ids))
        return [*record.prompt_ids, *record.output_ids[:kept]]

    return prompt_of


# Texts that are stored


def completed(examples: Sequence[Example], key: str = "source") -> Sequence[Example]:
    """Those that have something to learn. Raises ValueError where none has."""
    rows = [row for row, example in enumerate(examples) if example.has_completion]
    if not rows:
        raise ValueError(f"{key}=fixed: the data hold no answer to learn; use target")
    return Lazy(examples.__getitem__, rows)


def stored_sequences(
    texts: TrainingTexts, name: str, key: str = "source"
) -> Sequence[TokenSequence]:
    """The target's rollouts (`target`), or the completions of the data (`fixed`).

    Where scores of the target are stored, the texts that carry them.
    """
    if name == "target" or texts.scored is not None:
        records = texts.rollouts if texts.scored is None else texts.scored
        assert records is not None
        return Lazy(sequence_of_record, records)
    return Lazy(
        lambda example: TokenSequence(example.token_ids, example.loss_mask),
        completed(texts.examples, key),
    )
