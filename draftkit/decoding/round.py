"""One round of speculative decoding, as two units of tensors: propose, and verify.

For a text, K proposals, and the laws q of the draft and p of the target, both as served
(Leviathan et al. 2211.17192, Algorithm 1; `theory.verification` has the rules):

    propose     x_1 .. x_K      the proposer draws x_i from q_i, given the text and x_1 .. x_(i-1)
    verify      p_1 .. p_(K+1)  one pass of the target over the last token and the proposals
    _accepted   n               x_i passes with probability min(1, p_i(x_i) / q_i(x_i)); n pass
                y               from norm(max(0, p_(n+1) - q_(n+1))); from p_(K+1) where all pass
    _commit     x_1 .. x_n, y   become text, up to an end of text or the length limit

Both units wait for nothing: no value is read on the host, no branch depends on one. So each can be
compiled as a whole (`graphs`), and what the decoder's bookkeeping costs is all that is left of a
round outside them.

Shapes: B rows of a group, fillers included, K proposed tokens, V vocabulary, k reported ids.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from draftkit.decoding.graphs import map_tensors
from draftkit.decoding.proposers import Proposal, Proposer
from draftkit.decoding.results import Outcome
from draftkit.decoding.state import DecodeState, Group, NoiseFunction, RoundView, text_of
from draftkit.decoding.trees import longest, walk
from draftkit.models.adapter import Adapter
from draftkit.models.cache import SlotCache
from draftkit.theory.acceptance import MODES
from draftkit.theory.noise import ACCEPT, NEXT, sample
from draftkit.theory.truncation import most_likely_served
from draftkit.theory.verification import (
    Verification,
    Verifier,
    greedy_verification,
    match_verification,
    typical_bound,
    typical_verification,
)
from draftkit.theory.warping import promote, seen_along, warp

Draws = tuple[Tensor, Tensor]  # uniforms [B, K] and [B]


class Bench(Protocol):
    """The part of a decoder that the units of a round need."""

    target: Adapter
    state: DecodeState
    cache: SlotCache
    eos_token_ids: Tensor  # [E]
    verifier: Verifier
    mode: str  # in which it accepts sampled proposals
    epsilon: float | None  # of typical acceptance, in place of the verifier
    noise: NoiseFunction
    top_k: int  # of the target's likeliest ids that are reported; 0: none


class RoundInputs(NamedTuple):
    """What is new in a round."""

    group: Group
    visible: int  # cache slots that this round can need
    proposal: Proposal | None = None  # None before it is made


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
    """One target pass, the verification of the proposals, and the commitment of what passed.

    Of a tree the path that holds the target's own tokens is found first. It is a chain like others.
    """
    view, proposal = round_view(bench, inputs), inputs.proposal
    assert proposal is not None
    proposal = within_context(bench, inputs, proposal, bench.target.max_positions)
    logits, draws = _target_pass(bench, view, proposal), _draws(view)
    options = None
    if view.group.tree is not None:
        logits, proposal, options = _along_path(bench, view, proposal, logits, draws)
    history = None if view.seen is None else seen_along(view.seen, proposal.tokens)
    target_probs = warp(logits, view.group.params, history)  # [B, K + 1, V]
    verification = _accepted(bench, view, proposal, target_probs, draws)
    candidates, report = _commit(bench, view, proposal, verification)
    acceptance = proposal_acceptance(target_probs, proposal, bench.mode, options, bench.epsilon)
    log_probs, log_sum_exp, served = target_log_probs(logits, candidates, view.group)
    common = report, candidates, proposal.tokens, acceptance, log_probs, log_sum_exp, served
    if bench.top_k == 0:
        return Outcome(*common)
    ids, log_probs_of_ids, tail = most_likely_served(
        logits,
        bench.top_k,
        log_sum_exp=log_sum_exp,
        temperature=view.group.params.temperature[:, None],
        served_log_sum_exp=served,
    )
    return Outcome(*common, topk_ids=ids, topk_log_probs=log_probs_of_ids, tail_mass=tail)


def _target_pass(bench: Bench, view: RoundView, proposal: Proposal) -> Tensor:
    """The target's logits [B, K + 1, V] after the text and after each proposal, or node."""
    tokens = torch.cat([view.last_two[:, 1:], proposal.tokens], dim=1)
    first, tree, branches = view.length - 1, view.group.tree, None
    depths = torch.arange(tokens.shape[1], device=tokens.device) if tree is None else tree.depths
    if tree is not None:
        branches = tree.branches(first, 0, tokens.shape[1])
    positions = first[:, None] + depths
    positions = positions.clamp(max=bench.cache.capacity - 1)  # fillers may stand anywhere
    cache = bench.cache.select(view.group.rows, visible=view.visible, branches=branches)
    return bench.target.step(tokens, positions=positions, cache=cache)


