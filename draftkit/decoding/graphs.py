"""The units of a round as machine code: compiled once, run without a glance at Python.

A unit is a function of two arguments: *resident*, objects whose tensors stay where they are (a
decoder with its caches, a proposer with its weights), and *inputs*, tensors that are new in every
round. Eagerly it is called as it is. Compiled, it becomes one graph for each `key`, and the key
must hold everything but tensor contents that the unit depends on: nothing is checked when the
graph runs (checking costs half a millisecond a pass on a CPU, as much as a draft step).
Copying new weights in place works, also where graphs read packed copies of them, unless `freeze`
makes them part of the graph, which is for weights that never change.

On CUDA a unit, compiled or as it is, is captured with all addresses that its kernels use, and
replayed. What it read then must stay where it is for as long as the capture is used: whoever moves
it calls `forget`.
This module knows no models, no rounds and no probabilities.
"""

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Unit = Callable[[Any, Any], Any]

BATCHES = (1, 4, 16, 64, 256)  # sizes for which code is compiled
COMPILED_BUCKET = 256  # cache slots: few shapes, since a graph takes seconds to make
FREEZE_BYTES = 256 << 20  # for packed copies of weights in the frozen graphs of a decoder
MOST_CAPTURED = 128  # captures of a decoder: each keeps what it reads and returns

_clock = {"seconds": 0.0}
_shared: dict[Hashable, Unit] = {}
_by_owner: WeakKeyDictionary[Any, dict[Hashable, Unit]] = WeakKeyDictionary()


def compile_seconds() -> float:
    """Seconds that this process has spent compiling and capturing so far."""
    return _clock["seconds"]


def batch_size(rows: int, slots: int, sizes: Sequence[int] | None = None) -> int:
    """The one of `sizes` (default `BATCHES`) that `rows` of `slots` rows run in, else all slots."""
    sizes = BATCHES if sizes is None else sizes
    return min(slots, next((size for size in sizes if size >= rows), slots))


