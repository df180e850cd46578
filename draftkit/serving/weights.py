"""Whether weights from outside are those of a drafter, and whether they arrived.

Knows state dicts only.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def fitted(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`given` as it can be copied into `own`: whole, on its device and in its precision.

    Files hold tied tensors once; here each name has its tensor. Raises ValueError naming the first
    tensor that is unknown, missing, of another shape or kind, or not finite.
    """
    if unknown := sorted(given.keys() - own.keys()):
        raise ValueError(f"the drafter has no {unknown[0]}")
    by_place = {_place(own[name]): tensor for name, tensor in given.items()}
    found = {}
    for name, tensor in own.items():
        new = given.get(name, by_place.get(_place(tensor)))
        if new is None:
            raise ValueError(f"{name} is missing")
        if new.shape != tensor.shape:
            raise ValueError(f"{name} is {list(new.shape)}, the drafter's {list(tensor.shape)}")
        if new.is_floating_point() != tensor.is_floating_point():
            raise ValueError(f"{name} holds {new.dtype}, the drafter's {tensor.dtype}")
        found[name] = new.to(device=tensor.device, dtype=tensor.dtype)
        if not bool(torch.isfinite(found[name]).all()):
            raise ValueError(f"{name} holds numbers that are not finite")
    return found


def same(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> bool:
    """Whether every tensor of `own` holds exactly what is `given`."""
    return all(torch.equal(tensor, given[name]) for name, tensor in own.items())


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """Where a tensor lies: tied ones share it."""
    return tensor.data_ptr(), tuple(tensor.shape)
