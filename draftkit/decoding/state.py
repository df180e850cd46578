"""What the decoder remembers of its rows, and what it shows of them to a proposer.

One row a slot. Lengths are the only pointers: tokens and cache slots at or beyond a row's length
are garbage that the next round overwrites. Noise enters here as a function, so that tests can
force every outcome.

Shapes: S slots, B rows of a group, L tokens a row can hold, K proposed tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.graphs import Units, batch_size
from draftkit.decoding.trees import Tree
from draftkit.theory import noise
from draftkit.theory.warping import SamplingParams, seen_tokens

NoiseFunction = Callable[..., Tensor]  # the signature of `theory.noise.uniform`
# Of many rows, a few that are done run along: to leave them out is to copy the cache of the others.
MANY_ROWS, NEARLY_ALL = 16, 0.75
PREFIX_ROWS = 2  # on CUDA, where rows cost less than copies: so many for each row of a group
LEAST_TOP_K = 64  # logits that are sorted where every row has a top-k: few sizes, as code has them


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued. In float32 `seed` and `row` give the same tokens in any batch.

    So they do up to near-ties. In bfloat16 the passes of other batch sizes round differently, and
    a token whose interval of the distribution ends near its random number becomes another one: the
    law stays, the tokens may not.
    Under an encoder-decoder model the prompt is what the encoder reads, the token that begins the
    decoder's text, and what there is of that.
    `adapts` lets the decoder's gamma policy propose fewer than `gamma` tokens; the law of the
    answer stays, but the tokens that a seed gives then depend on the policy.
    `ignores_eos` makes an end of text a token like others: only the length ends the answer.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig
    gamma: int = 0
    proposer_id: str | None = None
    seed: int = 0
    row: int = 0
    adapts: bool = False
    ignores_eos: bool = False

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


def tokens_needed(request: Request, tree: Tree | None = None) -> int:
    """Cache slots of one request: its longest text and the scratch space of two rounds.

    tree: what is proposed to it, where it is no chain.
    """
    return request.limit + 2 * (max(request.gamma, 0 if tree is None else tree.nodes) + 1)


@dataclass(eq=False)
class Slot:
    """A request in a slot, and how far the host knows it to have come."""

    number: int
    request: Request
    length: int  # committed tokens, as far as results have been read
    fed: int  # tokens that a proposer with a cache holds, once it has
    followed: int = 0  # taken part in, or been shown, all rounds before this one
    rounds: int = 0  # begun
    prefilled: int = 0  # tokens of the prompt that have been fed
    encoder_ids: Sequence[int] = ()
    is_encoded: bool = False  # whether the encoder has read them, if there is one
    is_finished: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether all but the last token of the prompt have been fed: rounds feed that one."""
        return self.is_encoded and self.prefilled >= len(self.request.prompt_ids) - 1


@dataclass
class DecodeState:
    """Per-slot tensors, and on the host the slots that hold a request."""

    tokens: Tensor  # [S, L] int64
    length: Tensor  # [S] int64: committed tokens, prompt included
    limit: Tensor  # [S] int64
    seed: Tensor  # [S] int64
    row: Tensor  # [S] int64
    done: Tensor  # [S] bool: nothing more may follow; true for a free slot
    slots: dict[int, Slot] = field(default_factory=dict)

    @classmethod
    def empty(cls, slots: int, capacity: int, device: torch.device) -> "DecodeState":
        """A state of `slots` free rows of at most `capacity` tokens."""
        tokens = torch.zeros(slots, capacity, dtype=torch.long, device=device)
        length, limit, seed, row = (torch.zeros_like(tokens[:, 0]) for _ in range(4))
        done = torch.ones(slots, dtype=torch.bool, device=device)
        return cls(tokens, length, limit, seed, row, done)

    def admit(self, number: int, request: Request, encoder_ids: Sequence[int] = ()) -> None:
        """Put `request`, without what the encoder reads of it, into the slot of that number."""
        count = len(request.prompt_ids)
        prompt = to_device(list(request.prompt_ids), self.tokens.device, torch.long)
        self.tokens[number, :count] = prompt
        self.length[number] = count
        self.limit[number] = request.limit
        self.seed[number] = request.seed
        self.row[number] = request.row
        self.done[number] = False
        encoded = not encoder_ids
        self.slots[number] = Slot(
            number, request, count, count - 1, encoder_ids=encoder_ids, is_encoded=encoded
        )

    def free(self, number: int) -> None:
        """Forget the request in a slot."""
        del self.slots[number]
        self.done[number] = True


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    """`values`, numbers in lists of equal lengths, as a tensor on `device`.

    Of page-locked memory, which the device copies without the host waiting for it.
    """
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


