"""A key-value cache with one slot a position: static buffers, rollback by pointer.

Row b of the decoder owns row b of every buffer; the token at position t is written to slot t.
Rolling back is writing the same slots again, so nothing is ever cropped or copied; a request joins
by writing over a row and leaves by being forgotten. Buffers are made when a layer first writes, in
the shape that layer uses (grouped-query attention included). This module knows no lengths: the
decoder keeps them and says how many slots are `visible`.

For encoder-decoder models a row also holds the keys and values of its encoder's text, written once
when a request joins and only read from then on. Where a drafter reads the target's hidden states,
`streams` hold them, slot by slot like keys: what is rolled back is written again. Stream k of a
model of n layers is what stands in it behind k layers, the input of layer k; stream n is the last
hidden state, behind the final norm. (So `hidden_states` of transformers are numbered, and the
features of EAGLE-3, 2503.01840.)
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from draftkit.models.shapes import layer_count, layer_stack

BUCKET = 64


def visible_slots(
    longest: int, capacity: int, bucket: int = BUCKET, *, joins_last: bool = False
) -> int:
    """Slots that texts of `longest` tokens attend to: a power of two from `bucket` on.

    Rounded up, so that few shapes occur; never more than `capacity`. With `joins_last` a number
    of which `capacity` is less than the double is `capacity`: one shape for both.
    """
    slots = max(bucket, 1 << (longest - 1).bit_length())
    return capacity if slots * (2 if joins_last else 1) > capacity else slots


def rounded_capacity(capacity: int, device: torch.device) -> int:
    """The slots that rows of `capacity` get on `device`.

    On CUDA a multiple of `BUCKET`: texts of like lengths share code, and the rows of masks begin
    where kernels read them without a copy.
    """
    return capacity + -capacity % (BUCKET if device.type == "cuda" else 1)


class Branches(NamedTuple):
    """How nodes of a tree are read: node m lies in slot first + m, at position first + depths[m].

    All see the text before `first`, the slot and position of node 0.
    """

    first: Tensor  # [B]
    start: int  # the number of the first of the N nodes that are read
    depths: Tensor  # [M], of all nodes
    parent_index: Tensor  # [N] of the parent of each, among the nodes of its depth
    seen: Tensor  # [N, M] bool: which nodes each sees, itself among them


class SlotCache(Cache):
    """Keys and values of `rows` rows x `capacity` slots, all layers.

    `encoder_capacity` is the longest encoder text that a row can hold.
    """

    def __init__(self, rows: int, capacity: int, encoder_capacity: int = 0) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.visible = capacity
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._selected: Tensor | int | None = None  # rows in use, as in `select`
        self._branches: Branches | None = None
        self._positions: Tensor | None = None  # [B, N] slots that the next update writes
        self.encoder_capacity = encoder_capacity
        self.taps: tuple[int, ...] = ()  # the residual streams that passes keep, by their layer
        self.streams: dict[int, Tensor] = {}  # of each [rows, capacity, H]
        self._encoder: list[tuple[Tensor, Tensor]] = []  # [rows, E, heads, D] of each layer
        self._encoder_lengths: Tensor | None = None  # [rows], 0 for a row that has no text

    @property
    def is_made(self) -> bool:
        """Whether a pass has made the buffers; until then nothing may be compiled over them."""
        return bool(self._keys) and self.streams.keys() >= {*self.taps}

    def select(
        self, rows: Tensor | int | None, *, visible: int, branches: Branches | None = None
    ) -> "SlotCache":
        """Use `rows` [B] (a number: so many from the first on; None: all) and `visible` slots.

        With `branches` what is fed next are nodes of a tree.
        """
        self._selected = rows
        self.visible = visible
        self._branches = branches
        return self

    def reading(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where tokens at `positions` [B, N] are written, and what of the C visible slots they see.

        Returns slots [B, N]; how far back each visible slot lies, and whether it is seen at all
        [B, 1, N, C].
        """
        visible, branches = torch.arange(self.visible, device=positions.device), self._branches
        if branches is None:
            behind = positions[:, None, :, None] - visible
            return positions, behind, behind >= 0
        first, count = branches.first[:, None], len(branches.depths)
        node = visible - first  # [B, C], negative in the text before
        known = node.clamp(min=0, max=count - 1)
        stands = torch.where(node < 0, visible, first + branches.depths[known])
        on_path = branches.seen[:, known].transpose(0, 1) & (node < count)[:, None]  # [B, N, C]
        order = torch.arange(positions.shape[1], device=positions.device) + branches.start
        # A filler's text may end anywhere: it must not reach beyond the cache.
        slots = (first + order).clamp(max=self.capacity - 1)
        behind = positions[:, None, :, None] - stands[:, None, None]
        return slots, behind, (on_path | (node < 0)[:, None])[:, None]

    def at(self, positions: Tensor) -> "SlotCache":
        """Let the next pass write its keys and values to slots `positions` [B, N]."""
        self._positions = positions
        return self

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, N, D] into the slots; return the visible [B, heads, C, D] of both."""
        rows = self._rows(key_states.device)[:, None]
        held = (self._keys, self._values)
        for buffers, states in zip(held, (key_states, value_states), strict=True):
            if layer_idx == len(buffers):
                # Heads before slots: products over many rows then read keys where they lie.
                shape = (self.rows, states.shape[1], self.capacity, states.shape[3])
                buffers.append(states.new_zeros(shape))
            buffers[layer_idx][rows, :, self._positions] = states.transpose(1, 2)
        keys, values = (buffers[layer_idx][:, :, : self.visible] for buffers in held)
        return self._of_rows(keys), self._of_rows(values)

    def keep(self, layer: int, states: Tensor) -> None:
        """Keep the residual stream [B, N, H] behind so many layers in the slots of the pass."""
        if layer not in self.streams:
            shape = (self.rows, self.capacity, states.shape[-1])
            self.streams[layer] = states.new_zeros(shape)
        self.streams[layer][self._rows(states.device)[:, None], self._positions] = states

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy what lies in slots `source` [B, D] of the selected rows to slots `target` [B, D]."""
        rows = self._rows(source.device)[:, None]
        for buffer in (*self._keys, *self._values):
            buffer[rows, :, target] = buffer[rows, :, source]
        for stream in self.streams.values():
            stream[rows, target] = stream[rows, source]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions and masks are always given, no model needs to derive them."""
        return 0

    def write_encoder(self, layers: Iterable[tuple[Tensor, Tensor]], lengths: Tensor) -> None:
        """Keep the encoder texts of the selected rows: their `lengths` [B], and of every decoder
        layer the keys and values [B, E, heads, D] of cross attention (padded on the right).
        """
        rows = self._selected if isinstance(self._selected, Tensor) else slice(self._selected)
        if self._encoder_lengths is None:
            self._encoder_lengths = lengths.new_zeros(self.rows)
        self._encoder_lengths[rows] = lengths
        for layer, states in enumerate(layers):
            if layer == len(self._encoder):
                shape = (self.rows, self.encoder_capacity, *states[0].shape[2:])
                self._encoder.append((states[0].new_zeros(shape), states[1].new_zeros(shape)))
            for buffer, part in zip(self._encoder[layer], states, strict=True):
                buffer[rows, : part.shape[1]] = part

    def read_encoder(self) -> list[tuple[Tensor, ...]]:
        """Return the [B, heads, E, D] keys and values of every layer."""
        return [
            tuple(self._of_rows(part).transpose(1, 2) for part in layer) for layer in self._encoder
        ]

    @property
    def encoder_lengths(self) -> Tensor:
        """Lengths [B] of the encoder texts of the selected rows."""
        assert self._encoder_lengths is not None
        return self._of_rows(self._encoder_lengths)

    def _rows(self, device: torch.device) -> Tensor:
        """The numbers [B] of the selected rows."""
        if isinstance(self._selected, Tensor):
            return self._selected
        return torch.arange(self.rows if self._selected is None else self._selected, device=device)

    def _of_rows(self, seen: Tensor) -> Tensor:
        """The selected rows of `seen`: a copy, unless they are the first so many or all."""
        if isinstance(self._selected, Tensor):
            return seen[self._selected]
        return seen if self._selected is None else seen[: self._selected]


class Streams:
    """Catches the streams of `model` in passes between `open` and `close`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._hooked: set[int] = set()
        self._caught: dict[int, Tensor] | None = None

    def open(self, layers: tuple[int, ...]) -> None:
        """Catch the streams of `layers` in the next pass.

        Raises ValueError for a model that has fewer, or does not show its layers.
        """
        for layer in layers:
            if layer not in self._hooked:
                self._hook(layer)
                self._hooked.add(layer)
        self._caught = {} if layers else None

    def close(self) -> dict[int, Tensor]:
        """What was caught, [B, N, H] of each layer; later passes keep nothing."""
        caught, self._caught = self._caught or {}, None
        return caught

    def _hook(self, layer: int) -> None:
        model: Any = self._model
        count = layer_count(model.config)

        def before(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if self._caught is not None:
                self._caught[layer] = given[0] if given else named["hidden_states"]

        def behind(_: nn.Module, given: Any, named: dict[str, Any], output: Any) -> None:
            if self._caught is not None:
                self._caught[layer] = output.last_hidden_state

        if layer == count:
            model.base_model.register_forward_hook(behind, with_kwargs=True)
        else:
            _, layers = layer_stack(model)
            layers[layer].register_forward_pre_hook(before, with_kwargs=True)
