"""Documents: text that comes with the package, a file, or a hub data set; and their split.

A row of a file or data set takes one of three forms: `messages` (+ `tools`), `prompt`
(+ `completion`), or `text`. The split goes by document, in the order of a hash, so that no text is
in two parts: a source file stays with its docstrings, a question with all its answers.

This module does not know tokens, models or what the text is for.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftkit.artifacts import first_line
from draftkit.config import DataConfig
from draftkit.data.messages import read_messages
from draftkit.data.store import hash_order
from draftkit.hub import hub_has

PARAGRAPHS = 2_000  # characters up to which the paragraphs of a text file are joined
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Document:
    """One text: `row` holds `messages`, or `prompt` (and `completion`), or `text`.

    Rows of one question are one document: they have the same `id`. split: the one that the source
    has it in; empty where it has none.
    """

    id: str
    domain: str
    row: dict[str, Any]
    split: str = ""

    @property
    def key(self) -> int:
        """By this, documents of an equal `id` are one, and are put in order to be split."""
        return hash_order(f"split {self.id}")


def read_documents(data: DataConfig) -> Iterator[Document]:
    """The documents that `data` names, in their order, one at a time: text may exceed memory.

    Raises ValueError, one line that names `data.path`, for whatever cannot be used.
    """
    rows = _hub_rows(data) if data.name == "hub" else _file_rows(data.file)
    name = Path(str(data.path)).stem if data.name == "local" else str(data.path)
    if data.is_packaged:
        rows = (row for row in rows if row[1].get("domain", data.domains[0]) in data.domains)
    empty = True
    for origin, row in islice(rows, data.max_rows):
        form = row_form(row, data, f"{setting(data)}, {origin}")
        own = (row.get("domain", name), row["split"]) if data.is_packaged else (name, "")
        yield Document(question_id(form), own[0], form, own[1])
        empty = False
    if empty:
        raise ValueError(f"{setting(data)} is empty: it needs at least 3 rows of text")


def setting(data: DataConfig) -> str:
    """The setting to name when there is too little text."""
    return f"data.path {data.path}"


def split_documents(keys: np.ndarray, own: Sequence[str], data: DataConfig) -> np.ndarray:
    """The split of each document, by its place in SPLITS [N]; none of them is empty.

    keys, own: of each document its `key` [N] and its `split`, the one that its source has it in. A
    split that the source does not hold out gets the first of the distinct documents left, in hash
    order: `data.test_fraction` or `data.validation_fraction` of all. Raises ValueError if there are
    fewer than 3.
    """
    distinct, number = np.unique(keys, return_inverse=True)  # numbers in hash order
    split_of = np.zeros(len(distinct), np.int8)
    for name, fraction in (("test", data.test_fraction), ("validation", data.validation_fraction)):
        left = np.flatnonzero(split_of == 0)
        held_out = np.intersect1d(left, number[np.asarray(own, str) == name])
        share = left[: max(1, math.floor(len(distinct) * fraction))]
        split_of[held_out if len(held_out) else share] = SPLITS.index(name)
    if len(np.unique(split_of)) < len(SPLITS):
        raise ValueError(
            f"{setting(data)} gives {len(distinct)} different documents, and train, validation and "
            "test need one each: give more text (in a text file, blank lines part documents; texts "
            f"with the same first data.prompt_tokens={data.prompt_tokens} are one: a larger number "
            "tells more of them apart)"
        )
    return split_of[number]


# Files and data sets: (where it stands in the source, row)
# Files are not read by `datasets`: it makes dates of texts that look so, and gives all objects the
# keys of the first in its order, which a template may print.


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    known = ", ".join(READERS)
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in READERS)
        held = ", ".join(inside[:5]) or f"none of {known}"
        raise ValueError(f"data.path {path} is a folder: name one file in it (it holds {held})")
    if not path.is_file():
        raise ValueError(f"data.path {path} does not exist: name a file ({known})")
    if path.suffix not in READERS:
        raise ValueError(f"data.path {path} has none of the known suffixes: {known}")
    return READERS[path.suffix](path)


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    rule = "each line is one object"
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            origin = f"data.path {path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig").rstrip())
            except json.JSONDecodeError as error:
                reason = f"{error.msg} at column {error.colno}"
                raise ValueError(f"{origin}: not valid JSON ({reason}); {rule}") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{origin}: not UTF-8 text ({error.reason})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{origin}: a JSON {type(row).__name__}; {rule}")
            yield f"line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            for number, row in enumerate(chain.from_iterable(batches), start=1):
                yield f"row {number}", row
    except (OSError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(f"data.path {path}: not readable ({reason})") from error


def _text_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _hub_rows(data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
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
    return ((f"row {number}", dict(row)) for number, row in enumerate(rows, start=1))


# Rows


def row_form(row: dict[str, Any], data: DataConfig, origin: str) -> dict[str, Any]:
    """The part of `row` that is used, under the names of one of the three forms."""
    columns = f"columns found: {', '.join(row)}"
    named = {"prompt_column": data.prompt_column, "completion_column": data.completion_column}
    for key, column in named.items():
        if column is not None and column not in row:
            raise ValueError(f"data.{key} {column!r} is not in {origin}; {columns}")
    default = data.prompt_column is None and data.completion_column is None
    prompt, completion = data.prompt_column or "prompt", data.completion_column or "completion"
    if default and row.get("messages") is not None:
        form = {"messages": _messages(row["messages"], origin)}
        return form | _tools(row.get("tools"), form, origin)
    if row.get(prompt) is not None:
        form = _prompt_form(row[prompt], row.get(completion), origin)
        return form | _tools(row.get("tools"), form, origin)
    if default and row.get("text") is not None:
        return {"text": _text(row["text"], "text", origin)}
    names = "messages, prompt or text" if default else prompt
    raise ValueError(
        f"{origin}: nothing under {names}; {columns}; "
        "name yours by data.prompt_column and data.completion_column"
    )


def _prompt_form(prompt: Any, completion: Any, origin: str) -> dict[str, Any]:
    """Text, a chat (a list of messages), or a list of user turns, of which the first is taken."""
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        return {"messages": _messages([*prompt, *(completion or [])], origin)}
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    form = {"prompt": _text(prompt, "the prompt", origin)}
    if completion is not None:
        form["completion"] = _text(completion, "the completion", origin)
    return form


def _text(value: Any, name: str, origin: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{origin}: {name} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{origin}: {name} holds half a character ({error.reason})") from error
    return value


def _messages(messages: Any, origin: str) -> list[dict[str, Any]]:
    try:
        return read_messages(messages)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _tools(tools: Any, form: dict[str, Any], origin: str) -> dict[str, Any]:
    """The tools of a chat, a list or its JSON, for the template; nothing where there are none."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{origin}: tools must be a list, or its JSON ({error.msg})"
            ) from error
    if not tools:
        return {}
    if "messages" not in form:
        raise ValueError(f"{origin}: tools go with messages: leave them out, or write the chat so")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{origin}: tools must be a list of objects")
    return {"tools": _without_nulls(tools)}


def _without_nulls(value: Any) -> Any:
    """`value` without keys that hold null: Parquet gives every object all keys of its column."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def question_id(form: dict[str, Any]) -> str:
    """16 hex digits of the question: rows that differ in the answer alone share a split.

    Of a chat that is what comes up to its first user turn, but for a system turn: there the same
    question may come under another date. Of a text it is all of it; its first tokens, which are
    the prompt, `data.prompts` looks at. White space makes no difference.
    """
    question: Any = form.get("text", form.get("prompt"))
    if "messages" in form:
        turns = [turn for turn in form["messages"] if turn["role"] not in ("system", "developer")]
        roles = [turn["role"] for turn in turns]
        first = roles.index("user") + 1 if "user" in roles else len(turns)
        question = turns[:first] or form["messages"]
    return name_of(question)


def name_of(question: Any) -> str:
    """16 hex digits that texts or turns share if they differ in white space alone."""
    canonical = json.dumps(_spaced_once(question), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _spaced_once(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, dict):
        return {key: _spaced_once(one) for key, one in value.items()}
    return [*map(_spaced_once, value)] if isinstance(value, list) else value
