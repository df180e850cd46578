"""The speculative decoder: propose, verify, commit, for a batch of independent rows.

Every round proposes K tokens a row, runs the target once over the last committed token and the
proposals, and commits 1 to K + 1 tokens whose law is the target's (Leviathan et al. 2211.17192,
Algorithm 1; the verifiers are `theory.verification`'s). With gamma 0 the same code is plain
autoregressive decoding: the baseline that speculation is compared with. The decoder knows
adapters and token ids; it knows no text, no configuration file and no statistics.

Shapes: B rows of a group, K proposed tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.decoding.cache import SlotCache
from draftkit.decoding.proposers import Proposal, Proposer
from draftkit.decoding.state import (
    DecodeState,
    Group,
    NoiseFunction,
    Request,
    RoundView,
    make_group,
)
from draftkit.decoding.stopping import cut_round
from draftkit.models.adapter import Adapter
from draftkit.theory import noise
from draftkit.theory.acceptance import sampled_acceptance
from draftkit.theory.noise import ACCEPT, NEXT
from draftkit.theory.verification import VERIFIERS, Verification, greedy_verification
from draftkit.theory.warping import seen_along, seen_tokens, warp

PREFILL_CHUNK = 512


class RoundSeconds(NamedTuple):
    """Where the time of a round went; zeros without a clock."""

    propose: float
    verify: float
    rest: float


NO_SECONDS = RoundSeconds(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RoundResult:
    """What one group of rows did in one round."""

    slots: list[int]
    tokens: Tensor  # [B, K + 1] candidates; the first `committed` of a row count
    committed: list[int]
    emitted: list[int]  # tokens a target pass yielded, the length limit not applied
    ended: list[bool]  # by an end-of-text id
    done: list[bool]
    gamma: int
    draft_tokens: Tensor  # [B, K]
    acceptance: Tensor  # [B, K] sum_x min(p, q) at each proposed position
    target_log_probs: Tensor  # [B, K + 1] log p of the candidates, raw (temperature 1)
    log_sum_exp: Tensor  # [B, K + 1] of the raw logits
    served_log_sum_exp: Tensor  # [B, K + 1] of logits / temperature (1 where greedy)
    proposer_version: str
    seconds: RoundSeconds = NO_SECONDS


class Decoder:
    """Rows join, advance by rounds, and leave; see the module's docstring.

    `slots` rows of at most `capacity` tokens, scratch space included: a request needs
    `limit + 2 (gamma + 1)` of them. `clock` (seconds, synchronised) fills `RoundResult.seconds`.
    """

    def __init__(
        self,
        target: Adapter,
        *,
        slots: int,
        capacity: int,
        eos_token_ids: Sequence[int] = (),
        verification: str = "speculative",
        noise_function: NoiseFunction = noise.uniform,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.target = target
        self.capacity = capacity
        self.clock = clock
        self._verify = VERIFIERS[verification]
        self._noise = noise_function
        self._eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=target.device)
        self._cache = SlotCache(slots, capacity)
        self._state = DecodeState.empty(slots, capacity, target.device)
        self._free = list(range(slots))
        self._proposers: dict[str, Proposer] = {}
        self._running: list[Group] | None = None  # None: membership changed, group anew

    # Proposers

    def attach(self, proposer_id: str, proposer: Proposer) -> None:
        """Let requests name `proposer` by `proposer_id`. ValueError while rows use that id."""
        self._check_unused(proposer_id)
        proposer.allocate(self._cache.rows, self.capacity)
        self._proposers[proposer_id] = proposer

    def detach(self, proposer_id: str) -> None:
        """Remove a proposer. Raises ValueError while a row still uses it."""
        self._check_unused(proposer_id)
        del self._proposers[proposer_id]

    def _check_unused(self, proposer_id: str) -> None:
        if any(r.proposer_id == proposer_id for r in self._state.requests.values()):
            raise ValueError(f"proposer {proposer_id} still serves rows; let them leave first")

    def swap(self, proposer_id: str, state_dict: dict[str, Tensor], version: str) -> None:
        """Give a proposer new weights; rows in flight go on, and stay exact."""
        self._proposers[proposer_id].swap(state_dict, version)

    # Rows

    @property
    def free_slots(self) -> int:
        """How many requests can join now."""
        return len(self._free)

    def join(self, requests: Sequence[Request]) -> list[int]:
        """Give each request a slot; `round` advances their prefill. Returns the slots.

        Raises ValueError for a request that cannot fit, before any has joined.
        """
        if len(requests) > len(self._free):
            raise ValueError(f"{len(requests)} requests, {len(self._free)} free slots")
        for request in requests:
            self._check_fits(request)
        slots = []
        for request in requests:
            slot = self._free.pop(0)
            self._state.admit(slot, request)
            slots.append(slot)
        if slots:
            self._running = None
        return slots

    def leave(self, slots: Sequence[int]) -> None:
        """Free `slots`, finished or not, between rounds."""
        for slot in slots:
            self._state.free(slot)
            self._free.append(slot)
        self._free.sort()
        if slots:
            self._running = None

    def _check_fits(self, request: Request) -> None:
        context = self.target.max_positions
        if request.proposer_id is not None:
            if request.proposer_id not in self._proposers:
                raise ValueError(f"no proposer {request.proposer_id!r} is attached")
            context = min(context, self._proposers[request.proposer_id].max_positions)
        if request.limit > context:
            raise ValueError(
                f"{len(request.prompt_ids)} prompt tokens and {request.max_new_tokens} new ones "
                f"exceed the context of {context} (the smaller of both models')"
            )
        if (need := tokens_needed(request)) > self.capacity:
            raise ValueError(f"a row needs {need} cache slots, the decoder has {self.capacity}")

    # Rounds

    @torch.inference_mode()
    def prefill(self) -> bool:
        """Feed the next chunk of every waiting prompt; return whether any is still waiting.

        A prompt's last token is fed by the round that first uses it.
        """
        state = self._state
        waiting = [
            slot
            for slot, request in state.requests.items()
            if state.prefilled[slot] < len(request.prompt_ids) - 1
        ]
        by_proposer: dict[str | None, list[int]] = {}
        for slot in waiting:
            by_proposer.setdefault(state.requests[slot].proposer_id, []).append(slot)
        for proposer_id, slots in by_proposer.items():
            self._prefill_chunk(slots, proposer_id)
        if waiting:
            self._running = None
        return any(
            state.prefilled[slot] < len(state.requests[slot].prompt_ids) - 1 for slot in waiting
        )

    def _prefill_chunk(self, slots: list[int], proposer_id: str | None) -> None:
        state, device = self._state, self.target.device
        rows = torch.tensor(slots, device=device)
        first = torch.tensor([state.prefilled[slot] for slot in slots], device=device)
        left = [len(state.requests[s].prompt_ids) - 1 - state.prefilled[s] for s in slots]
        width = min(PREFILL_CHUNK, max(left))
        # Shorter rows run on into slots that their own tokens overwrite before anything sees them.
        positions = first[:, None] + torch.arange(width, device=device)
        positions = positions.clamp(max=self.capacity - 1)
        tokens = state.tokens[rows].gather(1, positions)
        longest = min(max(state.prefilled[s] for s in slots) + width, self.capacity)
        self.target.prefill(
            tokens, positions=positions, cache=self._cache.select(rows, longest=longest)
        )
        if proposer_id is not None:
            self._proposers[proposer_id].prefill(
                tokens, positions=positions, rows=rows, longest=longest
            )
        for slot, count in zip(slots, left, strict=True):
            state.prefilled[slot] += min(width, count)

    @torch.inference_mode()
    def round(self) -> list[RoundResult]:
        """Advance waiting prompts by a chunk and all ready rows by one round, group by group."""
        self.prefill()
        if self._running is None:
            self._running = self._groups()
        return [self._round(group) for group in list(self._running)]

    def _groups(self) -> list[Group]:
        """Ready rows by proposer and gamma."""
        state = self._state
        members: dict[tuple[int, str | None], list[int]] = {}
        for slot, request in sorted(state.requests.items()):
            ready = state.prefilled[slot] >= len(request.prompt_ids) - 1
            if ready and slot not in state.finished:
                members.setdefault((request.gamma, request.proposer_id), []).append(slot)
        return [make_group(state, slots, *key) for key, slots in members.items()]

    def _round(self, group: Group) -> RoundResult:
        ticks = [self._tick()]
        view = self._view(group)
        proposal = self._propose(view)
        ticks.append(self._tick())
        logits = self._target_logits(view, proposal)
        ticks.append(self._tick())
        history = None if view.seen is None else seen_along(view.seen, proposal.tokens)
        target_probs = warp(logits, group.params, history)  # [B, K + 1, V]
        verdict = self._verify_round(view, proposal, target_probs)
        result = self._commit(view, proposal, verdict, logits, target_probs)
        ticks.append(self._tick())
        propose, verify, rest = (b - a for a, b in pairwise(ticks))
        return replace(result, seconds=RoundSeconds(propose, verify, rest))

    def _tick(self) -> float:
        return self.clock() if self.clock is not None else 0.0

    def _view(self, group: Group) -> RoundView:
        state = self._state
        length = state.length[group.index]
        last = length[:, None] + torch.arange(-2, 0, device=length.device)
        tokens = state.tokens if group.rows is None else state.tokens[group.index]
        seen = None
        if group.params.uses_penalty:
            seen = seen_tokens(tokens, length, self.target.vocab_size)
        return RoundView(
            group=group,
            length=length,
            last_two=tokens.gather(1, last.clamp(min=0)),
            seen=seen,
            longest=max(state.host_length[slot] for slot in group.slots),
            seed=state.seed[group.index],
            row=state.row[group.index],
            noise=self._noise,
        )

    def _propose(self, view: RoundView) -> Proposal:
        if view.group.gamma == 0 or view.group.proposer_id is None:
            return Proposal(view.last_two[:, :0], None, lengths=torch.zeros_like(view.length))
        return self._proposers[view.group.proposer_id].propose(view, view.group.gamma)

    def _target_logits(self, view: RoundView, proposal: Proposal) -> Tensor:
        """One target pass over the last committed token and the proposals: [B, K + 1, V]."""
        tokens = torch.cat([view.last_two[:, 1:], proposal.tokens], dim=1)
        width = tokens.shape[1]
        positions = view.length[:, None] - 1 + torch.arange(width, device=tokens.device)
        cache = self._cache.select(view.group.rows, longest=view.longest + width)
        return self.target.step(tokens, positions=positions, cache=cache)

    def _verify_round(
        self, view: RoundView, proposal: Proposal, target_probs: Tensor
    ) -> Verification:
        if view.group.greedy:
            return greedy_verification(
                target_probs=target_probs, draft_tokens=proposal.tokens, lengths=proposal.lengths
            )
        return self._verify(
            target_probs=target_probs,
            draft_probs=proposal.draft_probs,
            draft_tokens=proposal.tokens,
            lengths=proposal.lengths,
            accept_uniform=view.uniform(count=proposal.tokens.shape[1], purpose=ACCEPT),
            next_uniform=view.uniform(count=1, purpose=NEXT)[:, 0],
        )

    def _commit(
        self,
        view: RoundView,
        proposal: Proposal,
        verdict: Verification,
        logits: Tensor,
        target_probs: Tensor,
    ) -> RoundResult:
        """Write candidates behind the committed text and move the length pointers."""
        state, group = self._state, view.group
        candidates = torch.cat([proposal.tokens, verdict.next_token[:, None]], dim=1)
        candidates = candidates.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])
        cut = cut_round(
            candidates,
            accepted=verdict.accepted,
            remaining=state.limit[group.index] - view.length,
            eos_token_ids=self._eos,
        )
        places = view.length[:, None] + torch.arange(candidates.shape[1], device=logits.device)
        state.tokens[group.index[:, None], places] = candidates
        state.length[group.index] = view.length + cut.committed
        emitted, committed, ended, done = torch.stack([part.long() for part in cut]).tolist()
        for slot, count, stop in zip(group.slots, committed, done, strict=True):
            state.host_length[slot] += count
            if stop:  # the row stays in its slot, out of every group, until it leaves
                state.finished.add(slot)
                self._running = None
        log_probs, log_sum_exp, served = target_log_probs(logits, candidates, group)
        return RoundResult(
            slots=group.slots,
            tokens=candidates,
            committed=committed,
            emitted=emitted,
            ended=[bool(flag) for flag in ended],
            done=[bool(flag) for flag in done],
            gamma=group.gamma,
            draft_tokens=proposal.tokens,
            acceptance=proposal_acceptance(target_probs, proposal),
            target_log_probs=log_probs,
            log_sum_exp=log_sum_exp,
            served_log_sum_exp=served,
            proposer_version=self._version(group),
        )

    def _version(self, group: Group) -> str:
        return "" if group.proposer_id is None else self._proposers[group.proposer_id].version


def tokens_needed(request: Request) -> int:
    """Cache slots of one request: its longest text and the scratch space of two rounds."""
    return request.limit + 2 * (request.gamma + 1)


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
    raw = logits if logits.dtype == torch.float64 else logits.float()
    served = group.params.temperature.to(raw.dtype)
    served = torch.where(served > 0, served, 1.0)[:, None, None]
    log_sum_exp = raw.logsumexp(-1)
    log_probs = raw.gather(2, candidates[..., None])[..., 0] - log_sum_exp
    return log_probs, log_sum_exp, (raw / served).logsumexp(-1)
