"""A key-value cache with one slot a position: static buffers, rollback by pointer.

Row b of the decoder owns row b of every buffer; the token at position t is written to slot t.
Rolling back is writing the same slots again, so nothing is ever cropped or copied. Buffers are
made when a layer first writes, in the shape that layer uses (grouped-query attention included).
This module knows no lengths: the decoder keeps them and says how many slots are `visible`.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

BUCKET = 64


class SlotCache(Cache):
    """Keys and values of `rows` rows x `capacity` slots, all layers."""

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.visible = capacity
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._selected: Tensor | None = None  # [B] rows in use, None = all of them in order
        self._positions: Tensor | None = None  # [B, N] slots that the next update writes

    def select(self, rows: Tensor | None, *, longest: int) -> "SlotCache":
        """Use `rows` [B] (None: all, in order) and the slots that `longest` tokens can need.

        The number of visible slots is rounded up, so that few shapes occur.
        """
        self._selected = rows
        self.visible = min(self.capacity, -(-longest // BUCKET) * BUCKET)
        return self

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
        if layer_idx == len(self._keys):
            self._keys.append(self._buffer(key_states))
            self._values.append(self._buffer(value_states))
        return (
            self._write(self._keys[layer_idx], key_states),
            self._write(self._values[layer_idx], value_states),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions and masks are always given, no model needs to derive them."""
        return 0

    def _buffer(self, states: Tensor) -> Tensor:
        _, heads, _, size = states.shape
        return states.new_zeros(self.rows, self.capacity, heads, size)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        assert self._positions is not None
        rows = self._selected
        if rows is None:
            rows = torch.arange(self.rows, device=buffer.device)
        buffer[rows[:, None], self._positions] = states.transpose(1, 2)
        seen = buffer[:, : self.visible]
        if self._selected is not None:
            seen = seen[self._selected]
        return seen.transpose(1, 2)
