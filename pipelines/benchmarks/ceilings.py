"""Part a of the GPU benchmark: what the machine is, and what it can do at most, measured.

Copies, products, launches, waits: yardsticks for all else, since plain decoding reads every weight
once a token, which no copy can outrun. Knows no models.
"""

import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .gpu.part import Part

WARM, REPEATS = 3, 10
COPIED_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}  # beyond every cache
COPIES = {"cpu": 1, "cuda": 10}  # between two looks at the clock, which cost a copy's hundredth
TURNS = 5
LAUNCHES = 1000
KERNELS = 200  # of a captured graph
PACKAGES = ("torch", "triton", "transformers", "accelerate", "numpy", "hydra-core", "pytest")
Clock = Callable[[], float]  # seconds


def seconds_of(
    function: Callable[[], object],
    device: torch.device,
    repeats: int = 1,
    clock: Clock = time.perf_counter,
    *,
    launched: bool = False,
) -> float:
    """Seconds of one call of `function`, to its end on the device: the mean of `repeats`.

    launched: only until the host has launched it.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = clock()
    for _ in range(repeats):
        function()
    if not launched:
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
    return seconds_of(lambda: number.add_(1), device, LAUNCHES, clock, launched=True)


def wait_seconds(device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Seconds from launching a small kernel until the host has read what it wrote: median."""
    number = torch.zeros(1, device=device)
    count = WARM + 10 * REPEATS
    turns = [seconds_of(lambda: float(number.add_(1)), device, clock=clock) for _ in range(count)]
    return statistics.median(turns[WARM:])


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


def machine(device: torch.device) -> dict[str, Any]:
    """Versions, and the device as PyTorch sees it."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    if device.type != "cuda":
        return {"versions": versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "versions": versions,
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "capability_of_wheels": torch.cuda.get_arch_list(),
    }


def run(part: Part) -> None:
    device, size = part.device, part.size(8192, 64)
    part.step("machine", lambda: machine(device))
    part.step("copy, bytes a second", lambda: copy_bandwidth(device))
    part.step("product in bfloat16, operations a second", lambda: matmul_rate(device, size))
    part.step("launch, seconds of the host", lambda: launch_seconds(device))
    part.step("launch and read, seconds", lambda: wait_seconds(device))
    part.step("kernel in a graph, seconds", lambda: kernel_seconds(device))
