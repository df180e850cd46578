"""Whose sequences the draft learns on: the data's, the target's, its own, or of both.

A source answers `batch(step)` and is a function of the step alone and, where the draft has a part
in the text, of its weights at the step that sampled it; so a resumed run sees what an
uninterrupted one sees. Rows are numbered through all steps: row r is place r % batch_size of step
r // batch_size, and what it becomes is a function of (seed, r). Sampling goes through an injected
`Sampler`; this module knows no model.

`fixed`, `target`: stored texts. `draft`: the draft's own. `mix`: of either, row by row (GKD
2306.13649) or token by token (OSD 2310.07177, see `mixing`). `block`: a piece of the target's text
and a round of drafted tokens, as a server sees them. `replay`: texts of speculative decoding with
what was refused in them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.distillation.batch import Batch, TokenSequence, collate, continued
from draftkit.distillation.refresh import RolloutFiles
from draftkit.distillation.samplers import Sampler
from draftkit.theory.noise import ACCEPT, uniform

Item = TypeVar("Item")

GROUPED = 32  # batches among which items of like length are brought together


class Source(Protocol):
    """Batches by step."""

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`, always the same for the same step and weights."""
        ...


@dataclass(frozen=True)
class Grouping:
    """Lengths by item, so that the items of a batch can be of like length."""

    lengths: Sequence[int]
    batch_size: int


