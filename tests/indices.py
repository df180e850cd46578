"""What compilers may compute in int32: integers made of indices and numbers of the host alone.

For CUDA, Inductor folds such arithmetic into the index of a kernel, and prints that in 32 bits:
what does not fit there is refused, or wraps around.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

LARGEST = 2**31 - 1


class Indices(TorchDispatchMode):
    """Notes every operation on indices alone whose result leaves int32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.outside: list[str] = []
        self._made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        of_indices = bool(tensors) and all(tensor in self._made for tensor in tensors)
        if function.overloadpacket is torch.ops.aten.arange or of_indices:
            self._note(function, result)
        return result

    def _note(self, function: Any, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.int64 and tensor.numel():
                self.seen += 1
                self._made[tensor] = True
                if int(tensor.abs().max()) > LARGEST:
                    self.outside.append(f"{function}: {int(tensor.abs().max())}")


@contextmanager
def indices_inside_int32() -> Iterator[Indices]:
    """Fails where an operation on indices alone leaves int32, or where there was none."""
    with Indices() as indices:
        yield indices
    assert not indices.outside, indices.outside
    assert indices.seen
