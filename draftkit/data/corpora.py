"""Documents: text that comes with the package, a file, or a hub data set.

A row that cannot be used is a document with a fault: whoever reads on leaves it out and counts it.

This module does not know tokens, models or what the text is for.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from draftkit.artifacts import first_line
from draftkit.config import DataConfig
from draftkit.data.rows import TARGET, question_id, row_form
from draftkit.data.store import hash_order
from draftkit.hub import hub_has

REASONS = 5  # that have a line of their own; all later ones share one
VARIES = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")  # between reasons that are alike
PARAGRAPHS = 2_000  # characters up to which the paragraphs of a text file are joined
# Of each row its line or number, and what it holds or why it cannot be read.
Rows = Iterator[tuple[str, Any]]


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason, without file and line."""


def reason_of(error: Exception) -> str:
    """Why a row cannot be used, in one line."""
    if isinstance(error, RecursionError):
        return "nested too deep to be read"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error.reason})"
    if isinstance(error, UnicodeEncodeError):
        return f"holds half a character ({error.reason})"
    return " ".join(str(error).split())[:400]


class BadRows:
    """Counts rows that cannot be used. most: the share of all rows up to which they may be."""

    def __init__(self, most: float) -> None:
        self.count = 0
        self._most = most
        self._reasons: dict[str, tuple[str, int]] = {}  # the first of those alike, and how many

    def add(self, origin: str, reason: str) -> None:
        """Count the row that stands at `origin`."""
        alike = VARIES.sub("", reason)
        if alike not in self._reasons and len(self._reasons) >= REASONS:
            alike = ""
        first, count = self._reasons.get(alike, (f"{origin}: {reason}", 0))
        self._reasons[alike] = first, count + 1
        self.count += 1

    @property
    def lines(self) -> list[str]:
        """The first row of each reason, and how many are like it."""
        return [
            first + (f" ({alike - 1:,} more like it)" if alike > 1 else "")
            for first, alike in self._reasons.values()
        ]

    def check(self, rows: int) -> None:
        """Raise ValueError if of `rows` that were read none is left, or too many are bad."""
        if not self.count or (self.count < rows and self.count / rows <= self._most):
            return
        verdict = f"none of the first {rows:,} rows can be used"
        if self.count < rows:
            verdict = (
                f"{self.count:,} of {rows:,} rows cannot be used, more than "
                f"data.max_bad_rows={self._most:g}: mend them, or raise it"
            )
        shown = "; ".join(self.lines[:2])
        raise ValueError(shown if rows == 1 else f"{shown}; so {verdict}")


@dataclass(frozen=True)
class Document:
    """One text: `row` holds `messages`, or `prompt` (and `completion`), or `text`.

    Rows of one question are one document: they have the same `id`. split: the one that the source
    has it in; empty where it has none. origin: where it stands. fault: why it cannot be used; its
    `row` is empty then.
    """

    id: str
    domain: str
    row: dict[str, Any]
    split: str = ""
    origin: str = ""
    fault: str = ""

    @property
    def key(self) -> int:
        """By this, documents of an equal `id` are one, and are put in order to be split."""
        return hash_order(f"split {self.id}")


def read_documents(data: DataConfig, *, target: str = "") -> Iterator[Document]:
    """The documents that `data` names, in their order, one at a time: text may exceed memory.

    A row that cannot be used is one with a `fault`. Raises ValueError, one line that names
    `data.path`, for a source that cannot be read, and for parts at an address that were recorded
    of another model than that of the checksum `target`.
    """
    if data.name == "hub":
        rows = _hub_rows(data)
    elif data.is_remote:
        rows = _part_rows(str(data.path), target)
    else:
        path, known = data.file, ", ".join(READERS)
        if path.is_dir():
            inside = sorted(file.name for file in path.iterdir() if file.suffix in READERS)
            held = ", ".join(inside[:5]) or f"none of {known}"
            raise ValueError(f"data.path {path} is a folder: name one file in it (it holds {held})")
        if not path.is_file():
            raise ValueError(f"data.path {path} does not exist: name a file ({known})")
        if path.suffix not in READERS:
            raise ValueError(f"data.path {path} has none of the known suffixes: {known}")
        rows = READERS[path.suffix](path)
    name = Path(str(data.path)).stem if data.name == "local" else str(data.path)
    if data.is_packaged:
        rows = (one for one in rows if data.domains is None or one[1]["domain"] in data.domains)
    where, empty = f"data.path {data.path}", True
    for origin, row in islice(rows, data.max_rows):
        own = (row["domain"], row["split"]) if data.is_packaged else (name, "")
        yield read_document(row, data, f"{where}, {origin}", *own)
        empty = False
    if empty:
        raise ValueError(f"{where} is empty: it needs at least 3 rows of text")


def read_document(
    row: dict[str, Any] | Exception, data: DataConfig, origin: str, domain: str, split: str = ""
) -> Document:
    """The document of a row that stands at `origin`."""
    try:
        if isinstance(row, Exception):
            raise row
        form = row_form(row, data)
        return Document(question_id(form), domain, form, split, origin)
    except (ValueError, RecursionError) as error:
        return Document("", domain, {}, split, origin, reason_of(error))


