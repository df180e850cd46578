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
from draftkit.decoding.graphs import Units, batch_size
from draftkit.decoding.transfer import to_device
from draftkit.theory import noise
from draftkit.theory.warping import SamplingParams, seen_tokens

NoiseFunction = Callable[..., Tensor]  # the signature of `theory.noise.uniform`
# Of many rows, a few that are done run along: to leave them out is to copy the cache of the others.
MANY_ROWS, NEARLY_ALL = 16, 0.75
PREFIX_ROWS = 2  # on CUDA, where rows cost less than copies: so many for each row of a group
LEAST_TOP_K = 64  # logits that are sorted where every row has a top-k: few sizes, as code has them


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


def tokens_needed(request: Request) -> int:
    """Cache slots of one request: its longest text and the scratch space of two rounds."""
    return request.limit + 2 * (request.gamma + 1)


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
        prompt = to_device(list(request.prompt_ids), self.tokens.device, torch.long)
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
    # `index`; its length where the group is the first slots in order; None where it is all of them.
    rows: Tensor | int | None
    active: Tensor  # [B] bool
    places: list[int] | None  # where `slots` stand in `index`; None: no fillers
    params: SamplingParams
    gamma: int
    proposer_id: str | None
    adapts: bool = False

    @property
    def greedy(self) -> bool:
        return not self.params.uses_sampling

    @property
    def key(self) -> tuple[object, ...]:
        """What compiled code depends on, tensors' contents apart."""
        params = self.params
        flags = (
            *(params.uses_top_k, params.uses_top_p, params.uses_penalty),
            *(params.uses_greedy, params.uses_sampling, params.largest_top_k),
        )
        return (len(self.index), isinstance(self.rows, Tensor), self.gamma, flags)


def group_shape(slots: Sequence[int], rows: int, units: Units) -> tuple[int, bool]:
    """In how many of all `rows` slots a group of `slots` runs, and whether these are the first."""
    size, first = len(slots), max(slots) + 1
    if units.is_fixed:
        size, first = (batch_size(count, rows, units.sizes) for count in (size, first))
    elif rows >= MANY_ROWS and size >= NEARLY_ALL * rows:
        size = rows
    # The caches of the first slots are read where they lie, those of others copied in every pass.
    prefix = units.device.type == "cuda" and first <= PREFIX_ROWS * size
    return (first, True) if prefix else (size, False)


def make_group(
    state: DecodeState,
    slots: list[int],
    gamma: int,
    proposer_id: str | None,
    *,
    adapts: bool = False,
    size: int | None = None,
    prefix: bool = False,
) -> Group:
    """Gather the sampling parameters of `slots` into one group of `size` rows (default: theirs).

    With `prefix` these are the first `size` slots, in which the others must be.
    """
    all_slots = range(state.tokens.shape[0])
    size = size or len(slots)
    taken = set(slots)
    spare = [slot for slot in all_slots if slot not in taken]
    index = [*range(size)] if prefix else sorted(slots + spare[: size - len(slots)])
    sampling = {slot: state.requests[slot].sampling for slot in slots}
    rows = [sampling.get(slot, sampling[slots[0]]) for slot in index]
    columns = [
        *(index, [slot in sampling for slot in index], [s.top_k for s in rows]),
        *([s.temperature for s in rows], [s.top_p for s in rows]),
        [s.repetition_penalty for s in rows],
    ]
    # In one copy. As SamplingParams.uniform: float64, so that a number is the same everywhere.
    of_rows = to_device(columns, state.tokens.device, torch.float64)
    temperature, top_p, repetition_penalty = of_rows[3:]
    params = SamplingParams(
        temperature=temperature,
        top_k=of_rows[2].long(),
        top_p=top_p,
        repetition_penalty=repetition_penalty,
        uses_top_k=any(s.top_k > 0 for s in rows),
        uses_top_p=any(s.top_p < 1 for s in rows),
        uses_penalty=any(s.repetition_penalty != 1 for s in rows),
        uses_greedy=any(s.temperature == 0 for s in rows),
        uses_sampling=any(s.temperature > 0 for s in rows),
        largest_top_k=_largest_top_k([s.top_k for s in rows if s.temperature > 0]),
    )
    place = {slot: number for number, slot in enumerate(index)}
    places = [place[slot] for slot in slots]
    on_device = of_rows[0].long()
    first = size if prefix else on_device
    return Group(
        slots=slots,
        index=on_device,
        rows=None if index == list(all_slots) else first,
        active=of_rows[1] > 0,
        places=None if len(index) == len(slots) else places,
        params=params,
        gamma=gamma,
        proposer_id=proposer_id,
        adapts=adapts,
    )


def _largest_top_k(top_ks: list[int]) -> int | None:
    """A power of two that is no less than any of `top_ks`; None where one keeps all (0)."""
    if min(top_ks, default=0) == 0:
        return None
    return max(LEAST_TOP_K, 1 << (max(top_ks) - 1).bit_length())


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

    def of_rows(part: Tensor) -> Tensor:
        if group.rows is None:
            return part
        return part[group.index] if isinstance(group.rows, Tensor) else part[: group.rows]

    tokens, length = of_rows(state.tokens), of_rows(state.length)
    length = length.clamp(min=1)  # a free slot among the fillers has no text
    last = length[:, None] + torch.arange(-2, 0, device=length.device)
    return RoundView(
        group=group,
        tokens=tokens,
        length=length,
        last_two=tokens.gather(1, last.clamp(min=0)),
        seen=seen_tokens(tokens, length, vocab_size) if group.params.uses_penalty else None,
        visible=visible,
        seed=of_rows(state.seed),
        row=of_rows(state.row),
        noise=noise,
    )
