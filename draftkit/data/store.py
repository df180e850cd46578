"""Sequences that need not fit into memory: rows on disk, some of them, others made of them.

Rows are written once, in order, as an Arrow file, and mapped into memory to be read: what has
been read is the system's to forget. This module does not know what a row means.
"""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

from draftkit.artifacts import atomic_path

Item = TypeVar("Item")
Made = TypeVar("Made")

ORDER = np.dtype([("high", ">u8"), ("low", ">u8")])  # what `hash_order` gives, as a number
WRITTEN = 256  # rows of a batch: what is in memory while a file is written


class Lazy(Sequence[Item]):
    """A sequence that makes an item when it is asked for; a slice is lazy too."""

    @abstractmethod
    def _at(self, index: int) -> Item:
        """The item at `index`, which is in range."""

    def __getitem__(self, index: Any) -> Any:
        indices = range(len(self))[index]  # counts from the end, and refuses, as lists do
        return Picked(self, indices) if isinstance(index, slice) else self._at(indices)


class Mapped(Lazy[Made], Generic[Item, Made]):
    """`function` of each of `items`."""

    def __init__(self, function: Callable[[Item], Made], items: Sequence[Item]) -> None:
        self._function = function
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def _at(self, index: int) -> Made:
        return self._function(self._items[index])

    def __iter__(self) -> Iterator[Made]:
        return map(self._function, self._items)


class Picked(Mapped[Any, Item]):
    """Those of `items` at `indices`, in that order."""

    def __init__(self, items: Sequence[Item], indices: Sequence[int] | np.ndarray) -> None:
        kept: Any = indices if isinstance(indices, range) else np.asarray(indices, np.int64)
        super().__init__(items.__getitem__, kept)


class Stored(Lazy[Item]):
    """The rows of an Arrow file, each read by `make(**columns)`."""

    def __init__(self, path: str | Path, make: Callable[..., Item]) -> None:
        self._table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._make = make

    def __len__(self) -> int:
        return self._table.num_rows

    def _at(self, index: int) -> Item:
        return self._make(**self._table.slice(index, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Item]:
        for batch in self._table.to_batches():
            for row in batch.to_pylist():
                yield self._make(**row)


def write_rows(path: str | Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> None:
    """Replace `path` by an Arrow file of `rows`, atomically; a batch at a time is in memory."""
    left = iter(rows)
    with atomic_path(path) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
        while batch := list(islice(left, WRITTEN)):
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema=schema))


def rank_in_group(groups: Sequence[str] | np.ndarray) -> np.ndarray:
    """How many before it are of the same group, by item [N]."""
    _, number = np.unique(np.asarray(groups), return_inverse=True)
    together = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[together], prepend=-1))  # of the groups
    rank = np.empty(len(number), np.int64)
    rank[together] = np.arange(len(number)) - np.repeat(starts, np.diff([*starts, len(number)]))
    return rank


def hash_order(name: str) -> bytes:
    """A sort key that scatters names evenly and never changes."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
