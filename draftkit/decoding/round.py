"""The two units of a round: propose, and verify with all that follows from it.

Both are functions of tensors that wait for nothing: no value is read on the host, no branch
depends on one. So each can be compiled as a whole (`graphs`), and what the decoder's bookkeeping
costs is all that is left of a round outside them.

Shapes: B rows of a group, fillers included, K proposed tokens, V vocabulary, k reported ids.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftkit.decoding.cache import SlotCache
from draftkit.decoding.graphs import map_tensors
from draftkit.decoding.proposers import Proposal, Proposer
from draftkit.decoding.state import DecodeState, Group, NoiseFunction, RoundView, view_of
from draftkit.decoding.stopping import cut_round
from draftkit.models.adapter import Adapter
from draftkit.theory.acceptance import sampled_acceptance
from draftkit.theory.noise import ACCEPT, NEXT
from draftkit.theory.truncation import most_likely_served
from draftkit.theory.verification import Verification, Verifier, greedy_verification
from draftkit.theory.warping import promote, seen_along, warp

REPORTED = 5  # columns of a report


class Bench(Protocol):
    """Where a round takes place: the part of a decoder that its units need."""

    target: Adapter
    state: DecodeState
    cache: SlotCache
    eos_token_ids: Tensor  # [E]
    verifier: Verifier
    noise: NoiseFunction
    top_k: int  # of the target's likeliest ids that are reported; 0: none


class RoundInputs(NamedTuple):
    """What is new in a round."""

    group: Group
    visible: int  # cache slots that this round can need
    proposal: Proposal | None = None  # None before it is made


class Outcome(NamedTuple):
    """What verification yields; garbage in rows that are not active."""

    report: Tensor  # [B, REPORTED] int64: emitted, committed, ended, done, valid proposals
    tokens: Tensor  # [B, K + 1] candidates, the first `committed` of which count
    acceptance: Tensor  # [B, K]
    log_probs: Tensor  # [B, K + 1]
    log_sum_exp: Tensor  # [B, K + 1]
    served_log_sum_exp: Tensor  # [B, K + 1]
    topk_ids: Tensor | None = None  # [B, K + 1, k]
    topk_log_probs: Tensor | None = None  # [B, K + 1, k]
    tail_mass: Tensor | None = None  # [B, K + 1]


class Packed(NamedTuple):
    """An outcome and the proposals that it judges, in two tensors: two copies bring all of it."""

    integers: Tensor  # [B, I] int64
    numbers: Tensor  # [B, F] of the outcome's floats, in the widest of their precisions

    def select(self, places: Tensor) -> "Packed":
        return Packed(self.integers[places], self.numbers[places])


def propose(places: tuple[Proposer, Bench], inputs: RoundInputs) -> Proposal:
    """Let the proposer guess `group.gamma` tokens for every row."""
    proposer, bench = places
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
    logits = _target_logits(bench, view, proposal)
    history = None if view.seen is None else seen_along(view.seen, proposal.tokens)
    target_probs = warp(logits, view.group.params, history)  # [B, K + 1, V]
    verdict = _verdict(bench, view, proposal, target_probs)
    candidates, report = _commit(bench, view, proposal, verdict)
    log_probs, log_sum_exp, served = target_log_probs(logits, candidates, view.group)
    most_likely = (None, None, None)
    if bench.top_k > 0:
        most_likely = most_likely_served(
            logits,
            bench.top_k,
            log_sum_exp=log_sum_exp,
            temperature=view.group.params.temperature[:, None],
            served_log_sum_exp=served,
        )
    ids, log_probs_of_ids, tail = most_likely
    return Outcome(
        report=report,
        tokens=candidates,
        acceptance=proposal_acceptance(target_probs, proposal),
        log_probs=log_probs,
        log_sum_exp=log_sum_exp,
        served_log_sum_exp=served,
        topk_ids=ids,
        topk_log_probs=log_probs_of_ids,
        tail_mass=tail,
    )


def verify_and_pack(bench: Bench, inputs: RoundInputs) -> Packed:
    """`verify`, its outcome packed with the proposals."""
    assert inputs.proposal is not None
    return pack(verify(bench, inputs), inputs.proposal.tokens)


def pack(outcome: Outcome, draft_tokens: Tensor) -> Packed:
    """`outcome` with `draft_tokens` [B, K]."""
    integers = [outcome.report, outcome.tokens, draft_tokens]
    numbers = [
        *(outcome.acceptance, outcome.log_probs),
        *(outcome.log_sum_exp, outcome.served_log_sum_exp),
    ]
    if outcome.topk_ids is not None:
        assert outcome.topk_log_probs is not None
        assert outcome.tail_mass is not None
        integers.append(outcome.topk_ids.flatten(1))
        numbers += [outcome.topk_log_probs.flatten(1), outcome.tail_mass]
    return Packed(torch.cat(integers, dim=1), torch.cat(numbers, dim=1))


def unpack(packed: Packed, *, gamma: int, top_k: int) -> tuple[Outcome, Tensor]:
    """The outcome and the draft tokens [B, K] of a round with `gamma` proposals a row.

    top_k: how many of the target's likeliest ids it reports.
    """
    wide, likeliest = gamma + 1, (gamma + 1) * top_k
    report, tokens, draft_tokens, ids = packed.integers.split(
        [REPORTED, wide, gamma, likeliest], dim=1
    )
    acceptance, log_probs, log_sum_exp, served, log_probs_of_ids, tail = packed.numbers.split(
        [gamma, wide, wide, wide, likeliest, wide if top_k else 0], dim=1
    )
    outcome = Outcome(report, tokens, acceptance, log_probs, log_sum_exp, served)
    if top_k > 0:
        shape = (wide, top_k)
        outcome = outcome._replace(
            topk_ids=ids.unflatten(1, shape),
            topk_log_probs=log_probs_of_ids.unflatten(1, shape),
            tail_mass=tail,
        )
    return outcome, draft_tokens


def round_view(bench: Bench, inputs: RoundInputs) -> RoundView:
    """What proposers and verification see of the rows of a round."""
    return view_of(
        bench.state,
        inputs.group,
        visible=inputs.visible,
        vocab_size=bench.target.vocab_size,
        noise=bench.noise,
    )


def _target_logits(bench: Bench, view: RoundView, proposal: Proposal) -> Tensor:
    """One target pass over the last committed token and the proposals: [B, K + 1, V]."""
    tokens = torch.cat([view.last_two[:, 1:], proposal.tokens], dim=1)
    positions = view.length[:, None] - 1 + torch.arange(tokens.shape[1], device=tokens.device)
    positions = positions.clamp(max=bench.cache.capacity - 1)  # fillers may stand anywhere
    cache = bench.cache.select(view.group.rows, visible=view.visible)
    return bench.target.step(tokens, positions=positions, cache=cache)


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


def _commit(
    bench: Bench, view: RoundView, proposal: Proposal, verdict: Verification
) -> tuple[Tensor, Tensor]:
    """Write candidates behind the committed text, move the length pointers of active rows."""
    state, group = bench.state, view.group
    candidates = torch.cat([proposal.tokens, verdict.next_token[:, None]], dim=1)
    candidates = candidates.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])
    cut = cut_round(
        candidates,
        accepted=verdict.accepted,
        remaining=(state.limit[group.index] - view.length).clamp(min=1),
        eos_token_ids=bench.eos_token_ids,
    )
    was_done = state.done[group.index]
    advances = group.active & ~was_done
    places = view.length[:, None] + torch.arange(candidates.shape[1], device=candidates.device)
    places = places.clamp(max=state.tokens.shape[1] - 1)
    state.tokens[group.index[:, None], places] = candidates
    length = torch.where(advances, view.length + cut.committed, state.length[group.index])
    state.length[group.index] = length
    state.done[group.index] = was_done | (advances & cut.done)
    columns = (cut.emitted, cut.committed, cut.ended, cut.done, proposal.lengths)
    report = torch.stack([column.long() for column in columns], dim=1)
    return candidates, report * advances[:, None]


def proposal_acceptance(target_probs: Tensor, proposal: Proposal) -> Tensor:
    """Return sum_x min(p, q) [B, K] at each proposed position; p(x) where q is one-hot at x."""
    target_probs = target_probs[:, : proposal.tokens.shape[1]]
    if proposal.draft_probs is None:
        return target_probs.gather(2, proposal.tokens[..., None])[..., 0]
    return sampled_acceptance(target_probs=target_probs, draft_probs=proposal.draft_probs)


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
