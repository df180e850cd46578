"""Rollouts: what was sampled after which prompt, by whom and how, as Arrow: files and bytes.

`generate` stores target rollouts here as Parquet; the online buffer keeps the same `Record`, one by
one, as bytes. Storage only: this module does not sample, and does not know which model a sampler's
name stands for.

Hidden states of the target lie in a file of tensors beside the Parquet, text by text.

A file is written whole or not at all. Everything comes back exactly: ids, None, and every bit of a
float.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftkit.artifacts import atomic_path, first_line
from draftkit.data.store import Lazy

FORMAT = "rollouts-2"
ADVICE = "remove it and make the rollouts again"
STATES = ".safetensors"  # the suffix of hidden states
KEPT = 64  # files of `read_parts` in memory
_FORMAT_KEY = b"draftkit.format"

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
NESTED = ["topk_ids", "topk_log_probs"]
SCHEMA = pa.schema(
    [pa.field(name, kind, nullable=name in OPTIONAL) for name, kind in _TYPES.items()],
    metadata={_FORMAT_KEY: FORMAT},
)


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
        table = pa.Table.from_batches([_packed(records)])
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def to_bytes(record: Record) -> bytes:
    """`record` as compressed Arrow bytes. Raises ValueError for an id beyond 32 bits."""
    try:
        return zlib.compress(_packed([record]).serialize(), level=1)
    except (TypeError, OverflowError, pa.ArrowException) as error:
        raise ValueError(f"a record cannot be stored: {first_line(error)}") from error


def from_bytes(content: bytes) -> Record:
    """The record of `to_bytes`. Raises ValueError, one line, for bytes that hold none."""
    try:
        buffer = pa.py_buffer(zlib.decompress(content))
        batch = pa.ipc.read_record_batch(buffer, SCHEMA)
        return _record(pa.Table.from_batches([batch]), 0)
    except (zlib.error, OSError, EOFError, ValueError, TypeError, pa.ArrowException) as error:
        raise ValueError(f"not a stored record ({first_line(error)})") from error


def _packed(records: Sequence[Record]) -> pa.RecordBatch:
    columns = {name: [getattr(record, name) for record in records] for name in _TYPES}
    columns["sampling"] = [list(record.sampling.items()) for record in records]
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _record(table: pa.Table, row: int) -> Record:
    (own,) = table.slice(row, 1).to_batches()
    (values,) = own.drop_columns(NESTED).to_pylist(maps_as_pydicts="strict")
    for name in NESTED:  # what Arrow makes of them itself takes five times as long
        values[name] = None
        if not own[name].null_count:
            lists = own[name].flatten()
            flat, lengths = lists.flatten().to_numpy().tolist(), lists.value_lengths().to_pylist()
            values[name] = [flat[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
    return Record(**values)


def read_records(path: str | Path) -> list[Record]:
    """The records of a file, in order. Raises ValueError, one line that names the file."""
    table, states = _read(path), _states(path)
    with _reading(path):
        rows = range(table.num_rows)
        return [replace(_record(table, row), features=states(row)) for row in rows]


def _states(path: str | Path) -> Callable[[int], Tensor | None]:
    """The hidden states of a record of a file by its row; None where there are none."""
    beside = Path(path).with_suffix(STATES)
    if not beside.is_file():
        return lambda row: None
    with _reading(beside):
        stored = safe_open(beside, "pt")
    return lambda row: stored.get_tensor(str(row))


def _read(path: str | Path) -> pa.Table:
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file: make the rollouts first")
    # Not `read_table`, which would take columns from the names of folders.
    with _reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        stored = (file.schema_arrow.metadata or {}).get(_FORMAT_KEY, b"none").decode()
        if stored != FORMAT:
            raise ValueError(f"format {stored} instead of {FORMAT}")
        if not file.schema_arrow.equals(SCHEMA):
            raise ValueError("other columns or types")
        return file.read()


def _count(path: str | Path) -> int:
    with _reading(path):
        return int(pq.read_metadata(path).num_rows)


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, pa.ArrowException) as error:
        reason = first_line(error)
        raise ValueError(f"{path} is not a whole rollout file ({reason}): {ADVICE}") from error


def write_parts(
    folder: Path,
    count: int,
    *,
    size: int,
    make: Callable[[range], list[Record]],
    name: str = "part",
) -> Iterator[list[Record]]:
    """Yield records 0 .. count - 1, `size` at a time, each lot kept in a file of its own.

    `make(rows)` makes the records of a lot; one whose file is there is read instead, so that a
    kill costs one lot.
    """
    for first in range(0, count, size):
        path = folder / f"{name}-{first:08d}.parquet"
        if not path.exists():
            write_records(path, make(range(first, min(first + size, count))))
        yield read_records(path)


def read_parts(folder: Path) -> Sequence[Record]:
    """All records that `write_parts` has written as `part`, in order.

    A file is read when a record of it is asked for; the `KEPT` that were last asked for stay in
    memory, as Arrow holds them: a sixth of what Python's own lists would take. Raises ValueError,
    one line that names the file, for one that is not whole.
    """
    paths = sorted(folder.glob("part-*.parquet"))
    ends = [*accumulate(map(_count, paths), initial=0)]
    read, states = lru_cache(KEPT)(_read), lru_cache(KEPT)(_states)

    def record(row: int) -> Record:
        part = bisect_right(ends, row) - 1
        table = read(paths[part])
        with _reading(paths[part]):
            own = row - ends[part]
            return replace(_record(table, own), features=states(paths[part])(own))

    return Lazy(record, range(ends[-1]))
