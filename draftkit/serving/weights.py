"""Whether weights from outside are those of a drafter, and whether they arrived.

Knows state dicts only.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor


def fitted(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`given` as it can be copied into `own`: whole, on its device and in its precision.

    Files hold tied tensors once; here each name has its tensor. Copies to a device run beside what
    else it does, and have arrived when this returns. Raises ValueError naming the first
    tensor that is unknown, missing, of another shape or kind, or not finite.
    """
    if unknown := sorted(given.keys() - own.keys()):
        raise ValueError(f"the drafter has no {unknown[0]}")
    by_storage = {_storage(own[name]): tensor for name, tensor in given.items()}
    wanted = {}
    for name, tensor in own.items():
        new = given.get(name, by_storage.get(_storage(tensor)))
        if new is None:
            raise ValueError(f"{name} is missing")
        if new.shape != tensor.shape:
            raise ValueError(f"{name} is {list(new.shape)}, the drafter's {list(tensor.shape)}")
        if new.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{name} holds {new.dtype}, the drafter's {tensor.dtype}")
        wanted[name] = new
    device = next(iter(own.values())).device
    with torch.cuda.stream(_side_stream(device) if device.type == "cuda" else None):
        copies = {name: new.to(own[name].device, own[name].dtype) for name, new in wanted.items()}
        # Read at once: to look at a number on a device is to wait for it.
        finite = torch.stack([torch.isfinite(new).all() for new in copies.values()]).tolist()
    for name, is_finite in zip(copies, finite, strict=True):
        if not is_finite:
            raise ValueError(f"{name} holds numbers that are not finite")
    return copies


def same(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> bool:
    """Whether every tensor of `own` holds exactly what is `given`."""
    if not any(tensor.is_cuda for tensor in own.values()):
        return all(torch.equal(tensor, given[name]) for name, tensor in own.items())
    equal = [(tensor == given[name]).all() for name, tensor in own.items()]
    return bool(torch.stack(equal).all())


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """For work that rounds on `device` do not wait for."""
    return torch.cuda.Stream(device)


def _storage(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """Where a tensor lies: tied ones share it."""
    return tensor.data_ptr(), tuple(tensor.shape)
