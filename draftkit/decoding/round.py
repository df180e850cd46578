"""The two units of a round: propose, and verify with all that follows from it.

Both are functions of tensors that wait for nothing: no value is read on the host, no branch
depends on one. So each can be compiled as a whole (`graphs`), and what the decoder's bookkeeping
costs is all that is left of a round outside them. Beside them stands how text reaches the caches
outside of rounds.

Shapes: B rows of a group, fillers included, K proposed tokens, V vocabulary, k reported ids.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftkit.decoding.graphs import map_tensors
from draftkit.decoding.proposers import Proposal, Proposer
from draftkit.decoding.state import (
    DecodeState,
    Group,
    NoiseFunction,
    RoundView,
    Slot,
    text_of,
    to_device,
)
from draftkit.models.adapter import Adapter
from draftkit.models.cache import SlotCache, visible_slots
from draftkit.theory.acceptance import MODES
from draftkit.theory.noise import ACCEPT, NEXT
from draftkit.theory.truncation import most_likely_served
from draftkit.theory.verification import Verification, Verifier, greedy_verification
from draftkit.theory.warping import promote, seen_along, warp

REPORTED = 5  # columns of a report

WIDTH_STEPS = {"cuda": 64}  # of passes, by type of device: libraries plan each new width anew


class Bench(Protocol):
    """The part of a decoder that the units of a round need."""

    target: Adapter
    state: DecodeState
    cache: SlotCache
    eos_token_ids: Tensor  # [E]
    verifier: Verifier
    mode: str  # in which it accepts sampled proposals
    noise: NoiseFunction
    top_k: int  # of the target's likeliest ids that are reported; 0: none


class RoundInputs(NamedTuple):
    """What is new in a round."""

    group: Group
    visible: int  # cache slots that this round can need
    proposal: Proposal | None = None  # None before it is made


class Outcome(NamedTuple):
    """What verification yields, as `results.RoundResult` has it; garbage in inactive rows."""

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


def propose(resident: tuple[Proposer, Bench], inputs: RoundInputs) -> Proposal:
    """Let the proposer guess `group.gamma` tokens for every row."""
    proposer, bench = resident
    proposal = proposer.propose(round_view(bench, inputs), inputs.group.gamma)
    proposal = within_context(bench, inputs, proposal, proposer.max_positions)
    return map_tensors(Tensor.contiguous, proposal)  # compiled verification knows one layout


def within_context(
    bench: Bench, inputs: RoundInputs, proposal: Proposal, max_positions: int
) -> Proposal:
    """`proposal` as far as a model's context reaches: what lies beyond shares its last position."""
    room = (max_positions - bench.state.length[inputs.group.index]).clamp(min=0)
    return proposal._replace(lengths=torch.minimum(proposal.lengths, room))


def no_proposal(inputs: RoundInputs) -> Proposal:
    """Zero proposals a row: plain decoding."""
    index = inputs.group.index
    return Proposal(index.new_zeros(len(index), 0), None, lengths=torch.zeros_like(index))


def verify(bench: Bench, inputs: RoundInputs) -> Outcome:
    """One target pass, the verdict on the proposals, and the commitment of what passed."""
    view, proposal = round_view(bench, inputs), inputs.proposal
    assert proposal is not None
    proposal = within_context(bench, inputs, proposal, bench.target.max_positions)
    tokens = torch.cat([view.last_two[:, 1:], proposal.tokens], dim=1)
    positions = view.length[:, None] - 1 + torch.arange(tokens.shape[1], device=tokens.device)
    positions = positions.clamp(max=bench.cache.capacity - 1)  # fillers may stand anywhere
    cache = bench.cache.select(view.group.rows, visible=view.visible)
    logits = bench.target.step(tokens, positions=positions, cache=cache)  # [B, K + 1, V]
    history = None if view.seen is None else seen_along(view.seen, proposal.tokens)
    target_probs = warp(logits, view.group.params, history)  # [B, K + 1, V]
    verdict = _verdict(bench, view, proposal, target_probs)
    candidates, report = _commit(bench, view, proposal, verdict)
    acceptance = proposal_acceptance(target_probs, proposal, bench.mode)
    log_probs, log_sum_exp, served = target_log_probs(logits, candidates, view.group)
    outcome = Outcome(
        report, candidates, proposal.tokens, acceptance, log_probs, log_sum_exp, served
    )
    if bench.top_k == 0:
        return outcome
    ids, log_probs_of_ids, tail = most_likely_served(
        logits,
        bench.top_k,
        log_sum_exp=log_sum_exp,
        temperature=view.group.params.temperature[:, None],
        served_log_sum_exp=served,
    )
    return outcome._replace(topk_ids=ids, topk_log_probs=log_probs_of_ids, tail_mass=tail)


