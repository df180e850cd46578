"""Where models run: device, precision, and how much memory is free or was taken there.

Knows no models, but what one takes while it is held in float32.
"""

import ctypes
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from draftkit.config import HardwareConfig
from draftkit.models.adapter import Adapter

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the numbers that glibc's `mallopt` gives them
NEVER = (1 << 31) - 1  # bytes, the most that `mallopt` takes
LARGEST_HEAP_BYTES = 32 << 20  # of one allocation in the heap: glibc allows no more
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def resolve_device(hardware: HardwareConfig) -> torch.device:
    """Return the device; `auto` is CUDA where there is one. Raises ValueError for absent CUDA.

    On CUDA attention by cuDNN is switched off for the process: it makes a plan for every new
    shape, on the host, and texts come in every length; and with masks some of its versions err.
    """
    available = torch.cuda.is_available()
    if hardware.device == "cuda" and not available:
        raise ValueError("hardware.device=cuda: no CUDA device is visible; use hardware=cpu")
    if hardware.device == "cpu" or not available:
        return torch.device("cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda")


def resolve_dtype(hardware: HardwareConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of inference; `auto` is bfloat16 only where the hardware computes in it."""
    if hardware.dtype != "auto":
        return getattr(torch, hardware.dtype)
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    features = torch.cpu.get_capabilities()
    native = features.get("avx512_bf16") or features.get("amx_bf16")
    return torch.bfloat16 if native else torch.float32


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
    left = [1 << 62 if available is None else available]
    with suppress(OSError):  # the control group (version 2) of this process, and those around it
        lines = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        for group in (CGROUP / name, *(CGROUP / name).parents):
            if not group.is_relative_to(CGROUP) or not (group / "memory.max").is_file():
                continue
            most = (group / "memory.max").read_text(encoding="utf-8").strip()
            used = int((group / "memory.current").read_text(encoding="utf-8"))
            stat = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
            counts = {key: int(count) for key, count in map(str.split, stat)}
            # Pages of files give way to whoever needs memory.
            files = counts["active_file"] + counts["inactive_file"]
            if most.isdecimal():
                left.append(int(most) - used + files)
    return max(0, min(left))


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
