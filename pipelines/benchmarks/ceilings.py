"""What a device can do at most, measured: copies, products, launches, waits.

Yardsticks for all else: plain decoding reads every weight once a token, which no copy can outrun.
Knows no models.
"""

import statistics
import time
from collections.abc import Callable

import torch

WARM, REPEATS = 3, 10
COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # beyond every cache
COPIES = {"cpu": 1, "cuda": 10}  # between two looks at the clock, which cost a copy's hundredth
TURNS = 5
LAUNCHES = 1000
Clock = Callable[[], float]  # seconds
KERNELS = 200  # of a captured graph


def seconds_of(
    function: Callable[[], object],
    device: torch.device,
    repeats: int,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds of one call of `function`, to its end on the device: the mean of `repeats`."""
    _wait(device)
    started = clock()
    for _ in range(repeats):
        function()
    _wait(device)
    return (clock() - started) / repeats


def copy_bandwidth(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Bytes a second, read and written together, of copying a large tensor on `device`: median."""
    source = torch.ones(COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    copies = COPIES[device.type]
    turns = [seconds_of(lambda: target.copy_(source), device, copies, clock) for _ in range(TURNS)]
    return 2 * source.nbytes / statistics.median(turns)


def matmul_rate(
    device: torch.device,
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    clock: Clock = time.perf_counter,
) -> float:
    """Operations a second of a product of two `size` x `size` matrices of normal numbers."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(WARM):
        left @ right
    return 2 * size**3 / seconds_of(lambda: left @ right, device, REPEATS, clock)


def launch_seconds(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds for which the host is busy with launching one small kernel."""
    number = torch.zeros(1, device=device)
    for _ in range(WARM):
        number.add_(1)
    _wait(device)
    started = clock()
    for _ in range(LAUNCHES):
        number.add_(1)
    seconds = (clock() - started) / LAUNCHES
    _wait(device)
    return seconds


def wait_seconds(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds from launching a small kernel until the host has read what it wrote: median."""
    number = torch.zeros(1, device=device)
    seconds = []
    for _ in range(WARM + 10 * REPEATS):
        started = clock()
        float(number.add_(1))
        seconds.append(clock() - started)
    return statistics.median(seconds[WARM:])


def kernel_seconds(device: torch.device) -> float | None:
    """Seconds of one small kernel among many in a CUDA graph; None on a CPU."""
    if device.type != "cuda":
        return None
    number = torch.zeros(1, device=device)

    def kernels() -> None:
        for _ in range(KERNELS):
            number.add_(1)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        kernels()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels()
    graph.replay()
    return seconds_of(graph.replay, device, REPEATS) / KERNELS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