# Files and data sets: (where it stands in the source, row)
# Files are not read by `datasets`: it makes dates of texts that look so, and gives all objects the
# keys of the first in its order, which a template may print.


def _json_rows(path: Path) -> Rows:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            rule = "each line is one object"
            if line.lstrip().startswith(b"["):
                rule += " (jq -c '.[]' makes such lines of a list)"
            try:
                row: Any = json.loads(line.decode("utf-8-sig").rstrip())
                if not isinstance(row, dict):
                    row = ValueError(f"a JSON {type(row).__name__}; {rule}")
            except json.JSONDecodeError as error:
                reason = f"{error.msg} at column {error.colno}"
                row = ValueError(f"not valid JSON ({reason}); {rule}")
            except (ValueError, RecursionError) as error:
                row = error
            yield f"line {number}", row


def _parquet_rows(path: Path, content: Any = None, target: str = "") -> Rows:
    """The rows of the file at `path`, or of its open `content`."""
    try:
        with pq.ParquetFile(path if content is None else content) as file:
            of = (file.schema_arrow.metadata or {}).get(TARGET, b"").decode() or target
            if target and of != target:
                raise ValueError(
                    f"data.path {path}: recorded of another target ({of}) than target.path "
                    f"({target}): name the one that was served, and an address for each"
                )
            batches = file.iter_batches(batch_size=1024)
            rows = (batch.slice(at, 1) for batch in batches for at in range(batch.num_rows))
            for number, row in enumerate(rows, start=1):
                try:
                    read: Any = _without_filled(*row.to_pylist())
                except (ValueError, RecursionError) as error:
                    read = error
                yield f"row {number}", read
    except (OSError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"data.path {path}: not readable ({reason})") from error


@lru_cache
def parts_at(address: str) -> tuple[Any, list[str]]:
    """The file system of `address`, and the Parquet files in and below it, in order.

    A process looks once: others may write parts meanwhile, and what it reads is what it has named.
    Raises ValueError naming `data.path` for an address that cannot be read.
    """
    try:
        files, folder = fsspec.url_to_fs(address)
        return files, sorted(files.glob(f"{folder.rstrip('/')}/**/*.parquet"))
    except Exception as error:  # of whatever library the address needs, or lacks
        raise ValueError(
            f"data.path {address}: not readable ({first_line(error)}): correct it, and install "
            "what such an address needs"
        ) from error


def _part_rows(address: str, target: str) -> Rows:
    files, parts = parts_at(address)
    for part in parts:
        try:
            content = files.open(part, "rb")
        except OSError as error:
            raise ValueError(f"data.path {part}: not readable ({first_line(error)})") from error
        with content:
            for origin, row in _parquet_rows(Path(part), content, target):
                yield f"{Path(part).name}, {origin}", row


def _without_filled(value: Any, inside: bool = False) -> Any:
    """A row without what Arrow fills in: it gives every object all keys of its column."""
    if isinstance(value, dict):
        kept = {key: one for key, one in value.items() if not inside or one is not None}
        return {key: _without_filled(one, True) for key, one in kept.items()}
    return [_without_filled(one, True) for one in value] if isinstance(value, list) else value


def _text_rows(path: Path) -> Rows:
    """Paragraphs, which blank lines part; short ones are joined."""
    number, joined = 1, ""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for blank, lines in groupby(file, key=lambda line: not line.strip(" \t\n")):
                paragraph = "" if blank else "".join(lines).removesuffix("\n")
                if number == 1 and not joined:
                    paragraph = paragraph.lstrip()
                if joined and paragraph and len(joined) + len(paragraph) > PARAGRAPHS:
                    yield f"document {number}", {"text": joined}
                    number, joined = number + 1, ""
                joined = "\n\n".join(filter(None, (joined, paragraph)))
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path {path}: not UTF-8 text ({error.reason})") from error
    if joined := joined.rstrip():
        yield f"document {number}", {"text": joined}


READERS = {".jsonl": _json_rows, ".json": _json_rows, ".parquet": _parquet_rows}
READERS[".txt"] = _text_rows


def _hub_rows(data: DataConfig) -> Rows:
    import datasets  # a second to import, and this branch alone needs it
    import datasets.exceptions
    from datasets.naming import camelcase_to_snakecase

    name = str(data.path)
    owner, _, last = name.rpartition("/")
    kept = "___".join(filter(None, (owner, camelcase_to_snakecase(last))))
    # A data set that was read before is loaded from there.
    if not Path(name).exists() and not (Path(datasets.config.HF_DATASETS_CACHE) / kept).exists():
        hub_has(name, datasets.config.REPOCARD_FILENAME, section="data", kind="dataset")
    try:
        rows = datasets.load_dataset(name, data.subset, split=data.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(
            f"data.path {name} could not be loaded ({reason}): check data.subset "
            "and data.split, be online the first time, or use data=local with a file"
        ) from error
    return ((f"row {n}", _without_filled(row)) for n, row in enumerate(rows, start=1))
