"""Tests of what runs on a CUDA device, each rehearsed on the CPU.

`pytest -m gpu` runs them on the card, and nothing else; elsewhere the same code runs on the CPU in
small, so that on the card it fails for what it tests alone.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from draftkit.decoding.decoder import Decoder
from tests.tabular import TabularAdapter

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
on_devices = pytest.mark.parametrize(
    "device",
    [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=gpu)],
    ids=["cpu", "cuda"],
)


@dataclass(frozen=True)
class Code:
    """How a decoder runs its rounds."""

    compiled: bool = False
    captured: bool = False
    late: bool = False

    def decoder(self, target: Any, **options: Any) -> Decoder:
        """A decoder that runs them so."""
        return Decoder(
            target, compiled=self.compiled, captured=self.captured, late=self.late, **options
        )


def codes(device: torch.device, *, compiled: bool = False) -> list[Code]:
    """Eager, at once and late; on CUDA captured as well, and if wanted compiled."""
    made = [Code(), Code(late=True)]
    if device.type == "cuda":
        made += [Code(captured=True), Code(captured=True, late=True)]
    if compiled and device.type == "cuda":
        made += [Code(compiled=True), Code(compiled=True, late=True)]
    return made


def moved(table: TabularAdapter, device: torch.device) -> TabularAdapter:
    """A table on `device`."""
    return TabularAdapter(
        table.table.to(device), table.memory.to(device), max_positions=table.max_positions
    )


def used_bytes(device: torch.device) -> int:
    """Memory that tensors take on a CUDA `device`; elsewhere 0."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Inside, whatever makes the host wait for a CUDA `device` raises, but for events."""
    if device.type != "cuda":
        yield
        return
    try:
        with warnings.catch_warnings():
            # The first call in a process warns of a prototype.
            warnings.filterwarnings("ignore", ".*prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def milliseconds(device: torch.device, function: Any, *, times: int = 20) -> float:
    """A call of `function` on `device`, the mean of `times` after two that do not count."""
    for _ in range(2):
        function()
    if device.type != "cuda":
        function()
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times
