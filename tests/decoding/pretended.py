"""A CUDA device that is none: captures are replayed where they were taken, and who waits is seen.

`pretended_captures` puts a tape in the place of CUDA graphs: it notes operations with the tensors
that they read and write, and replays them on these, wherever the world has moved meanwhile.
`pretended_device` lets tensors count as lying on a device: copies to the host arrive when an event
behind them has been waited for, and to read a value in any other way is to wait for the device.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftkit.decoding.decoder import Decoder

# Captures


class Tape(TorchDispatchMode):
    """Stands in for `torch.cuda.CUDAGraph`."""

    made: list["Tape"]  # all of a test

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.collects = True  # whether garbage could be collected while it was made
        self.replays = 0
        self.made.append(self)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function._schema.is_mutable:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.before += [(tensor, tensor.clone()) for tensor in tensors]
        result = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, result))
        return result

    def end(self) -> None:
        """Undo what was written: a capture notes what it would do, and does nothing."""
        while self.before:
            tensor, value = self.before.pop()
            tensor.copy_(value)

    def replay(self) -> None:
        self.replays += 1
        with torch._C.DisableTorchFunction():
            for function, args, kwargs, result in self.steps:
                again = function(*args, **kwargs)
                for new, old in zip(tree_leaves(again), tree_leaves(result), strict=True):
                    is_new = isinstance(old, Tensor) and new.data_ptr() != old.data_ptr()
                    if is_new and old.numel():
                        old.copy_(new)


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, other: "Stream") -> None:
        assert other.device == self.device, (other.device, self.device)


@contextmanager
def _capture(tape: Tape, **options: Any) -> Iterator[None]:
    tape.collects = gc.isenabled()
    with tape:
        yield
    tape.end()


@contextmanager
def pretended_captures() -> Iterator[list[Tape]]:
    """What is captured inside, of decoders whose units have been told to capture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "made", [], raising=False)
        patch.setattr(torch.cuda, "CUDAGraph", Tape)
        patch.setattr(torch.cuda, "graph", _capture)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        yield Tape.made


# Waiting

READS = {
    *(Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.nonzero, Tensor.__bool__),
    *(Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__, Tensor.equal),
    *(torch.nonzero, torch.equal, torch.masked_select, torch.unique),
}


class Waited(AssertionError):
    """The host would have waited for all that the device has to do."""


class Device:
    """Copies that are under way, and who waited for which of them."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.recorded = 0  # events
        self.waits: list[tuple[int, int]] = []  # for which event, and how many there were
        self.streams: list[Any] = []  # on which events were recorded


DEVICE = Device()


class OnDevice(Tensor):
    """A tensor of which the host may not know a value."""

    @property
    def is_cuda(self) -> bool:  # pyrefly: ignore[bad-override]
        return True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in READS and any(isinstance(part, OnDevice) for part in args):
            raise Waited(getattr(func, "__name__", func))
        if func is Tensor.copy_ and not isinstance(args[0], OnDevice):
            place, value = args[:2]
            if not kwargs.get("non_blocking"):
                raise Waited("copy_")
            place.fill_(-7)  # garbage, until it has arrived
            DEVICE.copies.append((place, value.as_subclass(Tensor).clone()))
            return place
        return super().__torch_function__(func, types, args, kwargs)


class Event:
    """Stands in for `torch.cuda.Event`."""

    def record(self, stream: Any = None) -> None:
        DEVICE.streams.append(stream)
        self.number = DEVICE.recorded
        DEVICE.recorded += 1
        self.copies, DEVICE.copies = DEVICE.copies, []

    def synchronize(self) -> None:
        DEVICE.waits.append((self.number, DEVICE.recorded))
        for place, value in self.copies:
            place.copy_(value)


class _Unpinned(TorchFunctionMode):
    """Page-locked memory is ordinary; to make a tensor on the device of a list is to wait."""

    def __init__(self, *, lists_wait: bool) -> None:
        super().__init__()
        self.lists_wait = lists_wait

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if self.lists_wait and func is torch.tensor and kwargs.get("device") is not None:
            raise Waited("tensor")
        return func(*args, **kwargs)


@contextmanager
def pretended_device(*, lists_wait: bool = True) -> Iterator[Device]:
    """What waits for the device inside raises, but for events (and lists, unless they are to)."""
    DEVICE.__init__()
    with pytest.MonkeyPatch.context() as patch, _Unpinned(lists_wait=lists_wait):
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", Stream)
        yield DEVICE


def put_on_device(decoder: Decoder) -> Decoder:
    """`decoder` of tables, with its state and all tables on the pretended device."""
    proposers: list[Any] = [*decoder._proposers.values()]
    for owner in (decoder, decoder.state, decoder.target, *(one.draft for one in proposers)):
        for name, value in list(vars(owner).items()):
            if isinstance(value, Tensor):
                setattr(owner, name, value.as_subclass(OnDevice))
    return decoder
