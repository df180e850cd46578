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
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from draftkit.config import OptimConfig
from draftkit.data.rollouts import Record, read_records, write_records
from draftkit.distillation.batch import Batch, TokenSequence, collate, sequence_of_record
from draftkit.distillation.samplers import Sampler
from draftkit.theory.noise import ACCEPT, uniform

Item = TypeVar("Item")

GROUPED = 32  # batches among which items of like length are brought together


@dataclass(frozen=True)
class Grouping:
    """Lengths by item, so that the items of a batch can be of like length."""

    lengths: Sequence[int]
    batch_size: int


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
    """A function from row to item: endless epochs over `items`, each in an order of its own."""

    @lru_cache(maxsize=1)
    def order_of(epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(items), generator=generator)
        if grouping is None:
            return order
        return grouped(order, grouping, epoch * len(items) % grouping.batch_size, generator)

    def item_of(row: int) -> Item:
        epoch, position = divmod(row, len(items))
        return items[int(order_of(epoch)[position])]

    return item_of


def row_uniform(seed: int, row: int) -> float:
    """A number in [0, 1) of a row, independent of all the noise that samples its tokens."""
    # No text has length 0, so no round ever has this key.
    key = [torch.tensor([number]) for number in (seed, row, 0)]
    return float(uniform(seed=key[0], row=key[1], length=key[2], count=1, purpose=ACCEPT))


def some_rows(
    prompt_of: Callable[[int], Sequence[int]], *, fraction: float, seed: int
) -> Callable[[int], Sequence[int] | None]:
    """`prompt_of` for a share `fraction` of the rows, None for the others."""
    return lambda row: prompt_of(row) if row_uniform(seed, row) < fraction else None


def cut_texts(records: Sequence[Record], seed: int) -> Callable[[int], Sequence[int]]:
    """Prompts that are rollouts up to a position, uniform over the positions of their outputs."""
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


@dataclass
class Source:
    """Batches by step: row r of all steps is `text_of(r)`. As it is, of stored texts.

    `batch_size` rows make a step, of which a batch holds those of the `shard`.
    """

    text_of: Callable[[int], TokenSequence]
    _: KW_ONLY
    batch_size: int
    device: torch.device
    version: str = ""
    packed_length: int | None = None
    shard: Shard = WHOLE

    def _rows(self, steps: range) -> range:
        size = self.batch_size
        return self.shard.of(range(steps.start * size, steps.stop * size))

    def batch(self, step: int) -> Batch:
        """The batch of `step`, always the same for the same step and weights."""
        return collate(
            [self.text_of(row) for row in self._rows(range(step, step + 1))],
            device=self.device,
            sampler_version=self.version,
            packed_length=self.packed_length,
        )


@dataclass(frozen=True, kw_only=True)
class RolloutFiles:
    """The texts that were sampled with the draft of one step, for that step and some after it.

    With `refresh_steps` R those of steps kR .. kR + R - 1 are sampled at step kR, with its weights,
    so none is older than R - 1 steps. A run that goes on inside such a block reads its texts from
    `step-<kR>.parquet`; one that goes on at its start samples them again, which gives the same, so
    that with R = 1 there is none. A file is deleted once no checkpoint can lead back into its
    block: at any time at most save_steps / R + 2 of them exist.

    `optim` says how many steps there are, and after how many at most a checkpoint is written. Of
    several processes that train together each has files of its own, told apart by `suffix`.
    """

    folder: Path
    refresh_steps: int
    optim: OptimConfig
    suffix: str = ""

    def block(self, step: int) -> range:
        """The steps whose texts are sampled together with those of `step`."""
        first = step - step % self.refresh_steps
        return range(first, max(first + 1, min(first + self.refresh_steps, self.optim.max_steps)))

    def path(self, step: int) -> Path:
        """Where the texts of `step` lie."""
        return self.folder / f"step-{self.block(step).start:08d}{self.suffix}.parquet"

    def write(self, step: int, records: Sequence[Record]) -> None:
        """Keep the texts of the block that begins at `step`, and forget what is over."""
        write_records(self.path(step), records)
        # Checkpoints come at least at the multiples of save_steps, before the next batch.
        oldest = self.path(step - step % self.optim.save_steps)
        for path in self.folder.glob(f"step-????????{self.suffix}.parquet"):
            if path.name < oldest.name:
                path.unlink()

    def read(self, step: int) -> list[Record]:
        """The texts of the block of `step`. Raises ValueError where they are gone or damaged."""
        try:
            return read_records(self.path(step))
        except ValueError as error:
            raise ValueError(
                f"{self.path(step)}: a run that goes on at step {step} needs it, and it is gone or"
                " damaged: overwrite=true starts the run anew"
            ) from error


class SampledSource(Source):
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
        def text(row: int) -> TokenSequence:
            if text_of is not None and prompt_of(row) is None:
                return text_of(row)
            return read(self._sampled[row])

        super().__init__(
            text, batch_size=batch_size, device=device, packed_length=packed_length, shard=shard
        )
        self._prompt_of = prompt_of
        self._sampler = sampler
        self._files = files
        self._sampled: dict[int, Record] = {}  # by row

    def batch(self, step: int) -> Batch:
        """Return the batch of `step`; at the first step of a block, sample all its texts anew.

        Raises ValueError inside a block whose texts are neither here nor in a file.
        """
        block = self._files.block(step)
        version = f"step {block.start}"
        if step == block.start:
            rows = self._rows(block)
            prompts = {row: prompt for row in rows if (prompt := self._prompt_of(row)) is not None}
            records = self._sampler.sample([*prompts.values()], rows=[*prompts], version=version)
            if self._files.refresh_steps > 1:  # else nothing goes on inside of it
                self._files.write(step, records)
        elif version != self.version:
            records = self._files.read(step)
        else:
            return super().batch(step)
        self._sampled = {record.row: record for record in records}
        self.version = version
        return super().batch(step)
