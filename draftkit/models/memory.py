"""How much memory models take, known from shapes before they are loaded, and how much is free.

Estimates count weights and caches, which are nearly all of it; activations of a few rows and what
an allocator holds back are left to the caller's reserve.
"""

import ctypes
import os
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

# Of freed memory that a process may gather before it gives it back: this share of what it holds,
# at least so many bytes. The next step has to fetch it again: done every 5 steps, steps of a 135 M
# pair took a sixth longer.
KEPT_SHARE, KEPT_BYTES = 0.25, 1 << 28
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the numbers that glibc's `mallopt` gives them
NEVER = (1 << 31) - 1  # bytes, the most that `mallopt` takes
LARGEST_HEAP_BYTES = 32 << 20  # of one allocation in the heap: glibc allows no more
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
# Limits of this process, and what of its status counts against each.
LIMITS = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}


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
    the limits of its control group and its own.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    status = _sizes(PROC / "self" / "status")
    free = [_sizes(PROC / "meminfo").get("MemAvailable", 1 << 62), *_left_in_groups()]
    for limit, counted in LIMITS.items():
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            free.append(most - status.get(counted, 0))
    return max(0, min(free))


def keep_freed_memory() -> None:
    """Let this process keep what it frees until `give_back_freed_memory`, where the C library is
    glibc.

    It would hand large tensors back to the kernel one by one, and every page of the next one would
    be a fault: on a virtual machine up to a third of a training step on the CPU.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, NEVER)
        library.mallopt(MMAP_THRESHOLD, LARGEST_HEAP_BYTES)


def keep_few_primitives() -> None:
    """Let oneDNN keep the code of its last 64 operations, not 1,024, unless the user says so.

    Each shape is another, and texts have ever other lengths: half a gigabyte for a 135 M pair.
    Call it before the first operation.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def give_back_freed_memory() -> None:
    """Hand freed memory back to the kernel."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """Gives freed memory back as soon as much of it has gathered.

    Tensors of ever other sizes leave gaps: unchecked, a heap of which 0.4 GB are used grows by a
    gigabyte in 200 steps.
    """

    def __init__(self) -> None:
        self._held: int | None = None  # bytes after the first step since

    def check(self) -> None:
        """Look after a step."""
        held = _sizes(PROC / "self" / "status").get("RssAnon", 0)
        if self._held is None:
            self._held = held
        elif held > self._held + may_gather(self._held):
            give_back_freed_memory()
            self._held = None


def may_gather(held: int) -> int:
    """Bytes of freed memory that stay where so many are held."""
    return max(KEPT_BYTES, int(KEPT_SHARE * held))


def reset_peak(device: torch.device) -> None:
    """Let `peak_bytes` begin anew, where the system can."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5", encoding="utf-8")


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held since `reset_peak`, resident or on the card."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = _sizes(PROC / "self" / "status").get("VmHWM")
    return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _sizes(path: Path) -> dict[str, int]:
    """Lines such as `VmSize: 1024 kB`, in bytes; nothing where the system has no such file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    words = (line.replace(":", " ").split() for line in lines)
    return {word[0]: int(word[1]) << 10 for word in words if word[2:] == ["kB"]}


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
