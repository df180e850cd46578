"""Seconds of a call to its end on the device, and the rate of a copy, which bounds decoding."""

import statistics
import time
from collections.abc import Callable

import torch

COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # beyond every cache
COPIES = {"cpu": 1, "cuda": 10}  # between two looks at the clock, which wait for the device
TURNS = 5
Clock = Callable[[], float]  # seconds


def seconds_of(
    function: Callable[[], object],
    device: torch.device,
    repeats: int = 1,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds of one call of `function`, to its end on the device: the mean of `repeats`."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = clock()
    for _ in range(repeats):
        function()
    wait()
    return (clock() - started) / repeats


def copy_bandwidth(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Bytes a second, read and written together, of copying a large tensor on `device`: median."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copies = COPIES[device.type]
    turns = [seconds_of(lambda: target.copy_(source), device, copies, clock) for _ in range(TURNS)]
    return 2 * source.nbytes / statistics.median(turns)
