"""What the decoder remembers of its rows, and what it shows of them to a proposer.

One row a slot. Lengths are the only pointers: tokens and cache slots at or beyond a row's length
are garbage that the next round overwrites. Noise enters here as a function, so that tests can
force every outcome.

Shapes: S slots, B rows of a group, L tokens a row can hold, K proposed tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.gamma import GammaPolicy
from draftkit.theory import noise
from draftkit.theory.warping import SamplingParams, seen_tokens

NoiseFunction = Callable[..., Tensor]  # the signature of `theory.noise.uniform`


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued. The same `seed` and `row` give the same tokens in any batch.

    Under an encoder-decoder model the text to read is `encoder_ids`, and the prompt is what the
    decoder starts with, as a rule one token.
    `adapts` lets the decoder's gamma policy propose fewer than `gamma` tokens; the law of the
    answer stays, but the tokens that a seed gives then depend on the policy.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig
    gamma: int = 0
    proposer_id: str | None = None
    seed: int = 0
    row: int = 0
    adapts: bool = False
    encoder_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("a prompt must hold at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.gamma > 0 and self.proposer_id is None:
            raise ValueError(f"gamma={self.gamma} needs a proposer")

    @property
    def limit(self) -> int:
        """Tokens of prompt and longest answer together."""
        return len(self.prompt_ids) + self.max_new_tokens


class Feeding(NamedTuple):
    """How far a proposer with a cache has followed its row."""

    round: int  # it has taken part in all rounds before this one
    length: int  # and holds the tokens before this position


@dataclass
class DecodeState:
    """Per-slot tensors, with the requests and prefill progress on the host."""

    tokens: Tensor  # [S, L] int64
    length: Tensor  # [S] int64: committed tokens, prompt included
    limit: Tensor  # [S] int64
    seed: Tensor  # [S] int64
    row: Tensor  # [S] int64
    done: Tensor  # [S] bool: nothing more may follow; true for a free slot
    requests: dict[int, Request] = field(default_factory=dict)
    tickets: dict[int, int] = field(default_factory=dict)  # slot -> which request it holds
    prefilled: dict[int, int] = field(default_factory=dict)  # slot -> tokens of the prompt fed
    host_length: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)  # slot -> rounds begun
    fed: dict[int, Feeding] = field(default_factory=dict)  # slot -> what its proposer has seen
    finished: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)  # slots whose encoder text waits to be read

    @classmethod
    def empty(cls, slots: int, capacity: int, device: torch.device) -> "DecodeState":
        """A state of `slots` free rows of at most `capacity` tokens."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        done = torch.ones(slots, dtype=torch.bool, device=device)
        return cls(
            zeros(slots, capacity), zeros(slots), zeros(slots), zeros(slots), zeros(slots), done
        )

    def admit(self, slot: int, request: Request, *, ticket: int = 0) -> None:
        """Put `request` into a free `slot`; `ticket` tells it from others that held the slot."""
        prompt = torch.tensor(list(request.prompt_ids), device=self.tokens.device)
        self.tokens[slot, : len(prompt)] = prompt
        self.length[slot] = len(prompt)
        self.limit[slot] = request.limit
        self.seed[slot] = request.seed
        self.row[slot] = request.row
        self.done[slot] = False
        self.requests[slot] = request
        self.tickets[slot] = ticket
        self.prefilled[slot] = 0
        self.host_length[slot] = len(prompt)
        self.rounds[slot] = 0
        if request.encoder_ids:
            self.unread.add(slot)
        self.fed[slot] = Feeding(0, len(prompt) - 1)

    def free(self, slot: int) -> None:
        """Forget the request in `slot`."""
        for shadow in (self.requests, self.tickets, self.prefilled, self.host_length):
            del shadow[slot]
        del self.rounds[slot], self.fed[slot]
        self.done[slot] = True
        self.finished.discard(slot)
        self.unread.discard(slot)

    def is_ready(self, slot: int) -> bool:
        """Whether all but the last token of the prompt have been fed: rounds feed that one."""
        is_fed = self.prefilled[slot] >= len(self.requests[slot].prompt_ids) - 1
        return is_fed and slot not in self.unread


@dataclass(frozen=True)
class Group:
    """Rows that run one round together: same proposer, same gamma.

    `index` may name more rows than `slots`: fillers that bring a batch to a size for which there
    is compiled code. They run along and commit nothing, since they are not `active`.
    """

    slots: list[int]
    index: Tensor  # [B] int64, slots on the device, fillers included
    rows: Tensor | None  # `index`, or None where the group is every slot in order
    active: Tensor  # [B] bool
    places: list[int] | None  # where `slots` stand in `index`; None: no fillers
    params: SamplingParams
    gamma: int
    proposer_id: str | None
    adapts: bool = False

    @property
    def greedy(self) -> bool:
        """Whether all rows are."""
        return not self.params.uses_sampling

    @property
    def key(self) -> tuple[object, ...]:
        """What compiled code depends on, tensors' contents apart."""
        params = self.params
        flags = (
            *(params.uses_top_k, params.uses_top_p, params.uses_penalty),
            *(params.uses_greedy, params.uses_sampling, params.largest_top_k),
        )
        return (len(self.index), self.rows is None, self.gamma, flags)


