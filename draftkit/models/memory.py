"""How much memory models take, known from shapes before they are loaded, and how much is free.

Estimates count weights and caches, which are nearly all of it; activations of a few rows and what
an allocator holds back are left to the caller's reserve.
"""

import ctypes
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from draftkit.models.adapter import Adapter
from draftkit.models.heads import head_class
from draftkit.models.loading import auto_model

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the numbers that glibc's `mallopt` gives them
NEVER = (1 << 31) - 1  # bytes, the most that `mallopt` takes
LARGEST_HEAP_BYTES = 32 << 20  # of one allocation in the heap: glibc allows no more
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def weight_count(config: PreTrainedConfig) -> int:
    """Weights of a model of that configuration, tied ones once; none are made."""
    head: Any = head_class(config)
    with torch.device("meta"):
        model = auto_model(config).from_config(config) if head is None else head(config)
    return sum(weight.numel() for weight in model.parameters())


@contextmanager
def in_float32(target: Adapter) -> Iterator[None]:
    """Hold the weights of `target` in float32 for a while, in place: no second copy is loaded.

    Those of lower precision come back bit by bit.
    """
    dtype, weights = target.dtype, [*target.model.parameters()]
    for weight in weights:
        weight.data = weight.data.to(torch.float32)
    try:
        yield
    finally:
        for weight in weights:
            weight.data = weight.data.to(dtype)


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take on `device`: of the card, or of the machine within
    the limits of its control group.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    available = _stated(PROC / "meminfo", "MemAvailable")
    return max(0, min([1 << 62 if available is None else available, *_left_in_groups()]))


def keep_freed_memory() -> None:
    """Let this process keep what it frees, where the C library is glibc.

    It would hand large tensors back to the kernel one by one, and every page of the next one would
    be a fault: on a virtual machine up to a third of a training step on the CPU.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, NEVER)
        library.mallopt(MMAP_THRESHOLD, LARGEST_HEAP_BYTES)


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` begin anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # else what an earlier stage has freed would count
        (PROC / "self" / "clear_refs").write_text("5", encoding="utf-8")


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held since `reset_peak`, resident or on the card."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = _stated(PROC / "self" / "status", "VmHWM")
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _stated(path: Path, name: str) -> int | None:
    """What a line such as `VmHWM: 1024 kB` states, in bytes; None where the system has none."""
    with suppress(OSError):
        line = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return None if line is None else int(line[1]) << 10
    return None


def _left_in_groups() -> Iterator[int]:
    """What the control group (version 2) of this process and those around it leave it."""
    with suppress(OSError):
        lines = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        folder = CGROUP / name
        for group in (folder, *folder.parents):
            if group.is_relative_to(CGROUP) and (group / "memory.max").is_file():
                most = (group / "memory.max").read_text(encoding="utf-8").strip()
                used = int((group / "memory.current").read_text(encoding="utf-8"))
                stat = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
                counts = {key: int(count) for key, count in map(str.split, stat)}
                # Pages of files give way to whoever needs memory.
                files = counts["active_file"] + counts["inactive_file"]
                if most.isdecimal():
                    yield int(most) - used + files
