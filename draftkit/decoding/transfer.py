"""Small tensors between the host and a device, neither of which waits for the other.

A copy between a device and ordinary memory waits for all that the device still has to do, and so
does reading a value of a tensor there. Copies of page-locked memory are queued like any other work
of the device. Where tensors lie on the host, nothing is copied and nothing waits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    """`values`, numbers in lists of equal lengths, as a tensor on `device`."""
    made = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return made.to(device, non_blocking=True)


class Arriving(NamedTuple):
    """Tensors on the host that may be read after `wait`."""

    tensors: tuple[Tensor, ...]
    ready: torch.cuda.Event | None = None

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors, once what makes them is done; what the device does later is not awaited."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.tensors


def to_host(*tensors: Tensor) -> Arriving:
    """Queue copies of `tensors`, all on one device, to the host. They may then be written over."""
    if not any(tensor.is_cuda for tensor in tensors):
        return Arriving(tensors)
    on_host = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
    for place, tensor in zip(on_host, tensors, strict=True):
        place.copy_(tensor, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(tensors[0].device))
    return Arriving(on_host, ready)