def verify_and_pack(bench: Bench, inputs: RoundInputs) -> Packed:
    """`verify`, its outcome packed."""
    return pack(verify(bench, inputs))


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


def round_view(bench: Bench, inputs: RoundInputs) -> RoundView:
    """The committed text of the rows of a round: what proposers and verification see of them."""
    state, group = bench.state, inputs.group

    def of_rows(part: Tensor) -> Tensor:
        if group.rows is None:
            return part
        return part[group.index] if isinstance(group.rows, Tensor) else part[: group.rows]

    length = of_rows(state.length).clamp(min=1)  # a free slot among the fillers has no text
    penalised = bench.target.vocab_size if group.params.uses_penalty else None
    return RoundView(
        group=group,
        visible=inputs.visible,
        seed=of_rows(state.seed),
        row=of_rows(state.row),
        noise=bench.noise,
        **text_of(of_rows(state.tokens), length, penalised),
    )


def _verdict(
    bench: Bench, view: RoundView, proposal: Proposal, target_probs: Tensor
) -> Verification:
    if view.group.greedy:
        return greedy_verification(
            target_probs=target_probs, draft_tokens=proposal.tokens, lengths=proposal.lengths
        )
    return bench.verifier(
        target_probs=target_probs,
        draft_probs=proposal.draft_probs,
        draft_tokens=proposal.tokens,
        lengths=proposal.lengths,
        accept_uniform=view.uniform(count=proposal.tokens.shape[1], purpose=ACCEPT),
        next_uniform=view.uniform(count=1, purpose=NEXT)[:, 0],
    )


