"""What the decoder remembers of its rows, and what it shows of them to a proposer.

One row a slot. Lengths are the only pointers: tokens and cache slots at or beyond a row's length
are garbage that the next round overwrites. Noise enters here as a function, so that tests can
force every outcome.

Shapes: S slots, B rows of a group, L tokens a row can hold, K proposed tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.theory import noise
from draftkit.theory.warping import SamplingParams

NoiseFunction = Callable[..., Tensor]  # the signature of `theory.noise.uniform`


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued. The same `seed` and `row` give the same tokens in any batch."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig
    gamma: int = 0
    proposer_id: str | None = None
    seed: int = 0
    row: int = 0

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


@dataclass
class DecodeState:
    """Per-slot tensors, with the requests and prefill progress on the host."""

    tokens: Tensor  # [S, L] int64
    length: Tensor  # [S] int64: committed tokens, prompt included
    limit: Tensor  # [S] int64
    seed: Tensor  # [S] int64
    row: Tensor  # [S] int64
    requests: dict[int, Request] = field(default_factory=dict)
    prefilled: dict[int, int] = field(default_factory=dict)  # slot -> tokens of the prompt fed
    host_length: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)

    @classmethod
    def empty(cls, slots: int, capacity: int, device: torch.device) -> "DecodeState":
        """A state of `slots` free rows of at most `capacity` tokens."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        return cls(zeros(slots, capacity), zeros(slots), zeros(slots), zeros(slots), zeros(slots))

    def admit(self, slot: int, request: Request) -> None:
        """Put `request` into a free `slot`."""
        prompt = torch.tensor(list(request.prompt_ids), device=self.tokens.device)
        self.tokens[slot, : len(prompt)] = prompt
        self.length[slot] = len(prompt)
        self.limit[slot] = request.limit
        self.seed[slot] = request.seed
        self.row[slot] = request.row
        self.requests[slot] = request
        self.prefilled[slot] = 0
        self.host_length[slot] = len(prompt)

    def free(self, slot: int) -> None:
        """Forget the request in `slot`."""
        del self.requests[slot], self.prefilled[slot], self.host_length[slot]
        self.finished.discard(slot)


@dataclass(frozen=True)
class Group:
    """Rows that run one round together: same proposer, same gamma."""

    slots: list[int]
    index: Tensor  # [B] int64, the slots on the device
    rows: Tensor | None  # `index`, or None where the group is every slot in order
    params: SamplingParams
    greedy: bool
    gamma: int
    proposer_id: str | None


def make_group(state: DecodeState, slots: list[int], gamma: int, proposer_id: str | None) -> Group:
    """Gather the sampling parameters of `slots` into one group."""
    device = state.tokens.device
    sampling = [state.requests[slot].sampling for slot in slots]
    index = torch.tensor(slots, device=device)

    def float64(values: list[float]) -> Tensor:  # as SamplingParams.uniform: one number everywhere
        return torch.tensor(values, dtype=torch.float64, device=device)

    params = SamplingParams(
        temperature=float64([s.temperature for s in sampling]),
        top_k=torch.tensor([s.top_k for s in sampling], device=device),
        top_p=float64([s.top_p for s in sampling]),
        repetition_penalty=float64([s.repetition_penalty for s in sampling]),
        uses_top_k=any(s.top_k > 0 for s in sampling),
        uses_top_p=any(s.top_p < 1 for s in sampling),
        uses_penalty=any(s.repetition_penalty != 1 for s in sampling),
    )
    return Group(
        slots=slots,
        index=index,
        rows=None if slots == list(range(state.tokens.shape[0])) else index,
        params=params,
        greedy=all(s.temperature == 0 for s in sampling),
        gamma=gamma,
        proposer_id=proposer_id,
    )


@dataclass(frozen=True)
class RoundView:
    """What a proposer may look at: the committed text of its rows, never the target's logits."""

    group: Group
    length: Tensor  # [B] committed tokens
    last_two: Tensor  # [B, 2]; a one-token text shows its token twice
    seen: Tensor | None  # [B, V] bool: ids in the text, where a penalty needs them
    longest: int  # of `length`, known on the host
    seed: Tensor  # [B]
    row: Tensor  # [B]
    noise: NoiseFunction = noise.uniform

    def uniform(self, *, count: int, purpose: int) -> Tensor:
        """Return [B, count] numbers in [0, 1) for `purpose`, fresh in every round."""
        return self.noise(
            seed=self.seed, row=self.row, length=self.length, count=count, purpose=purpose
        )
