"""What a device can do at most, measured: products, launches, waits. Yardsticks for all else.

How fast it copies is `bandwidth.copy_bandwidth`. Knows no models.
"""

import statistics
import time
from collections.abc import Callable

import torch

WARM, REPEATS = 3, 10
LAUNCHES = 1000
KERNELS = 200  # of a captured graph


def seconds_of(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one call of `function`, to its end on the device: the mean of `repeats`."""
    for _ in range(WARM):
        function()
    _wait(device)
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    _wait(device)
    return (time.perf_counter() - started) / repeats


def matmul_rate(device: torch.device, size: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Operations a second of a product of two `size` x `size` matrices of normal numbers."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device, REPEATS)


def launch_seconds(device: torch.device) -> float:
    """Seconds for which the host is busy with launching one small kernel."""
    number = torch.zeros(1, device=device)
    seconds_of(lambda: number.add_(1), device, REPEATS)
    started = time.perf_counter()
    for _ in range(LAUNCHES):
        number.add_(1)
    seconds = (time.perf_counter() - started) / LAUNCHES
    _wait(device)
    return seconds


def wait_seconds(device: torch.device) -> float:
    """Seconds from launching a small kernel until the host has read what it wrote: median."""
    number = torch.zeros(1, device=device)
    seconds = []
    for _ in range(WARM + 10 * REPEATS):
        started = time.perf_counter()
        float(number.add_(1))
        seconds.append(time.perf_counter() - started)
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
    return seconds_of(graph.replay, device, REPEATS) / KERNELS


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
