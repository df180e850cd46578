"""On the CPU too, groups are the first slots, idle ones among them, as they are on CUDA."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from draftkit.decoding import decoder
from draftkit.decoding.graphs import Units
from draftkit.decoding.state import group_shape


@pytest.fixture(autouse=True)
def _groups_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def shape(slots: Sequence[int], rows: int, units: Units) -> tuple[int, bool]:
        on_cuda = SimpleNamespace(
            device=torch.device("cuda"), is_fixed=units.is_fixed, sizes=units.sizes
        )
        return group_shape(slots, rows, on_cuda)

    monkeypatch.setattr(decoder, "group_shape", shape)