def can_pack(device: torch.device) -> bool:
    """Whether the libraries of `device` read weights of half precision faster when packed."""
    return device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Units:
    """Runs units: as they are, `compiled`, and on a CUDA `device` captured.

    There `captured` captures them as they are where they are not compiled. `sizes`: of batches, as
    for `batch_size`.
    """

    def __init__(
        self,
        *,
        compiled: bool,
        device: torch.device,
        captured: bool = False,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.compiled = compiled
        self.sizes = sizes
        self.device = device
        self._captures = (compiled or captured) and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._captured: dict[tuple[Hashable, Hashable], Captured] = {}  # the oldest in use first

    @property
    def is_fixed(self) -> bool:
        """Whether each shape is code of its own, so that there should be few."""
        return self.compiled or self._captures

    def run(
        self,
        unit: Unit,
        resident: Any,
        inputs: Any,
        *,
        key: Hashable,
        owner: Any = None,
        freeze: bool = False,
        packs: bool = False,
        written: tuple[Tensor, ...] = (),
        holder: Hashable = None,
    ) -> Any:
        """Call `unit(resident, inputs)`; the next call may write over what it returns.

        Graphs belong to `owner` and go when it goes; without one, all that have the same unit and
        key share a graph. `freeze` makes constants of the weights; `packs` lets graphs read copies
        of them that are arranged for the processor. `written` are the tensors of `resident` that a
        second call would change again: capturing needs some calls before the first that counts. A
        capture is of what one `holder` has, until `forget`; parts of `inputs` that are frozen
        dataclasses must not change in place.
        """
        if not self.is_fixed:
            return unit(resident, inputs)
        key = (unit, key)
        if not self._captures:
            return _compiled(unit, key, owner, self.device, freeze, packs)(resident, inputs)
        captured = self._captured.pop((holder, key), None)
        if captured is None:
            function = _compiled(unit, key, owner, self.device) if self.compiled else unit
            if len(self._captured) >= MOST_CAPTURED:
                del self._captured[next(iter(self._captured))]
            # What another capture returns stays where it is, and need not be copied to be read.
            staying = {id(p) for one in self._captured.values() for p in tensors_of(one.outputs)}
            own = map_tensors(lambda part: part if id(part) in staying else part.clone(), inputs)
            with _timed():
                captured = Captured(function, resident, own, written, self._pool, self.device)
        self._captured[holder, key] = captured
        return captured(inputs)

    def forget(self) -> None:
        """Drop the captures of all holders, whose resident objects have moved or go."""
        for key in [key for key in self._captured if key[0] is not None]:
            del self._captured[key]


def _compiled(
    unit: Unit,
    key: Hashable,
    owner: Any,
    device: torch.device,
    freeze: bool = False,
    packs: bool = False,
) -> Unit:
    """The graph of `key`; its first call compiles it, under the clock."""
    graphs = _shared if owner is None else _by_owner.setdefault(owner, {})
    key = (key, freeze, packs)  # weights that were constant may be opened to training
    if key in graphs:
        return graphs[key]
    import torch._inductor.config as inductor

    on_cpu = device.type == "cpu"
    # On a CPU, calling kernels from C++ takes a fifth off a pass of a small model, and joining
    # the projections that read the same states (frozen weights only) a tenth. The calls themselves
    # are not worth optimising: thirty layers of them took the C++ compiler minutes.
    settings = {
        "freezing": freeze,
        "cpp.enable_concat_linear": freeze,
        "cpp.weight_prepack": packs,
        "cpp_wrapper": on_cpu,
        "cpp_wrapper_build_separate": on_cpu,
        "aot_inductor.compile_wrapper_opt_level": "O0",
        "size_asserts": not packs,  # packed weights have no strides
    }
    backend: Any = "inductor"
    if on_cpu and not freeze:
        from draftkit.decoding.pieces import by_layers

        backend = partial(by_layers, packs=packs)

    def isolated(resident: Any, inputs: Any) -> Any:
        return unit(resident, inputs)

    # The compiler keeps its graphs with the code object: a copy of it for each key keeps them
    # apart, as no guards tell which one fits.
    isolated.__code__ = isolated.__code__.replace()
    graph = torch.compile(
        isolated,
        backend=backend,
        fullgraph=True,
        dynamic=False,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )

    def compile_and_call(resident: Any, inputs: Any) -> Any:
        with _timed(), inductor.patch(settings), torch._dynamo.config.patch(recompile_limit=1):
            result = graph(resident, inputs)
        graphs[key] = graph
        return result

    return graphs.setdefault(key, compile_and_call)


@contextmanager
def _timed() -> Iterator[None]:
    started, before = time.perf_counter(), _clock["seconds"]
    yield
    _clock["seconds"] = before + time.perf_counter() - started  # what ran inside counts once


class Captured:
    """A unit as a CUDA graph: replayed on tensors that stay where they are.

    It holds none of `resident`, lest it keep alive who owns it: who owns it keeps them alive. Its
    own are `inputs`, which calls copy into, and what it returns, the same tensors in every call.
    """

    def __init__(
        self,
        function: Unit,
        resident: Any,
        inputs: Any,
        written: tuple[Tensor, ...],
        pool: Any,
        device: torch.device,
    ) -> None:
        self._inputs = inputs
        self._last: Any = None  # what was copied into them last
        kept = [tensor.clone() for tensor in written]
        stream, current = _capture_stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, then runs once more as it will run
                function(resident, inputs)
        current.wait_stream(stream)
        for tensor, value in zip(written, kept, strict=True):
            tensor.copy_(value)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: a server reads new weights beside its rounds.
        capture = torch.cuda.graph(
            self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        )
        collects = gc.isenabled()
        gc.disable()  # a collection may free a graph, which invalidates a capture under way
        try:
            with torch.cuda.device(device), capture:
                self.outputs = function(resident, inputs)
        finally:
            if collects:
                gc.enable()

    def __call__(self, inputs: Any) -> Any:
        """Copy what is new in `inputs` in, and replay."""
        copy_tensors(source=inputs, target=self._inputs, last=self._last)
        self._last = inputs
        self._graph.replay()
        return self.outputs


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures and what warms up for them: libraries keep memory by stream."""
    return torch.cuda.Stream(device)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` of dataclasses and named tuples with `function` applied to its tensors."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple):
        parts = [map_tensors(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if hasattr(tree, "__dataclass_fields__"):
        names = tree.__dataclass_fields__
        return type(tree)(**{n: map_tensors(function, getattr(tree, n)) for n in names})
    return tree


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of `tree`, as `map_tensors` meets them."""
    tensors: list[Tensor] = []
    map_tensors(lambda tensor: tensors.append(tensor) or tensor, tree)
    return tensors


def copy_tensors(*, source: Any, target: Any, last: Any = None) -> None:
    """Copy every tensor of `source` into its counterpart in `target`, a tree of the same shape.

    But not fields of frozen dataclasses that are the same objects as in `last`, whence `target`
    was copied before: they are values, and have not changed.
    """
    if isinstance(source, Tensor):
        if source is not target:
            target.copy_(source, non_blocking=True)
    elif isinstance(source, tuple):
        before = last if isinstance(last, tuple) else (None,) * len(source)
        for part, own, old in zip(source, target, before, strict=True):
            copy_tensors(source=part, target=own, last=old)
    elif hasattr(source, "__dataclass_fields__"):
        for name in source.__dataclass_fields__:
            part, old = getattr(source, name), getattr(last, name, None)
            if part is not old:
                copy_tensors(source=part, target=getattr(target, name), last=old)