def cut_round(
    candidates: Tensor, *, accepted: Tensor, remaining: Tensor, eos_token_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How much stays of `candidates` [B, K + 1], of which `accepted` [B] + 1 are verified; all [B].

    *Emitted* are tokens up to the first end of text, which is kept, at least 1; *committed* as many
    of them as the length limit allows: rates count the former, answers hold the latter. `ended`:
    whether an end-of-text id was committed; `done`: whether nothing more may follow. `remaining`
    tokens (at least 1) may still be committed; `eos_token_ids` [E] may be empty.
    """
    width = candidates.shape[1]
    index = torch.arange(width, device=candidates.device)
    # Also behind the accepted ones, unread there. (For many ids `isin` sorts, and waits for that.)
    is_end = (candidates[..., None] == eos_token_ids).any(-1)
    first_end = torch.where(is_end, index, width).amin(dim=1)
    emitted = torch.minimum(accepted, first_end) + 1
    committed = torch.minimum(emitted, remaining)
    ended = (first_end <= accepted) & (first_end < remaining)
    return emitted, committed, ended, ended | (committed == remaining)


def _commit(
    bench: Bench, view: RoundView, proposal: Proposal, verdict: Verification
) -> tuple[Tensor, Tensor]:
    """Write candidates behind the committed text, move the length pointers of active rows."""
    state, group = bench.state, view.group
    candidates = torch.cat([proposal.tokens, verdict.next_token[:, None]], dim=1)
    candidates = candidates.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])
    emitted, committed, ended, done = cut_round(
        candidates,
        accepted=verdict.accepted,
        remaining=(state.limit[group.index] - view.length).clamp(min=1),
        eos_token_ids=bench.eos_token_ids,
    )
    was_done = state.done[group.index]
    advances = group.active & ~was_done
    positions = view.length[:, None] + torch.arange(candidates.shape[1], device=candidates.device)
    positions = positions.clamp(max=state.tokens.shape[1] - 1)
    state.tokens[group.index[:, None], positions] = candidates
    length = torch.where(advances, view.length + committed, state.length[group.index])
    state.length[group.index] = length
    state.done[group.index] = was_done | (advances & done)
    columns = (emitted, committed, ended, done, proposal.lengths)
    report = torch.stack([column.long() for column in columns], dim=1)
    return candidates, report * advances[:, None]


def proposal_acceptance(target_probs: Tensor, proposal: Proposal, mode: str) -> Tensor:
    """How likely each proposal [B, K] was to be accepted when tested, given the text before it.

    mode: of `MODES`, in which sampled proposals are accepted; p(x) where q is one-hot at x.
    """
    target_probs = target_probs[:, : proposal.tokens.shape[1]]
    if proposal.draft_probs is None:
        return target_probs.gather(2, proposal.tokens[..., None])[..., 0]
    return MODES[mode](target_probs=target_probs, draft_probs=proposal.draft_probs)


def target_log_probs(
    logits: Tensor, candidates: Tensor, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p of `candidates` [B, K + 1] and the log-sum-exp at temperature 1 and served.

    Raw: neither penalties nor top-k or top-p enter, as clients and distillation expect.
    """
    raw = promote(logits)
    served = group.params.temperature.to(raw.dtype)
    served = torch.where(served > 0, served, 1.0)[:, None, None]
    log_sum_exp = raw.logsumexp(-1)
    log_probs = raw.gather(2, candidates[..., None])[..., 0] - log_sum_exp
    return log_probs, log_sum_exp, (raw / served).logsumexp(-1)


# Text that reaches the caches outside of rounds: prompts, what went by, and encoders' texts


def feed(
    bench: Bench,
    slots: Sequence[int],
    starts: Sequence[int],
    width: int,
    *,
    to_target: bool,
    proposer: Proposer | None,
) -> None:
    """Feed the `width` tokens of each of `slots` from `starts` on to target and proposer.

    A row that is shorter runs on into garbage, which lands in slots that its own tokens overwrite
    before anything sees them.
    """
    device, capacity = bench.target.device, bench.cache.capacity
    rows, first = to_device([slots, starts], device, torch.long)
    visible = visible_slots(min(max(starts) + width, capacity), capacity)
    step = WIDTH_STEPS.get(device.type, 1)
    wide = -(-width // step) * step  # what is fed beyond `width` is garbage, as in shorter rows
    positions = first[:, None] + torch.arange(wide, device=device)  # [B, N]
    positions = positions.clamp(max=capacity - 1)
    tokens = bench.state.tokens[rows].gather(1, positions)
    if to_target:
        cache = bench.cache.select(rows, visible=visible)
        bench.target.prefill(tokens, positions=positions, cache=cache)
    if proposer is not None:
        proposer.prefill(tokens, positions=positions, rows=rows, visible=visible)


def feed_encoders(bench: Bench, slots: Sequence[Slot], proposer: Proposer | None) -> None:
    """Let the encoders of target and proposer read the texts of `slots`."""
    device = bench.target.device
    texts = [list(slot.request.encoder_ids) for slot in slots]
    longest = max(map(len, texts))
    padded = [text + [0] * (longest - len(text)) for text in texts]
    tokens = to_device(padded, device, torch.long)
    columns = [[len(text) for text in texts], [slot.number for slot in slots]]
    lengths, rows = to_device(columns, device, torch.long)
    cache = bench.cache.select(rows, visible=bench.cache.capacity)
    bench.target.encode(tokens, lengths=lengths, cache=cache)
    if proposer is not None:
        proposer.encode(tokens, lengths=lengths, rows=rows)
