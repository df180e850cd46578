"""What the processes of a distributed launch agree on; one that is alone agrees with itself.

Importing this module loads no torch, so a command can use it before it knows what it needs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LAUNCHED = ("WORLD_SIZE", "RANK", "LOCAL_RANK")  # what a launcher sets, and accelerate reads


def processes() -> int:
    """How many processes were launched together, this one among them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the first process of its launch, which writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def join_group() -> None:
    """Join the process group of a distributed launch, where there is one to join."""
    if processes() == 1:
        return
    import torch
    from accelerate import PartialState

    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    # Left to itself it knows no group of processes without accelerators.
    PartialState(cpu=forced or not torch.cuda.is_available())


def leave_group() -> None:
    """Leave the process group of a distributed launch, where one was joined.

    Left to the interpreter's exit, its threads now and then abort a process that has done its work.
    """
    if processes() == 1:
        return
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()


def agree(value: Any) -> Any:
    """The first rank's `value`, on every rank of a distributed launch."""
    if processes() == 1:
        return value
    import torch

    join_group()
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def alone() -> Iterator[None]:
    """Let this process train by itself, while the others of a distributed launch wait for it."""
    if processes() == 1:
        yield
        return
    from accelerate.state import AcceleratorState

    launched = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        os.environ |= launched
        AcceleratorState._reset_state(reset_partial_state=True)
