"""Rollouts: what was sampled after which prompt, by whom and how, and its files.

`generate` stores target rollouts here as Parquet; the online buffer keeps the same `Record` by the
same `SCHEMA`, one by one. Storage only: this module does not sample, and does not know which model
a sampler's name stands for.

Hidden states of the target lie in a file of tensors beside the Parquet, text by text.

A file is written whole or not at all. Everything comes back exactly: ids, None, and every bit of a
float.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftkit.artifacts import atomic_path, first_line
from draftkit.data.store import UNREADABLE, Lazy, pack, unpack

ADVICE = "remove it and make the rollouts again"
STATES = ".safetensors"  # the suffix of hidden states
KEPT = 64  # files in memory

_IDS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float64())
_TYPES = {
    "prompt_ids": _IDS,
    "output_ids": _IDS,
    "sampler": pa.string(),
    "sampler_version": pa.string(),
    "sampling": pa.map_(pa.string(), pa.float64()),
    "seed": pa.int64(),
    "row": pa.int64(),
    "document": pa.string(),
    "domain": pa.string(),
    "proposals": _IDS,
    "rejected": pa.list_(pa.bool_()),
    "topk_ids": pa.list_(_IDS),
    "topk_log_probs": pa.list_(_FLOATS),
    "tail_mass": _FLOATS,
    "loss_tail_mass": _FLOATS,
}
OPTIONAL = ("proposals", "rejected", "topk_ids", "topk_log_probs", "tail_mass", "loss_tail_mass")
SCHEMA = pa.schema([pa.field(name, kind, name in OPTIONAL) for name, kind in _TYPES.items()])


@dataclass(frozen=True, kw_only=True)
class Record:
    """One sampled continuation. The optional lists have one entry for each output token.

    Raises ValueError where an optional list has another length than `output_ids`.
    """

    prompt_ids: list[int]
    output_ids: list[int]  # up to and including the first EOS
    # Who sampled: `target`, `draft`, `mix` (of both, token by token), `speculative` (the target's
    # law, proposals of the draft) or an engine; the version is the draft's where it has a part.
    sampler: str
    sampler_version: str
    sampling: dict[str, float]  # temperature, top_k, top_p, repetition_penalty
    seed: int
    row: int  # with the seed, the key of the noise
    document: str = ""  # where its prompt is from; of a served one, the conversation
    domain: str = ""
    proposals: list[int] | None = None  # what the draft proposed there; -1 for nothing
    rejected: list[bool] | None = None  # whether that proposal was refused
    topk_ids: list[list[int]] | None = None  # the target's k most likely tokens there
    topk_log_probs: list[list[float]] | None = None  # nats, natural temperature 1
    # The target's probability of all other tokens, at the served temperature (1 where that is 0)
    # and at the one of the loss.
    tail_mass: list[float] | None = None
    loss_tail_mass: list[float] | None = None
    # Of the target, what a head reads at every token of prompt and output [T, F], bfloat16.
    features: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in OPTIONAL:
            values = getattr(self, name)
            if values is not None and len(values) != len(self.output_ids):
                raise ValueError(
                    f"{name} has {len(values)} entries for {len(self.output_ids)} output tokens"
                )


def document_of(record: Record) -> str | tuple[int, ...]:
    """What `record` shares with all that it is not independent of: `document`, else the prompt."""
    return record.document or tuple(record.prompt_ids)


def write_records(path: str | Path, records: Sequence[Record]) -> None:
    """Replace `path` by a Parquet file of `records`, atomically, after their hidden states."""
    states = {str(row): one.features for row, one in enumerate(records) if one.features is not None}
    if states:
        with atomic_path(Path(path).with_suffix(STATES)) as temporary:
            save_file(states, temporary)
    with atomic_path(path) as temporary:
        table = pa.Table.from_batches([pack(records, SCHEMA)])
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_records(path: str | Path) -> list[Record]:
    """The records of a file, in order. Raises ValueError, one line that names the file."""
    return list(_records([Path(path)]))


def _records(paths: Sequence[Path]) -> Sequence[Record]:
    """Those of all files, in order; a file is read when a record of it is asked for."""
    counts = []
    for path in paths:
        with _reading(path):
            counts.append(int(pq.read_metadata(path).num_rows))
    ends, read = [*accumulate(counts, initial=0)], lru_cache(KEPT)(_read)

    def record(row: int) -> Record:
        part = bisect_right(ends, row) - 1
        (table, states), own = read(paths[part]), row - ends[part]
        with _reading(paths[part]):
            features = None if states is None else states.get_tensor(str(own))
            return replace(unpack(table, own, Record), features=features)

    return Lazy(record, range(ends[-1]))


def _read(path: Path) -> tuple[pa.Table, Any]:
    """The rows of a file, and their hidden states, mapped; None where there are none."""
    # Not `read_table`, which would take columns from the names of folders.
    with _reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        if not file.schema_arrow.equals(SCHEMA):
            raise ValueError("other columns or types")
        table = file.read()
        if len(table) != file.metadata.num_rows:  # of which no checksum is kept
            raise ValueError("another number of rows")
    beside = path.with_suffix(STATES)
    if not beside.is_file():
        return table, None
    with _reading(path), _reading(beside):
        return table, safe_open(beside, "pt")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{path} is not a file: make the rollouts first") from error
    except UNREADABLE as error:
        reason = first_line(error)
        raise ValueError(f"{path} is not a whole rollout file ({reason}): {ADVICE}") from error


def write_parts(
    folder: Path,
    count: int,
    *,
    size: int,
    make: Callable[[range], list[Record]],
) -> Iterator[list[Record]]:
    """Yield records 0 .. count - 1, `size` at a time, each lot kept in a file of its own.

    `make(rows)` makes the records of a lot; one whose file is there is read instead, so that a
    kill costs one lot. Files of lots of another size are removed.
    """
    for path in folder.glob("part-*.parquet"):
        first = int(path.stem.removeprefix("part-"))
        if first % size or len(_records([path])) != min(size, count - first):
            path.unlink()
    for first in range(0, count, size):
        path = folder / f"part-{first:08d}.parquet"
        if not path.exists():
            write_records(path, make(range(first, min(first + size, count))))
        yield read_records(path)


def read_parts(folder: Path) -> Sequence[Record]:
    """All records that `write_parts` has written, in order.

    A file is read when a record of it is asked for; the `KEPT` that were last asked for stay in
    memory, as Arrow holds them: a sixth of what Python's own lists would take. Raises ValueError,
    one line that names the file, for one that is not whole.
    """
    return _records(sorted(folder.glob("part-*.parquet")))