@dataclass(frozen=True)
class Group:
    """Rows that run one round together: same proposer, same gamma.

    `index` may name more slots than have a row of their own here: fillers that bring a batch to a
    size for which there is compiled code. They run along and commit nothing: they are not `active`.
    """

    members: dict[int, int]  # slot -> its row of the batch, fillers left out
    index: Tensor  # [B] int64, slots on the device, fillers included
    # `index`; its length where the group is the first slots in order; None where it is all of them.
    rows: Tensor | int | None
    active: Tensor  # [B] bool
    ignores_eos: Tensor  # [B] bool
    params: SamplingParams
    gamma: int
    proposer_id: str | None
    adapts: bool = False
    most: int = 0  # proposals that a round of these rows may have had before
    tree: Tree | None = None  # what is proposed, where it is no chain; `gamma` is its depth

    @property
    def greedy(self) -> bool:
        return not self.params.uses_sampling

    @property
    def key(self) -> tuple[object, ...]:
        """What compiled code depends on, tensors' contents apart."""
        p = self.params
        flags = (p.uses_top_k, p.uses_top_p, p.uses_penalty, p.uses_greedy, p.uses_sampling)
        is_gathered = isinstance(self.rows, Tensor)
        tree = None if self.tree is None else self.tree.key
        return (len(self.index), is_gathered, self.gamma, flags, p.largest_top_k, tree)

    @property
    def scratch(self) -> int:
        """Slots that a round writes: of the last token, and of what is proposed."""
        return 1 + (self.gamma if self.tree is None else self.tree.nodes)


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
    size: int | None = None,
    prefix: bool = False,
) -> Group:
    """Gather the sampling parameters of `slots` into one group of `size` rows (default: theirs).

    With `prefix` these are the first `size` slots, in which the others must be.
    """
    everything = [*range(state.tokens.shape[0])]
    size = size or len(slots)
    spare = sorted({*everything} - {*slots})
    index = everything[:size] if prefix else sorted(slots + spare[: size - len(slots)])
    sampling = {slot: state.slots[slot].request.sampling for slot in slots}
    rows = [sampling.get(slot, sampling[slots[0]]) for slot in index]
    columns = [
        index,
        [slot in sampling for slot in index],
        [s.top_k for s in rows],
        [s.temperature for s in rows],
        [s.top_p for s in rows],
        [s.repetition_penalty for s in rows],
        [slot in sampling and state.slots[slot].request.ignores_eos for slot in index],
    ]
    # In one copy. As SamplingParams.uniform: float64, so that a number is the same everywhere.
    of_rows = to_device(columns, state.tokens.device, torch.float64)
    temperature, top_p, repetition_penalty, ignores_eos = of_rows[3:]
    top_ks, largest = [s.top_k for s in rows if s.temperature > 0], None
    if min(top_ks, default=0) > 0:  # no sampled row keeps all (0)
        largest = max(LEAST_TOP_K, 1 << (max(top_ks) - 1).bit_length())
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
        largest_top_k=largest,
    )
    on_device = of_rows[0].long()
    return Group(
        members={slot: row for row, slot in enumerate(index) if slot in sampling},
        index=on_device,
        rows=None if index == everything else size if prefix else on_device,
        active=of_rows[1] > 0,
        params=params,
        gamma=gamma,
        proposer_id=proposer_id,
        most=gamma,
        ignores_eos=ignores_eos > 0,
    )


@dataclass(frozen=True)
class RoundView:
    """What a proposer may look at: the committed text of its rows, never the target's logits.

    streams: what the target has kept of its passes over that text, by layer (`models.cache`), of
    all slots: known for all tokens of a text but the last.
    """

    group: Group
    tokens: Tensor  # [B, L] the text, garbage from `length` on
    length: Tensor  # [B] committed tokens
    last_two: Tensor  # [B, 2]; a one-token text shows its token twice
    seen: Tensor | None  # [B, V] bool: ids in the text, where a penalty needs them
    visible: int  # cache slots that text and proposals of this round can need
    seed: Tensor  # [B]
    row: Tensor  # [B]
    noise: NoiseFunction = noise.uniform
    streams: dict[int, Tensor] = field(default_factory=dict)

    def features(self, positions: Tensor, layers: Sequence[int]) -> Tensor:
        """The streams of `layers`, joined, at `positions` [B, N] of the rows: [B, N, F]."""
        rows = self.group.index[:, None]
        return torch.cat([self.streams[layer][rows, positions] for layer in layers], -1)

    def uniform(self, *, count: int, purpose: int) -> Tensor:
        """Return [B, count] numbers in [0, 1) for `purpose`, fresh in every round."""
        return self.noise(
            seed=self.seed, row=self.row, length=self.length, count=count, purpose=purpose
        )


def text_of(tokens: Tensor, length: Tensor, vocab_size: int | None) -> dict[str, Any]:
    """The fields of a view that its text makes; `vocab_size` where a penalty needs what is seen."""
    last = length[:, None] + torch.arange(-2, 0, device=length.device)
    return {
        "tokens": tokens,
        "length": length,
        "last_two": tokens.gather(1, last.clamp(min=0)),
        "seen": None if vocab_size is None else seen_tokens(tokens, length, vocab_size),
    }
