"""What a round did, brought from the device to the host without making either wait.

A round is *launched*, and all that it reports is copied behind it; it is *read* when the host
needs it, at once or a round later, when the device is at work on the next. A request may have left
in between: then its row is dropped. Copies to page-locked memory are queued like any other work of
the device; any other copy, and a look at a value there, would wait for all that it still has to do.

Shapes: B rows of a group, K proposed tokens, k reported ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.decoding.graphs import map_tensors, tensors_of
from draftkit.decoding.state import Group, Slot


class Outcome(NamedTuple):
    """What verification yields, as `RoundResult` has it; garbage in inactive rows."""

    report: Tensor  # [B, 5] int64: emitted, committed, ended, done, valid proposals
    tokens: Tensor
    draft_tokens: Tensor
    acceptance: Tensor
    target_log_probs: Tensor
    log_sum_exp: Tensor
    served_log_sum_exp: Tensor
    topk_ids: Tensor | None = None
    topk_log_probs: Tensor | None = None
    tail_mass: Tensor | None = None


class RoundSeconds(NamedTuple):
    """Where the time of a round went; zeros without a clock."""

    propose: float
    verify: float
    rest: float


NO_SECONDS = RoundSeconds(0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What one group of rows did in one round; all tensors are on the host."""

    slots: list[int]
    gamma: int
    proposer_version: str
    seconds: RoundSeconds = NO_SECONDS
    emitted: list[int]  # tokens a target pass yielded, the length limit not applied
    committed: list[int]
    ended: list[bool]  # by an end-of-text id
    done: list[bool]
    lengths: list[int]  # valid proposals, at most K
    tokens: Tensor  # [B, K + 1] candidates; the first `committed` of a row count
    draft_tokens: Tensor  # [B, K]
    acceptance: Tensor  # [B, K] the chance of each proposal to be accepted when tested
    target_log_probs: Tensor  # [B, K + 1] log p of the candidates, raw (temperature 1)
    log_sum_exp: Tensor  # [B, K + 1] of the raw logits
    served_log_sum_exp: Tensor  # [B, K + 1] of logits / temperature (1 where greedy)
    # Where wanted: the target's likeliest ids [B, K + 1, k] beside each candidate, their log p
    # (temperature 1), and the mass [B, K + 1] of all others at the served temperature, 1 if greedy.
    topk_ids: Tensor | None = None
    topk_log_probs: Tensor | None = None
    tail_mass: Tensor | None = None

    @property
    def tested(self) -> list[int]:
        """Proposals of each row that were put to the test."""
        return [min(emitted, n) for emitted, n in zip(self.emitted, self.lengths, strict=True)]

    @property
    def full_tests(self) -> list[int]:
        """Accepted proposals of the rows whose `gamma` proposals were all open to acceptance."""
        rows = zip(self.emitted, self.ended, self.lengths, strict=True)
        return [emitted - 1 for emitted, ended, n in rows if not ended and n == self.gamma]


class Launched(NamedTuple):
    """A round whose kernels are queued, with its results on the way to the host."""

    group: Group
    held: list[Slot]  # what its slots held, in their order
    proposer_version: str
    ticks: list[float]
    outcome: Outcome  # on the host, to be read after `ready`
    ready: torch.cuda.Event | None


def to_host(outcome: Outcome) -> tuple[Outcome, torch.cuda.Event | None]:
    """Queue a copy to the host of what is on a device, which may then be written over.

    One of all parts, since each copy is a call of its own: the widest first, so that every part
    begins where its type may lie.
    """
    if not outcome.report.is_cuda:
        return outcome, None
    parts = sorted(tensors_of(outcome), key=lambda part: part.itemsize, reverse=True)
    joined = torch.cat([part.flatten().view(torch.int8) for part in parts])
    on_host = torch.empty(joined.shape, dtype=torch.int8, pin_memory=True)
    on_host.copy_(joined, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(outcome.report.device))
    bytes_of = dict(zip(map(id, parts), on_host.split([p.nbytes for p in parts]), strict=True))
    return map_tensors(lambda p: bytes_of[id(p)].view(p.dtype).view(p.shape), outcome), ready


def read(launched: Launched, slots: Mapping[int, Slot]) -> RoundResult:
    """The rows of a launched round that moved and whose requests are still in `slots`."""
    group, outcome = launched.group, launched.outcome
    if launched.ready is not None:
        launched.ready.synchronize()  # what the device does later is not awaited
    emitted = outcome.report[:, 0].tolist()
    members = zip(group.members.items(), launched.held, strict=True)
    kept = [(n, row) for (n, row), held in members if slots.get(n) is held and emitted[row] > 0]
    if len(kept) < len(emitted):
        rows = torch.tensor([row for _, row in kept], dtype=torch.long)
        outcome = map_tensors(lambda part: part[rows], outcome)
    tensors = outcome._asdict()
    emitted, committed, ended, done, lengths = tensors.pop("report").T.tolist()
    return RoundResult(
        slots=[number for number, _ in kept],
        gamma=group.gamma,
        proposer_version=launched.proposer_version,
        emitted=emitted,
        committed=committed,
        ended=[bool(flag) for flag in ended],
        done=[bool(flag) for flag in done],
        lengths=lengths,
        **tensors,
    )
