"""What a round did, brought from the device to the host without making either wait.

A round is *launched*, and all that it reports is copied behind it; it is *read* when the host
needs it, at once or a round later, when the device is at work on the next. A request may have left
in between: then its row is dropped.

Shapes: B rows of a group, K proposed tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.decoding.round import REPORTED, Packed, unpack
from draftkit.decoding.state import Group
from draftkit.decoding.transfer import Arriving, to_host


class RoundSeconds(NamedTuple):
    """Where the time of a round went; zeros without a clock."""

    propose: float
    verify: float
    rest: float


NO_SECONDS = RoundSeconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RoundResult:
    """What one group of rows did in one round; all tensors are on the host."""

    slots: list[int]
    tokens: Tensor  # [B, K + 1] candidates; the first `committed` of a row count
    committed: list[int]
    emitted: list[int]  # tokens a target pass yielded, the length limit not applied
    ended: list[bool]  # by an end-of-text id
    done: list[bool]
    gamma: int
    lengths: list[int]  # valid proposals, at most K
    draft_tokens: Tensor  # [B, K]
    acceptance: Tensor  # [B, K] sum_x min(p, q) at each proposed position
    target_log_probs: Tensor  # [B, K + 1] log p of the candidates, raw (temperature 1)
    log_sum_exp: Tensor  # [B, K + 1] of the raw logits
    served_log_sum_exp: Tensor  # [B, K + 1] of logits / temperature (1 where greedy)
    proposer_version: str
    seconds: RoundSeconds = NO_SECONDS
    # The target's likeliest ids [B, K + 1, k] at each candidate's place, where asked for, their
    # log p (temperature 1), and the mass [B, K + 1] of all others at the served temperature (1
    # where greedy).
    topk_ids: Tensor | None = None
    topk_log_probs: Tensor | None = None
    tail_mass: Tensor | None = None


class Launched(NamedTuple):
    """A round whose results have not been read."""

    group: Group
    tickets: list[int]  # of the requests that held the slots
    packed: Arriving  # what `round.unpack` takes
    top_k: int
    proposer_version: str
    ticks: list[float]


def launch(
    group: Group,
    tickets: list[int],
    packed: Packed,
    top_k: int,
    proposer_version: str,
    ticks: list[float],
) -> Launched:
    """A round whose kernels are queued, with its results on the way to the host."""
    return Launched(group, tickets, to_host(*packed), top_k, proposer_version, ticks)


def read(launched: Launched, tickets: Mapping[int, int]) -> RoundResult:
    """The rows of a launched round that `tickets` (slot -> request) still knows and that moved."""
    group, packed = launched.group, Packed(*launched.packed.wait())
    report = packed.integers[:, :REPORTED].tolist()
    places = range(len(group.slots)) if group.places is None else group.places
    kept = [
        (slot, place)
        for slot, ticket, place in zip(group.slots, launched.tickets, places, strict=True)
        if tickets.get(slot) == ticket and report[place][0] > 0
    ]
    if len(kept) < len(report):
        packed = packed.select(torch.tensor([place for _, place in kept], dtype=torch.long))
    outcome, draft_tokens = unpack(packed, gamma=group.gamma, top_k=launched.top_k)
    rows = [report[place] for _, place in kept]
    emitted, committed, ended, done, lengths = ([row[i] for row in rows] for i in range(5))
    return RoundResult(
        slots=[slot for slot, _ in kept],
        tokens=outcome.tokens,
        committed=committed,
        emitted=emitted,
        ended=[bool(flag) for flag in ended],
        done=[bool(flag) for flag in done],
        gamma=group.gamma,
        lengths=lengths,
        draft_tokens=draft_tokens,
        acceptance=outcome.acceptance,
        target_log_probs=outcome.log_probs,
        log_sum_exp=outcome.log_sum_exp,
        served_log_sum_exp=outcome.served_log_sum_exp,
        proposer_version=launched.proposer_version,
        topk_ids=outcome.topk_ids,
        topk_log_probs=outcome.topk_log_probs,
        tail_mass=outcome.tail_mass,
    )


def full_tests(result: RoundResult) -> list[int]:
    """Accepted proposals of the rows whose `gamma` proposals were all open to acceptance."""
    rows = zip(result.emitted, result.ended, result.lengths, strict=True)
    return [emitted - 1 for emitted, ended, n in rows if not ended and n == result.gamma]