def _along_path(
    bench: Bench, view: RoundView, proposal: Proposal, logits: Tensor, draws: Draws | None
) -> tuple[Tensor, Proposal, Tensor]:
    """One path of the tree as a chain: what follows its nodes, its proposals, and the children.

    It goes down while the target's own token is a child's, or along the longest path of typical
    ones. What the target keeps of its nodes is moved to where a chain would have left it.
    """
    tree, rows = view.group.tree, torch.arange(len(logits), device=logits.device)
    assert tree is not None
    fed = torch.cat([view.last_two[:, 1:], proposal.tokens], dim=1)  # [B, N + 1]
    seen, own_path = view.seen, None
    if bench.epsilon is not None and draws is not None:
        history = None if seen is None else seen_along(seen, proposal.tokens, tree.seen[:, 1:])
        probs = warp(logits, view.group.params, history)  # [B, N + 1, V]
        bound = typical_bound(target_probs=probs, epsilon=bench.epsilon)[:, tree.above]
        own = probs[rows[:, None], tree.above, fed]
        passes = (own > bound) & (tree.depths <= proposal.lengths[:, None])
        own_path = longest(tree, passes, own.log())

    def is_own(depth: int, node: Tensor, children: Tensor) -> Tensor:
        """Which children [B, W] of `node` [B] hold the token that the target chooses there."""
        nonlocal seen
        if own_path is not None:
            return own_path.gather(1, children)
        if seen is not None:
            seen = seen.scatter(1, fed.gather(1, node[:, None]), True)
        history = None if seen is None else seen[:, None]
        probs = warp(logits[rows, node][:, None], view.group.params, history)[:, 0]
        own = sample(probs=probs, uniform=draws[0][:, depth]) if draws else probs.argmax(-1)
        return fed.gather(1, children) == own[:, None]

    path, lengths = walk(tree, len(rows), is_own)
    tokens = fed.gather(1, path[:, 1:])
    target = torch.arange(path.shape[1], device=path.device) + view.length[:, None] - 1
    source = view.length[:, None] - 1 + path
    last = bench.cache.capacity - 1
    bench.cache.move(source[:, 1:].clamp(max=last), target[:, 1:].clamp(max=last))
    children = tree.children[path[:, :-1]]  # [B, D, W]
    options = fed.gather(1, children.flatten(1)).view_as(children).where(children > 0, -1)
    chain = Proposal(tokens, None, lengths=torch.minimum(lengths, proposal.lengths))
    return logits[rows[:, None], path], chain, options


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
        streams=bench.cache.streams,
        **text_of(of_rows(state.tokens), length, penalised),
    )


def _draws(view: RoundView) -> Draws | None:
    """The numbers that proposals are tested with, and the next token is drawn by."""
    if view.group.greedy:
        return None
    accept = view.uniform(count=view.group.gamma, purpose=ACCEPT)
    return accept, view.uniform(count=1, purpose=NEXT)[:, 0]


def _accepted(
    bench: Bench,
    view: RoundView,
    proposal: Proposal,
    target_probs: Tensor,
    draws: Draws | None,
) -> Verification:
    if draws is None:
        return greedy_verification(
            target_probs=target_probs, draft_tokens=proposal.tokens, lengths=proposal.lengths
        )
    if bench.epsilon is not None:
        return typical_verification(
            target_probs=target_probs,
            draft_tokens=proposal.tokens,
            lengths=proposal.lengths,
            epsilon=bench.epsilon,
        )
    # The path of a tree follows the target's own tokens.
    verifier = bench.verifier if view.group.tree is None else match_verification
    return verifier(
        target_probs=target_probs,
        draft_probs=proposal.draft_probs,
        draft_tokens=proposal.tokens,
        lengths=proposal.lengths,
        accept_uniform=draws[0],
        next_uniform=draws[1],
    )


def cut_round(
    candidates: Tensor, *, accepted: Tensor, remaining: Tensor, eos_token_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How much stays of `candidates` [B, K + 1], of which `accepted` [B] + 1 are verified; all [B].

    *Emitted* are tokens up to the first end of text, which is kept, at least 1; *committed* as many
    of them as the length limit allows: rates count the former, answers hold the latter. `ended`:
    whether an end-of-text id was committed; `done`: whether nothing more may follow. `remaining`
    tokens (at least 1) may still be committed; `eos_token_ids` [B or 1, E] may be empty.
    """
    width = candidates.shape[1]
    index = torch.arange(width, device=candidates.device)
    # Also behind the accepted ones, unread there. (For many ids `isin` sorts, and waits for that.)
    is_end = (candidates[..., None] == eos_token_ids[:, None]).any(-1)
    first_end = torch.where(is_end, index, width).amin(dim=1)
    emitted = torch.minimum(accepted, first_end) + 1
    committed = torch.minimum(emitted, remaining)
    ended = (first_end <= accepted) & (first_end < remaining)
    return emitted, committed, ended, ended | (committed == remaining)


def _commit(
    bench: Bench, view: RoundView, proposal: Proposal, verification: Verification
) -> tuple[Tensor, Tensor]:
    """Write candidates behind the committed text, move the length pointers of active rows."""
    state, group = bench.state, view.group
    next_token = verification.next_token[:, None]
    candidates = torch.cat([proposal.tokens, next_token], dim=1)
    candidates = candidates.scatter(1, verification.accepted[:, None], next_token)
    emitted, committed, ended, done = cut_round(
        candidates,
        accepted=verification.accepted,
        remaining=(state.limit[group.index] - view.length).clamp(min=1),
        eos_token_ids=bench.eos_token_ids.where(~group.ignores_eos[:, None], -1),  # no token
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


def proposal_acceptance(
    target_probs: Tensor,
    proposal: Proposal,
    mode: str,
    options: Tensor | None = None,
    epsilon: float | None = None,
) -> Tensor:
    """How likely each proposal [B, K] was to be accepted when tested, given the text before it.

    mode: of `MODES`, in which sampled proposals are accepted; p(x) where q is one-hot at x. Where
    several tokens are `options` [B, K, W] (-1: none), how likely one of them was. With `epsilon` it
    is certain, or never: whether the token is typical.
    """
    target_probs = target_probs[:, : proposal.tokens.shape[1]]
    if epsilon is not None:
        of_tokens = target_probs.gather(2, proposal.tokens[..., None])[..., 0]
        typical = of_tokens > typical_bound(target_probs=target_probs, epsilon=epsilon)
        return typical.to(target_probs.dtype)
    if options is not None:
        return (target_probs.gather(2, options.clamp(min=0)) * (options >= 0)).sum(-1)
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
