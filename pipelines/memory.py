"""How much memory a stage took, and that it keeps what it has freed."""

import ctypes
import resource
from contextlib import suppress

import torch

KEPT_BYTES = 1 << 30  # of freed memory at most
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the numbers that glibc's `mallopt` gives them
LARGEST_HEAP_BYTES = 32 << 20  # of one allocation in the heap: glibc allows no more


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to `KEPT_BYTES`, where the C library is glibc.

    It would hand large tensors back to the kernel one by one, and every page of the next one would
    be a fault: on a virtual machine up to a third of a training step on the CPU.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(MMAP_THRESHOLD, LARGEST_HEAP_BYTES)


def peak_memory_bytes() -> int:
    """Peak of this process so far: device memory where it used any, else resident memory."""
    on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return int(on_device) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
