"""Seconds of a call to its end on the device, and the rate of a copy, which bounds decoding."""

import statistics
import time
from collections.abc import Callable

import torch

COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # beyond every cache
COPIES, TURNS = 10, 5


def seconds_of(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call of `function`, to its end on the device."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - started


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written together, of copying a large tensor on `device`: median."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copies() -> None:
        for _ in range(COPIES):
            target.copy_(source)

    copies()
    turns = [seconds_of(copies, device) for _ in range(TURNS)]
    return 2 * COPIES * source.nbytes / statistics.median(turns)
