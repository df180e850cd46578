"""The units of a round as machine code: compiled once, run without a glance at Python.

A unit is a function of two arguments: *places*, objects whose tensors stay where they are (a
decoder with its caches, a proposer with its weights), and *inputs*, tensors that are new in every
round. Eagerly it is called as it is. Compiled, it becomes one graph for each `key`, and the key
must hold everything but tensor contents that the unit depends on: nothing is checked when the
graph runs (checking costs half a millisecond a pass on a CPU, as much as a draft step).
Weights are read where they are in every call, so that copying new ones in place works, unless
`freeze` packs them into the graph, which is for weights that never change.

On CUDA the compiled unit is also captured, with its kernels' addresses, and replayed.
This module knows no models, no rounds and no probabilities.
"""

import time
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Unit = Callable[[Any, Any], Any]

BATCHES = (1, 4, 16, 64, 256)  # sizes for which code is compiled
COMPILED_BUCKET = 256  # cache slots: few shapes, since a graph takes seconds to make
FREEZE_BYTES = 64 << 20  # for packed copies of weights in the frozen graphs of a decoder

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


class Units:
    """Runs units, as they are or compiled."""

    def __init__(self, *, compiled: bool, device: torch.device) -> None:
        self.compiled = compiled
        self._captures = compiled and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._captured: dict[Hashable, Captured] = {}

    def run(
        self,
        unit: Unit,
        places: Any,
        inputs: Any,
        *,
        key: Hashable,
        owner: Any = None,
        freeze: bool = False,
        pack: bool = True,
        written: tuple[Tensor, ...] = (),
    ) -> Any:
        """Call `unit(places, inputs)`.

        Graphs belong to `owner` and go when it goes; without one, all that have the same unit and
        key share a graph. `freeze` makes constants of the weights, `pack` arranges them for the
        processor. `written` are the tensors of `places` that a second call would change
        again: capturing needs some calls before the first that counts.
        """
        if not self.compiled:
            return unit(places, inputs)
        key = (unit, key)
        if not self._captures:
            return _compiled(unit, key, owner, freeze, pack)(places, inputs)
        # A capture is bound to the addresses of its places, which it keeps alive.
        own = (key, *map(id, places if isinstance(places, tuple) else (places,)))
        if own not in self._captured:
            function = _compiled(unit, key, owner, freeze=False)
            with _timed():
                self._captured[own] = Captured(function, places, inputs, written, self._pool)
        return self._captured[own](inputs)


def _compiled(unit: Unit, key: Hashable, owner: Any, freeze: bool, pack: bool = True) -> Unit:
    """The graph of `key`; its first call compiles it, under the clock."""
    graphs: MutableMapping[Hashable, Unit] = _shared
    if owner is not None:
        graphs = _by_owner.setdefault(owner, {})
    key = (key, freeze)  # weights that were constant may be opened to training
    if key not in graphs:
        graphs[key] = _first_call(unit, graphs, key, freeze, pack)
    return graphs[key]


def _first_call(
    unit: Unit, graphs: MutableMapping[Hashable, Unit], key: Hashable, freeze: bool, pack: bool
) -> Unit:
    import torch._inductor.config as inductor

    def isolated(places: Any, inputs: Any) -> Any:
        return unit(places, inputs)

    # The compiler keeps its graphs with the code object: a copy of it for each key keeps them
    # apart, as no guards tell which one fits.
    isolated.__code__ = isolated.__code__.replace()
    graph = torch.compile(
        isolated,
        fullgraph=True,
        dynamic=False,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
    )

    def compile_and_call(places: Any, inputs: Any) -> Any:
        # On a CPU, calling kernels from C++ takes a fifth off a pass of a small model, and joining
        # the projections that read the same states (frozen weights only) a tenth.
        settings = {
            "freezing": freeze,
            "cpp.enable_concat_linear": freeze,
            "cpp.weight_prepack": pack,
            "cpp_wrapper": not torch.cuda.is_available(),
        }
        with _timed(), inductor.patch(settings), torch._dynamo.config.patch(recompile_limit=1):
            result = graph(places, inputs)
        graphs[key] = graph
        return result

    return compile_and_call


@contextmanager
def _timed() -> Iterator[None]:
    started, before = time.perf_counter(), _clock["seconds"]
    yield
    _clock["seconds"] = before + time.perf_counter() - started  # what ran inside counts once


class Captured:
    """A compiled unit as a CUDA graph: replayed on tensors that stay where they are."""

    def __init__(
        self,
        function: Unit,
        places: Any,
        inputs: Any,
        written: tuple[Tensor, ...],
        pool: Any,
    ) -> None:
        self._places = places
        self._inputs = map_tensors(torch.clone, inputs)
        kept = [tensor.clone() for tensor in written]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles, then runs once more as it will run
                function(places, self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(written, kept, strict=True):
            tensor.copy_(value)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: a server reads new weights beside its rounds.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._outputs = function(places, self._inputs)

    def __call__(self, inputs: Any) -> Any:
        """Copy `inputs` in, replay, and copy the outputs out of the way of the next replay."""
        copy_tensors(source=inputs, target=self._inputs)
        self._graph.replay()
        return map_tensors(torch.clone, self._outputs)


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


def copy_tensors(*, source: Any, target: Any) -> None:
    """Copy every tensor of `source` into its place in `target`, a tree of the same shape."""
    if isinstance(source, Tensor):
        target.copy_(source, non_blocking=True)
    elif isinstance(source, tuple):
        for part, place in zip(source, target, strict=True):
            copy_tensors(source=part, target=place)
    elif hasattr(source, "__dataclass_fields__"):
        for name in source.__dataclass_fields__:
            copy_tensors(source=getattr(source, name), target=getattr(target, name))