def make_group(
    state: DecodeState,
    slots: list[int],
    gamma: int,
    proposer_id: str | None,
    *,
    adapts: bool = False,
    size: int | None = None,
) -> Group:
    """Gather the sampling parameters of `slots` into one group of `size` rows (default: theirs)."""
    device = state.tokens.device
    all_slots = range(state.tokens.shape[0])
    taken = set(slots)
    spare = [slot for slot in all_slots if slot not in taken]
    index = sorted(slots + spare[: (size or len(slots)) - len(slots)])
    sampling = {slot: state.requests[slot].sampling for slot in slots}
    rows = [sampling.get(slot, sampling[slots[0]]) for slot in index]

    def float64(values: list[float]) -> Tensor:  # as SamplingParams.uniform: one number everywhere
        return torch.tensor(values, dtype=torch.float64, device=device)

    params = SamplingParams(
        temperature=float64([s.temperature for s in rows]),
        top_k=torch.tensor([s.top_k for s in rows], device=device),
        top_p=float64([s.top_p for s in rows]),
        repetition_penalty=float64([s.repetition_penalty for s in rows]),
        uses_top_k=any(s.top_k > 0 for s in rows),
        uses_top_p=any(s.top_p < 1 for s in rows),
        uses_penalty=any(s.repetition_penalty != 1 for s in rows),
        uses_greedy=any(s.temperature == 0 for s in rows),
        uses_sampling=any(s.temperature > 0 for s in rows),
    )
    place = {slot: number for number, slot in enumerate(index)}
    places = [place[slot] for slot in slots]
    on_device = torch.tensor(index, device=device)
    return Group(
        slots=slots,
        index=on_device,
        rows=None if index == list(all_slots) else on_device,
        active=torch.tensor([slot in sampling for slot in index], device=device),
        places=None if len(index) == len(slots) else places,
        params=params,
        gamma=gamma,
        proposer_id=proposer_id,
        adapts=adapts,
    )


def with_gammas(groups: Sequence[Group], policy: GammaPolicy | None) -> list[Group]:
    """`groups` with the gamma of a round: for all that adapt what `policy` chooses for the largest.

    So drafters that are compared on the same traffic propose alike. Were the few rows of one given
    a larger gamma, its deeper places, which are reached in easier contexts, would raise its mean.
    """
    if policy is None:
        return list(groups)
    batch = max((len(group.slots) for group in groups if group.adapts), default=1)
    return [
        replace(group, gamma=policy.choose(batch=batch, most=group.gamma))
        if group.adapts
        else group
        for group in groups
    ]


@dataclass(frozen=True)
class RoundView:
    """What a proposer may look at: the committed text of its rows, never the target's logits."""

    group: Group
    tokens: Tensor  # [B, L] the text, garbage from `length` on
    length: Tensor  # [B] committed tokens
    last_two: Tensor  # [B, 2]; a one-token text shows its token twice
    seen: Tensor | None  # [B, V] bool: ids in the text, where a penalty needs them
    visible: int  # cache slots that text and proposals of this round can need
    seed: Tensor  # [B]
    row: Tensor  # [B]
    noise: NoiseFunction = noise.uniform

    def uniform(self, *, count: int, purpose: int) -> Tensor:
        """Return [B, count] numbers in [0, 1) for `purpose`, fresh in every round."""
        return self.noise(
            seed=self.seed, row=self.row, length=self.length, count=count, purpose=purpose
        )


def view_of(
    state: DecodeState, group: Group, *, visible: int, vocab_size: int, noise: NoiseFunction
) -> RoundView:
    """The committed text of `group` at the start of a round."""
    everyone = group.rows is None
    tokens = state.tokens if everyone else state.tokens[group.index]
    length = state.length if everyone else state.length[group.index]
    length = length.clamp(min=1)  # a free slot among the fillers has no text
    last = length[:, None] + torch.arange(-2, 0, device=length.device)
    return RoundView(
        group=group,
        tokens=tokens,
        length=length,
        last_two=tokens.gather(1, last.clamp(min=0)),
        seen=seen_tokens(tokens, length, vocab_size) if group.params.uses_penalty else None,
        visible=visible,
        seed=state.seed if everyone else state.seed[group.index],
        row=state.row if everyone else state.row[group.index],
        noise=noise,
    )
