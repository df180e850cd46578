"""How much memory a stage took."""

import resource

import torch


def peak_memory_bytes() -> int:
    """Peak of this process so far: device memory with CUDA, else resident memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
