"""What of the traffic an update learns from: which records, how many of each kind, and as what.

Pure functions of records and settings; knows no file and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftkit.config import OnlineConfig
from draftkit.data.rollouts import Record
from draftkit.distillation.batch import TokenSequence, all_learned, sequence_of_record

RECENT_FRACTION = 0.5  # of the rows of a step


@dataclass(frozen=True)
class Anchors:
    """Text of before: rows to mix in, and held-out ones for the gate. Either may be empty."""

    train: Sequence[Record] = ()
    held_out: Sequence[Record] = ()


def with_scores(records: Sequence[Record], *, temperature: float, width: int) -> list[Record]:
    """Those whose stored scores a loss at `temperature` can use, with the tail that it reads.

    That takes the mass outside the stored ids at this very temperature, so that they were served
    at it, and `width` ids a token, so that rows fit into one batch.
    """
    return [
        replace(record, loss_tail_mass=record.loss_tail_mass or record.tail_mass)
        for record in records
        if record.topk_ids is not None
        and (record.sampling["temperature"] or 1.0) == temperature  # stored tails are at 1 for 0
        and all(len(ids) == width for ids in record.topk_ids)
    ]


def kinds(
    size: int, settings: OnlineConfig, *, has_older: bool, has_anchors: bool
) -> tuple[int, int, int]:
    """How many of `size` rows are recent, older and anchors.

    A kind of which there is nothing leaves its room to recent ones.
    """
    anchors = round(size * settings.anchor_fraction) if has_anchors else 0
    fresh = min(round(size * RECENT_FRACTION), size - anchors)
    older = size - anchors - fresh if has_older else 0
    return size - anchors - older, older, anchors


def drawn(
    pools: tuple[Sequence[Record], Sequence[Record], Sequence[Record]],
    size: int,
    settings: OnlineConfig,
    generator: torch.Generator,
) -> list[TokenSequence]:
    """`size` rows of recent, older and anchor records, each kind in its share."""
    _, older, anchors = pools
    counts = kinds(size, settings, has_older=bool(older), has_anchors=bool(anchors))
    return [
        row_of(records[index], prompts=settings.prompts)
        for records, count in zip(pools, counts, strict=True)
        for index in chosen(len(records), count, generator)
    ]


def row_of(record: Record, *, prompts: bool) -> TokenSequence:
    """A record's text; where nobody knows what was refused, all of it counts as if it had been.

    With `prompts` the prompt is learned from too, though nobody proposed it.
    """
    text = sequence_of_record(record)
    if text.rejected is None:
        text = replace(text, rejected=list(text.generated))
    return all_learned(text) if prompts else text


def chosen(count: int, wanted: int, generator: torch.Generator) -> list[int]:
    """`wanted` indices below `count`, none twice while there are enough."""
    if wanted == 0:
        return []
    rounds = -(-wanted // count)
    order = [torch.randperm(count, generator=generator) for _ in range(rounds)]
    return torch.cat(order)[:wanted].tolist()
