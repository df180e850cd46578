"""The speculative decoder: rows join, advance by rounds of propose and verify, and leave.

Every round proposes K tokens a row, runs the target once over the last committed token and the
proposals, and commits 1 to K + 1 tokens whose law is the target's (Leviathan et al. 2211.17192,
Algorithm 1; the verifiers are `theory.verification`'s). With gamma 0 the same code is plain
autoregressive decoding: the baseline that speculation is compared with. What a round computes is
in `round`; here stand the rows, their grouping, and the host's shadow of the device. The decoder
knows adapters and token ids; it knows no text, no configuration file and no statistics.

Shapes: B rows of a group, N fed tokens, E encoder tokens.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from draftkit.config import TYPICAL
from draftkit.decoding import round as units
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.graphs import COMPILED_BUCKET, FREEZE_BYTES, Units, can_pack
from draftkit.decoding.proposers import Proposer
from draftkit.decoding.results import (
    Launched,
    Outcome,
    RoundResult,
    RoundSeconds,
    read,
    to_host,
)
from draftkit.decoding.round import RoundInputs
from draftkit.decoding.state import (
    DecodeState,
    Group,
    NoiseFunction,
    Request,
    Slot,
    group_shape,
    make_group,
    to_device,
    tokens_needed,
)
from draftkit.decoding.trees import Tree, check_tree
from draftkit.models.adapter import Adapter, parts_of
from draftkit.models.cache import BUCKET, SlotCache, rounded_capacity, visible_slots
from draftkit.theory import noise
from draftkit.theory.verification import SAMPLED_MODES, VERIFIERS

PREFILL_CHUNK = 512  # tokens of a prompt in a pass
PREFILL_ROWS = 8  # prompts in a pass: its memory must not grow with those that wait
WIDTH_STEPS = {"cuda": 64}  # of prefills, by type of device: libraries plan each new width anew


class Decoder:
    """Rows join, advance by rounds, and leave; see the module's docstring.

    `slots` rows of at most `capacity` tokens, scratch space included: a request needs
    `limit + 2 (gamma + 1)` of them, what an encoder reads included, gamma being the nodes of a tree
    where one is proposed. `compiled` runs rounds as compiled units (`graphs`), `captured` as CUDA
    graphs of eager code (elsewhere: as they are), both with the same results for the same noise, in
    batches of `batch_sizes` (default: a few) or of all slots: each size is code of its own. `late`
    lets `round` return what the round before it did, so that the device never waits for the host
    (default: on CUDA). `top_k` is how many of the target's likeliest ids results name, `epsilon`
    that of `verification=typical`, which is lossy. Set between rounds: `late`, `gamma_policy`, and
    a `clock` of seconds that fills `RoundResult.seconds` where results are not late.
    """

    gamma_policy: AdaptiveGamma | None = None
    clock: Callable[[], float] | None = None

    def __init__(
        self,
        target: Adapter,
        *,
        slots: int,
        capacity: int,
        eos_token_ids: Sequence[int] = (),
        verification: str = "speculative",
        epsilon: float | None = None,
        noise_function: NoiseFunction = noise.uniform,
        compiled: bool = False,
        captured: bool = False,
        batch_sizes: Sequence[int] | None = None,
        late: bool | None = None,
        top_k: int = 0,
    ) -> None:
        self.target = target
        self._on_cuda = target.device.type == "cuda"
        self.capacity = capacity = rounded_capacity(capacity, target.device)
        self.verification = verification
        exact = "match" if verification == TYPICAL else verification  # unused beside epsilon
        self.verifier, self.mode = VERIFIERS[exact], SAMPLED_MODES[exact]
        self.epsilon = epsilon if verification == TYPICAL else None
        assert (self.epsilon is None) == (verification != TYPICAL), "typical needs an epsilon"
        self.noise = noise_function
        self.top_k = min(top_k, target.vocab_size - 1)
        self.eos_token_ids = torch.tensor(
            list(eos_token_ids), dtype=torch.long, device=target.device
        )
        self.cache = SlotCache(slots, capacity, capacity if target.has_encoder else 0)
        self.state = DecodeState.empty(slots, capacity, target.device)
        self.late = self._on_cuda if late is None else late
        self._units = Units(
            compiled=compiled, captured=captured, sizes=batch_sizes, device=target.device
        )
        self._copies = packed_copies(target) if compiled else 0
        self._packs = compiled and can_pack(target.device)
        self._packed: set[Hashable] = set()  # keys of graphs with a copy of the weights
        self._proposers: dict[str | None, Proposer] = {}  # no None: plain rows look it up in vain
        self._made: set[str | None] = set()  # proposers whose caches have taken their shape
        self._running: list[Group] | None = None  # None: membership changed, group anew
        self._pending: deque[Launched] = deque()

    # Proposers

    def attach(self, proposer_id: str, proposer: Proposer) -> None:
        """Let requests name `proposer` by `proposer_id`. ValueError while rows use that id."""
        if any(slot.request.proposer_id == proposer_id for slot in self.state.slots.values()):
            raise ValueError(f"proposer {proposer_id} still serves rows; let them leave first")
        if proposer.tree is not None:
            check_tree(proposer.tree, self.target, self.verification)
            proposer.tree = proposer.tree.to(self.target.device)
        proposer.allocate(self.cache.rows, self.capacity, self.cache.encoder_capacity)
        self.cache.taps = tuple(sorted({*self.cache.taps, *proposer.reads}))
        self._proposers[proposer_id] = proposer
        self._made.clear()  # others may share the caches that are new
        self._units.forget()

    def swap(self, proposer_id: str, state_dict: dict[str, Tensor], version: str) -> None:
        """Give a proposer new weights; rows in flight go on, and stay exact."""
        self._proposers[proposer_id].swap(state_dict, version)

    # Rows

    @property
    def free_slots(self) -> int:
        """How many requests can join now."""
        return self.cache.rows - len(self.state.slots)

    def join(self, requests: Sequence[Request]) -> list[int]:
        """Give each request a slot; `round` advances their prefill. Returns the slots.

        Raises ValueError for a request that cannot fit, before any has joined.
        """
        if len(requests) > self.free_slots:
            raise ValueError(f"{len(requests)} requests, {self.free_slots} free slots")
        for request in requests:
            context = self.target.max_positions
            if request.proposer_id is not None:
                if request.proposer_id not in self._proposers:
                    raise ValueError(f"no proposer {request.proposer_id!r} is attached")
                context = min(context, self._proposers[request.proposer_id].max_positions)
            if request.limit > context:
                raise ValueError(
                    f"{len(request.prompt_ids)} prompt tokens and {request.max_new_tokens} new "
                    f"ones exceed the context of {context} (the smaller of both models')"
                )
            if (need := tokens_needed(request, self.tree(request.proposer_id))) > self.capacity:
                raise ValueError(f"a row needs {need} cache slots, the decoder has {self.capacity}")
        parts = [parts_of(request.prompt_ids, self.target.start_id) for request in requests]
        free = [number for number in range(self.cache.rows) if number not in self.state.slots]
        for number, request, (encoder_ids, own) in zip(free, requests, parts, strict=False):
            self.state.admit(number, replace(request, prompt_ids=own), encoder_ids)
            self._running = None
        return free[: len(requests)]

    def leave(self, slots: Sequence[int]) -> None:
        """Free `slots`, finished or not, between rounds."""
        for number in slots:
            self.state.free(number)
            self._running = None

    # Prefill

    @torch.inference_mode()
    def prefill(self) -> bool:
        """Feed the next chunk of every waiting prompt; return whether any is still waiting.

        A prompt's last token is fed by the round that first uses it.
        """
        slots, device = self.state.slots.values(), self.target.device
        unread = [slot for slot in slots if not slot.is_encoded]
        for proposer, batch in self._by_proposer(unread):
            counts = [len(slot.encoder_ids) for slot in batch]
            padded = [
                [*one.encoder_ids, *[0] * (max(counts) - len(one.encoder_ids))] for one in batch
            ]
            tokens = to_device(padded, device, torch.long)  # [B, E]
            numbers = [slot.number for slot in batch]
            lengths, rows = to_device([counts, numbers], device, torch.long)
            cache = self.cache.select(rows, visible=self.cache.capacity)
            self.target.encode(tokens, lengths=lengths, cache=cache)
            if proposer is not None:
                proposer.encode(tokens, lengths=lengths, rows=rows)
            for slot in batch:
                slot.is_encoded = True
        waiting = [slot for slot in slots if not slot.is_ready]
        for proposer, batch in self._by_proposer(waiting):
            numbers, starts = [slot.number for slot in batch], [slot.prefilled for slot in batch]
            left = [len(slot.request.prompt_ids) - 1 - slot.prefilled for slot in batch]
            width = min(PREFILL_CHUNK, max(left))
            self._feed(numbers, starts, width, proposer)
            for slot, count in zip(batch, left, strict=True):
                slot.prefilled += min(width, count)
        if unread or waiting:
            self._running = None
        return any(not slot.is_ready for slot in waiting)

    def _feed(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        width: int,
        proposer: Proposer | None,
        *,
        to_target: bool = True,
    ) -> None:
        """Feed the `width` tokens of each of `slots` from `starts` on to target and proposer.

        A row that is shorter runs on into garbage, which lands in slots that its own tokens
        overwrite before anything sees them.
        """
        device, capacity = self.target.device, self.cache.capacity
        rows, first = to_device([slots, starts], device, torch.long)
        visible = visible_slots(min(max(starts) + width, capacity), capacity)
        step = WIDTH_STEPS.get(device.type, 1)
        wide = -(-width // step) * step  # what is fed beyond `width` is garbage, as in shorter rows
        positions = first[:, None] + torch.arange(wide, device=device)  # [B, N]
        positions = positions.clamp(max=capacity - 1)
        tokens = self.state.tokens[rows].gather(1, positions)
        if to_target:
            cache = self.cache.select(rows, visible=visible)
            self.target.prefill(tokens, positions=positions, cache=cache)
        if proposer is not None:
            before = rows[:, None], (positions - 1).clamp(min=0)
            features = [self.cache.streams[layer][before] for layer in proposer.reads]
            proposer.prefill(
                tokens,
                positions=positions,
                rows=rows,
                visible=visible,
                features=torch.cat(features, -1) if features else None,
            )

    def _by_proposer(self, slots: Sequence[Slot]) -> Iterator[tuple[Proposer | None, list[Slot]]]:
        """Slots that share a proposer, at most `PREFILL_ROWS` together."""
        by_proposer: dict[str | None, list[Slot]] = {}
        for slot in slots:
            by_proposer.setdefault(slot.request.proposer_id, []).append(slot)
        for proposer_id, members in by_proposer.items():
            for first in range(0, len(members), PREFILL_ROWS):
                yield self._proposers.get(proposer_id), members[first : first + PREFILL_ROWS]

    # Rounds

    @torch.inference_mode()
    def round(self) -> list[RoundResult]:
        """Advance waiting prompts by a chunk and all ready rows by one round, group by group.

        Returns one result a group: of this round, or of the one before where results come late.
        """
        self.prefill()
        if self._running is None:
            self._running = self._groups()
        unread = len(self._pending)
        results = []
        for group in self._running:
            if group.adapts and self.gamma_policy is not None:
                batch = len(group.members)
                chosen = self.gamma_policy.choose(batch=batch, most=group.gamma)
                if group.tree is None or chosen == 0:  # a tree is proposed whole, or not at all
                    group = replace(group, gamma=chosen, tree=None)
            self._pending.append(self._launch(group))
            if not self.late:
                results.append(self._read(self._pending.popleft()))
        results += [self._read(self._pending.popleft()) for _ in range(unread)]
        return [result for result in results if result.slots]

    def _groups(self) -> list[Group]:
        """Ready rows by gamma and proposer."""
        members: dict[tuple[int, str | None, bool], list[int]] = {}
        for number, slot in sorted(self.state.slots.items()):
            if slot.is_ready and not slot.is_finished:
                request = slot.request
                key = (request.gamma, request.proposer_id, request.adapts)
                members.setdefault(key, []).append(number)
        groups = []
        for (gamma, proposer_id, adapts), slots in members.items():
            size, prefix = group_shape(slots, self.cache.rows, self._units)
            tree = self.tree(proposer_id) if gamma else None
            gamma = tree.depth if tree else gamma
            group = make_group(self.state, slots, gamma, proposer_id, size=size, prefix=prefix)
            groups.append(replace(group, adapts=adapts, tree=tree))
        return groups

    def tree(self, proposer_id: str | None) -> Tree | None:
        """What a proposer proposes, where it is no chain."""
        proposer = self._proposers.get(proposer_id)
        return None if proposer is None else proposer.tree

    def _launch(self, group: Group) -> Launched:
        """Set a round of `group` going; nothing here waits for the device."""
        ticks = [self._tick()]
        proposer = self._proposers.get(group.proposer_id)
        is_new = proposer is not None and group.proposer_id not in self._made
        if self._units.is_fixed and (is_new or not self.cache.is_made):
            # Code needs a cache where no pass has made one yet: a first token is fed again.
            self._feed([*group.members][:1], [0], 1, proposer)
            self._made.add(group.proposer_id)
        held = [self.state.slots[number] for number in group.members]
        longest = max(slot.length for slot in held) + self._unread() + group.scratch
        bucket = COMPILED_BUCKET if self._units.is_fixed else BUCKET
        visible = visible_slots(longest, self.capacity, bucket, joins_last=self._units.is_fixed)
        inputs, version = self._propose(RoundInputs(group, visible))
        ticks.append(self._tick())
        outcome = self._verify(inputs)
        ticks.append(self._tick())
        for slot in held:
            slot.rounds += 1
        return Launched(inputs.group, held, version, ticks, *to_host(outcome))

    def _tick(self) -> float:
        return self.clock() if self.clock is not None else 0.0

    def _unread(self) -> int:
        """The most tokens that a row can have beyond those that the host knows of."""
        return sum(launched.group.gamma + 1 for launched in self._pending)

    def _propose(self, inputs: RoundInputs) -> tuple[RoundInputs, str]:
        """`inputs` with a proposal, of as many tokens as it was picked for; and whose it is."""
        group = inputs.group
        proposer = self._proposers.get(group.proposer_id)
        version = "" if proposer is None else proposer.version
        if proposer is None or group.gamma == 0:
            return inputs._replace(proposal=units.no_proposal(inputs)), version
        # Where the host can look at the text. To make a view takes time.
        if not self._on_cuda and type(proposer).pick is not Proposer.pick:
            proposer, gamma = proposer.pick(units.round_view(self, inputs))
            inputs = inputs._replace(group=replace(group, gamma=gamma))
        if proposer.has_cache:  # it is shown the text of rounds that went by without it
            slots = [self.state.slots[number] for number in group.members]
            behind = [slot for slot in slots if slot.followed < slot.rounds]
            if behind:
                numbers, starts = [slot.number for slot in behind], [slot.fed for slot in behind]
                width = max(slot.length - slot.fed for slot in behind) + self._unread()
                self._feed(numbers, starts, width, proposer, to_target=False)
            for slot in slots:
                slot.followed, slot.fed = slot.rounds + 1, slot.length
        proposal = self._units.run(
            units.propose,
            (proposer, self),
            inputs,
            key=(proposer.signature, group.most, self._shape_key(inputs)),
            packs=self._packs,
            holder=group.proposer_id,
        )
        return inputs._replace(proposal=proposal), version

    def _verify(self, inputs: RoundInputs) -> Outcome:
        proposal = inputs.proposal
        assert proposal is not None
        sampled = None if proposal.draft_probs is None else proposal.draft_probs.dtype
        key = (self.verification, self.epsilon, sampled, self.top_k, self._shape_key(inputs))
        if len(self._packed) < self._copies:
            self._packed.add(key)
        frozen = key in self._packed
        return self._units.run(
            units.verify,
            self,
            inputs,
            key=key,
            owner=self.target,
            freeze=frozen,
            # In a frozen graph a packed float32 matrix takes 5 MB beyond itself.
            packs=self.target.dtype == torch.bfloat16 if frozen else self._packs,
            written=(self.state.length, self.state.done),
        )

    def _shape_key(self, inputs: RoundInputs) -> tuple[object, ...]:
        """What the code of a unit depends on beside its model."""
        cache = self.cache
        sizes = (cache.rows, self.capacity, cache.encoder_capacity, len(self.eos_token_ids))
        if cache.taps:
            sizes = (*sizes, *cache.taps, self.target.width, self.target.dtype)
        return (inputs.visible, inputs.group.key, sizes, self.noise)

    def _read(self, launched: Launched) -> RoundResult:
        """Take in what a round did, as far as its requests are still there."""
        result = read(launched, self.state.slots)
        for number, count, done in zip(result.slots, result.committed, result.done, strict=True):
            slot = self.state.slots[number]
            slot.length += count
            if done:  # the row stays in its slot, out of every group, until it leaves
                slot.is_finished = True
                self._running = None
        if self.gamma_policy is not None and (result.gamma > 0 or launched.group.adapts):
            self.gamma_policy.observe(gamma=result.gamma, accepted=result.full_tests)
        ticks = [*launched.ticks, self._tick()]
        return replace(result, seconds=RoundSeconds(*(b - a for a, b in pairwise(ticks))))


def packed_copies(target: Adapter) -> int:
    """How many graphs may have `target`'s weights packed into them, which must never change.

    Each holds them again, and those that it joins: as many as fit `FREEZE_BYTES`.
    """
    return FREEZE_BYTES // (2 * target.weight_bytes) if target.is_constant else 0