class ShuffledOrder:
    """Endless epochs over `count` items, each in an order of its own, addressed by position."""

    def __init__(self, count: int, seed: int, grouping: Grouping | None = None) -> None:
        self._count = count
        self._seed = seed
        self._grouping = grouping
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.long)

    def at(self, first: int, count: int) -> list[int]:
        """Return the items at positions `first` .. `first + count - 1`."""
        return [self._item(position) for position in range(first, first + count)]

    def _item(self, position: int) -> int:
        epoch, place = divmod(position, self._count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(self._count, generator=generator)
            if self._grouping is not None:
                begun = epoch * self._count % self._grouping.batch_size
                self._order = grouped(self._order, self._grouping, begun, generator)
            self._epoch = epoch
        return int(self._order[place])


def grouped(order: Tensor, grouping: Grouping, begun: int, generator: torch.Generator) -> Tensor:
    """`order` with items of like length brought together, batch by batch; the batches shuffled.

    `GROUPED` batches at a time are sorted, so that the items of a batch change from epoch to
    epoch. `begun` items of the first batch come from before: what fills it up, and a last batch
    that is not whole, stay as they are.
    """
    size = grouping.batch_size
    head = order[: -begun % size]
    whole = (len(order) - len(head)) // size * size
    body, tail = order[len(head) :].split([whole, len(order) - len(head) - whole])
    lengths = torch.tensor(grouping.lengths)
    parts = (part[lengths[part].argsort(stable=True)] for part in body.split(GROUPED * size))
    batches = torch.cat([torch.empty(0, dtype=torch.long), *parts]).view(-1, size)
    batches = batches[torch.randperm(len(batches), generator=generator)]
    return torch.cat([head, batches.flatten(), tail])


def shuffled(
    items: Sequence[Item], seed: int, grouping: Grouping | None = None
) -> Callable[[int], Item]:
    """A function from row to item, in epochs."""
    order = ShuffledOrder(len(items), seed, grouping)
    return lambda row: items[order.at(row, 1)[0]]


def row_uniform(seed: int, row: int) -> float:
    """A number in [0, 1) of a row, independent of all the noise that samples its tokens."""
    # No text has length 0, so no round ever has this key.
    key = [torch.tensor([number]) for number in (seed, row, 0)]
    drawn = uniform(seed=key[0], row=key[1], length=key[2], count=1, purpose=ACCEPT)
    return float(drawn)


def sequence_of_example(example: Example) -> TokenSequence:
    """The text of the data, loss on its completion."""
    return TokenSequence(example.token_ids, example.loss_mask)


def whole_text(example: Example) -> TokenSequence:
    """The text of the data, loss on all of it: plain pre-training."""
    return TokenSequence(example.token_ids, [False] + [True] * (len(example.token_ids) - 1))


def sequence_of_record(record: Record) -> TokenSequence:
    """A rollout, loss on its output, with what is known of it: refusals, the target's scores."""
    text, given = continued(record.prompt_ids, record.output_ids), len(record.prompt_ids)
    if record.rejected is not None:
        text = replace(text, rejected=[False] * given + record.rejected)
    return with_stored_scores(text, record)


def all_learned(text: TokenSequence) -> TokenSequence:
    """The same text, loss on the prompt too, of which no scores are stored: ask the target."""
    return replace(text, generated=[False] + [True] * (len(text.token_ids) - 1))


def with_stored_scores(text: TokenSequence, record: Record) -> TokenSequence:
    """`text`, that of `record`, with the scores that lie there, if any."""
    ids, log_probs, tails = record.topk_ids, record.topk_log_probs, record.loss_tail_mass
    if ids is None or log_probs is None or tails is None:
        return text
    given, count = len(record.prompt_ids), len(ids[0])
    return replace(
        text,
        topk_ids=[[0] * count] * given + ids,
        topk_log_probs=[[0.0] * count] * given + log_probs,
        tail_mass=[0.0] * given + tails,
    )


def block_of_record(record: Record) -> TokenSequence:
    """Tokens drafted after a text, loss on them alone; each knows how many came before it."""
    offsets = [0] * len(record.prompt_ids) + list(range(len(record.output_ids)))
    return replace(continued(record.prompt_ids, record.output_ids), block_offset=offsets)


def some_rows(
    prompt_of: Callable[[int], Sequence[int]], *, fraction: float, seed: int
) -> Callable[[int], Sequence[int] | None]:
    """`prompt_of` for a share `fraction` of the rows, None for the others."""
    return lambda row: prompt_of(row) if row_uniform(seed, row) < fraction else None


def cut_texts(records: Sequence[Record], seed: int) -> Callable[[int], Sequence[int]]:
    """Prompts that are rollouts up to a place, uniform over the positions of their outputs."""
    record_of = shuffled(records, seed)

    def prompt_of(row: int) -> Sequence[int]:
        record = record_of(row)
        kept = int(row_uniform(seed, row) * len(record.output_ids))
        return [*record.prompt_ids, *record.output_ids[:kept]]

    return prompt_of


@dataclass(frozen=True)
class Shard:
    """What one of several processes that train together has of every step: each `count`-th row."""

    index: int = 0
    count: int = 1

    def of(self, rows: range) -> range:
        return rows[self.index :: self.count]


WHOLE = Shard()


class TextSource:
    """`fixed` and `target`: stored sequences, in shuffled epochs.

    `batch_size` rows make a step, of which a batch holds those of the `shard`.
    """

    def __init__(
        self,
        sequences: Sequence[TokenSequence],
        *,
        batch_size: int,
        seed: int,
        device: torch.device,
        version: str = "",
        packed_length: int | None = None,
        grouping: Grouping | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self._text_of = shuffled(sequences, seed, grouping)
        self._shard = shard
        self._batch_size = batch_size
        self._collate = partial(
            collate, device=device, sampler_version=version, packed_length=packed_length
        )

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`."""
        rows = range(step * self._batch_size, (step + 1) * self._batch_size)
        return self._collate([self._text_of(row) for row in self._shard.of(rows)])


class SampledSource:
    """`draft`, `mix`, `block`, `replay`: texts in which the draft has a part.

    Those of several steps are sampled at once, with the weights at the first of them, which the
    `version` of a batch names; `files` keeps them. Samples are constants for the gradient.
    `prompt_of(row)` is what `sampler` shall continue, or None: then the row is `text_of(row)`.
    """

    def __init__(
        self,
        prompt_of: Callable[[int], Sequence[int] | None],
        sampler: Sampler,
        files: RolloutFiles,
        *,
        batch_size: int,
        device: torch.device,
        read: Callable[[Record], TokenSequence] = sequence_of_record,
        text_of: Callable[[int], TokenSequence] | None = None,
        packed_length: int | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self._prompt_of = prompt_of
        self._sampler = sampler
        self._files = files
        self._batch_size = batch_size
        self._collate = partial(collate, device=device, packed_length=packed_length)
        self._read = read
        self._text_of = text_of
        self._shard = shard
        self._sampled: dict[int, Record] = {}  # by row
        self._version = ""

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`; at the first step of a block, sample all its texts anew.

        Raises ValueError inside a block whose texts are neither here nor in a file.
        """
        first_step = self._files.first_step(step)
        version = f"step {first_step}"
        if step == first_step:
            records = self._sample(self._files.steps(step), version)
            self._files.write(step, records)
            self._hold(records, version)
        elif version != self._version:
            self._hold(self._files.read(step), version)
        rows = range(step * self._batch_size, (step + 1) * self._batch_size)
        return self._collate(
            [self._row(row) for row in self._shard.of(rows)], sampler_version=version
        )

    def _sample(self, steps: range, version: str) -> list[Record]:
        rows = self._shard.of(range(steps.start * self._batch_size, steps.stop * self._batch_size))
        prompts = {row: prompt for row in rows if (prompt := self._prompt_of(row)) is not None}
        return self._sampler.sample([*prompts.values()], rows=[*prompts], version=version)

    def _hold(self, records: Sequence[Record], version: str) -> None:
        self._sampled = {record.row: record for record in records}
        self._version = version

    def _row(self, row: int) -> TokenSequence:
        if self._text_of is not None and self._prompt_of(row) is None:
            return self._text_of(row)
        return self._read(self._sampled[row])
