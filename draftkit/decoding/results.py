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

from draftkit.decoding.state import Group, Slot

REPORTED = 5  # columns of a report


class Outcome(NamedTuple):
    """What verification yields, as `RoundResult` has it; garbage in inactive rows."""

    report: Tensor  # [B, REPORTED] int64: emitted, committed, ended, done, valid proposals
    tokens: Tensor
    draft_tokens: Tensor
    acceptance: Tensor
    target_log_probs: Tensor
    log_sum_exp: Tensor
    served_log_sum_exp: Tensor
    topk_ids: Tensor | None = None
    topk_log_probs: Tensor | None = None
    tail_mass: Tensor | None = None


class Packed(NamedTuple):
    """An outcome in two tensors: two copies bring all of it."""

    integers: Tensor  # [B, I] int64
    numbers: Tensor  # [B, F] of the outcome's floats, in the widest of their precisions

    def select(self, rows: Tensor) -> "Packed":
        return Packed(self.integers[rows], self.numbers[rows])


def pack(outcome: Outcome) -> Packed:
    """The parts of `outcome` side by side, in their order."""
    parts = [part.flatten(1) for part in outcome if part is not None]
    integers = [part for part in parts if part.dtype == torch.long]
    numbers = [part for part in parts if part.dtype != torch.long]
    return Packed(torch.cat(integers, dim=1), torch.cat(numbers, dim=1))


def unpack(packed: Packed, *, gamma: int) -> Outcome:
    """What was packed of a round with `gamma` proposals a row."""
    wide = gamma + 1
    likeliest = packed.integers.shape[1] - REPORTED - wide - gamma
    report, tokens, draft_tokens, ids = packed.integers.split(
        [REPORTED, wide, gamma, likeliest], dim=1
    )
    acceptance, log_probs, log_sum_exp, served, log_probs_of_ids, tail = packed.numbers.split(
        [gamma, wide, wide, wide, likeliest, wide if likeliest else 0], dim=1
    )
    outcome = Outcome(report, tokens, draft_tokens, acceptance, log_probs, log_sum_exp, served)
    if likeliest == 0:
        return outcome
    ids, log_probs_of_ids = (part.unflatten(1, (wide, -1)) for part in (ids, log_probs_of_ids))
    return outcome._replace(topk_ids=ids, topk_log_probs=log_probs_of_ids, tail_mass=tail)


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
    packed: Packed  # on the host, to be read after `ready`
    ready: torch.cuda.Event | None


def to_host(packed: Packed) -> tuple[Packed, torch.cuda.Event | None]:
    """Queue copies to the host of what is on a device, which may then be written over."""
    if not packed.integers.is_cuda:
        return packed, None
    on_host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in packed]
    for copy, tensor in zip(on_host, packed, strict=True):
        copy.copy_(tensor, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(packed.integers.device))
    return Packed(*on_host), ready


def read(launched: Launched, slots: Mapping[int, Slot]) -> RoundResult:
    """The rows of a launched round that moved and whose requests are still in `slots`."""
    group, packed = launched.group, launched.packed
    if launched.ready is not None:
        launched.ready.synchronize()  # what the device does later is not awaited
    emitted = packed.integers[:, 0].tolist()
    members = zip(group.members.items(), launched.held, strict=True)
    kept = [(n, row) for (n, row), held in members if slots.get(n) is held and emitted[row] > 0]
    if len(kept) < len(emitted):
        packed = packed.select(torch.tensor([row for _, row in kept], dtype=torch.long))
    tensors = unpack(packed, gamma=group.gamma)._asdict()
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
