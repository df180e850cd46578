"""Sequences that need not fit into memory, and hashes that order what is in them.

`pack` and `unpack` are how objects are stored, in whatever file: as a batch of Arrow, and back.
Rows are written once, in order, as an Arrow file, and mapped into memory to be read: what has
been read is the system's to forget. This module does not know what a row means.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from draftkit.artifacts import atomic_path, first_line

Item = TypeVar("Item")

WRITTEN = 256  # rows of a batch: what is in memory while a file is written
UNREADABLE = (OSError, EOFError, ValueError, TypeError, pa.ArrowException)  # of what is damaged


class Lazy(Sequence[Item]):
    """`make` of each of `items`, made when it is asked for; a slice is lazy too."""

    def __init__(self, make: Callable[[Any], Item], items: Sequence[Any] | np.ndarray) -> None:
        self._make = make
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        some = self._items[index]
        return Lazy(self._make, some) if isinstance(index, slice) else self._make(some)


def pack(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    """The attributes of `rows` that `schema` names, as Arrow.

    Raises ValueError, one line, for a value that a column cannot hold, as an id beyond its bits.
    """
    columns = {name: [getattr(row, name) for row in rows] for name in schema.names}
    try:
        return pa.RecordBatch.from_pydict(columns, schema=schema)
    except (TypeError, OverflowError, pa.ArrowException) as error:
        raise ValueError(f"a row cannot be stored: {first_line(error)}") from error


def unpack(table: pa.Table, row: int, make: Callable[..., Item]) -> Item:
    """`make(**columns)` of a row of what `pack` made, which comes back to the bit."""
    (own,) = table.slice(row, 1).to_batches()
    is_list = pa.types.is_list
    nested = [one.name for one in own.schema if is_list(one.type) and is_list(one.type.value_type)]
    (values,) = own.drop_columns(nested).to_pylist(maps_as_pydicts="strict")
    for name in nested:  # what Arrow makes of them itself takes five times as long
        values[name] = None
        if not own[name].null_count:
            inner = own[name].flatten()
            flat, lengths = inner.flatten().to_numpy().tolist(), inner.value_lengths().to_pylist()
            values[name] = [flat[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
    return make(**values)


def read_rows(path: str | Path, make: Callable[..., Item]) -> Lazy[Item]:
    """The rows of an Arrow file, each as `make(**columns)`."""
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    return Lazy(lambda row: unpack(table, row, make), range(table.num_rows))


def write_rows(path: str | Path, schema: pa.Schema, rows: Iterable[Any]) -> None:
    """Replace `path` by an Arrow file of `rows`, atomically; a batch at a time is in memory."""
    left = iter(rows)
    with atomic_path(path) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
        while batch := list(islice(left, WRITTEN)):
            writer.write_batch(pack(batch, schema))


def rank_in_group(groups: Sequence[str] | np.ndarray) -> np.ndarray:
    """How many before it are of the same group, by item [N]."""
    _, number = np.unique(np.asarray(groups), return_inverse=True)
    together = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[together], prepend=-1))  # of the groups
    rank = np.empty(len(number), np.int64)
    rank[together] = np.arange(len(number)) - np.repeat(starts, np.diff([*starts, len(number)]))
    return rank


def hash_order(name: str) -> int:
    """A sort key of 64 bits that scatters names evenly and never changes."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest()[:8])
