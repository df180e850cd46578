"""Documents: text that every installation has, a file, or a hub data set; and their split.

A row of a file or data set takes one of three forms: `messages`, `prompt` (+ `completion`), or
`text`. The split goes by document, in the order of a hash, so that no text is in two parts: a
source file stays with its docstrings, a question with all its answers.

This module does not know tokens, models or what the text is for.
"""

import ast
import hashlib
import importlib.util
import json
import math
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftkit.config import DataConfig

# Direct dependencies only: these are present wherever draftkit is.
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "peft", "hydra", "omegaconf")
PACKAGES += ("numpy", "matplotlib", "rich", "tokenizers", "safetensors", "huggingface_hub")
# Tests, packages of others, and `encodings`: tables of numbers.
SKIPPED = re.compile("__pycache__|(?:site|dist)-packages|tests?|testing|idle_test|encodings")
MIN_BYTES, MAX_BYTES = 400, 100_000  # of an installed file: neither empty nor a giant table
MIN_DOCSTRING = 200  # characters; shorter ones name a function again
PARAGRAPHS = 2_000  # characters up to which the paragraphs of a text file are joined
COMMENT = re.compile(r"^(?:(?:#[^\n]*\n)+|(?://[^\n]*\n)+|/\*.*?\*/[^\n]*\n)", re.M | re.S)
ROLES = ("system", "developer", "user", "assistant", "tool")

Source = tuple[str, str]  # relative name with forward slashes, path


@dataclass(frozen=True)
class Document:
    """One text: `row` holds `messages`, or `prompt` (and `completion`), or `text`."""

    id: str
    domain: str
    row: dict[str, Any]


def load_documents(data: DataConfig) -> list[Document]:
    """Read the documents that `data` names, in an order that only their content decides.

    Raises ValueError, one line that names `data.path`, for whatever cannot be used.
    """
    if data.name == "installed":
        return _installed_documents(data)
    rows = _hub_rows(data) if data.name == "hub" else _file_rows(Path(str(data.path)))
    domain = Path(str(data.path)).stem if data.name == "local" else str(data.path)
    documents = []
    for place, row in islice(rows, data.max_rows):
        form = _form(row, data, f"{setting(data)}, {place}")
        documents.append(Document(_content_hash(form), domain, form))
    if not documents:
        raise ValueError(f"{setting(data)} is empty: it needs at least 3 rows of text")
    return documents


def setting(data: DataConfig) -> str:
    """The setting to name when there is too little text."""
    if data.name == "installed":
        return f"data.max_megabytes {data.max_megabytes}"
    return f"data.path {data.path}"


def split_documents(documents: list[Document], data: DataConfig) -> dict[str, list[Document]]:
    """Part documents into `train`, `validation` and `test`, none of them empty, in hash order.

    The shares are `data.validation_fraction` and `data.test_fraction` of the distinct documents.
    Raises ValueError if there are fewer than 3.
    """
    rank: dict[str, float] = {}  # a domain's keys lie evenly in (0, 1): each part gets its share
    for domain in sorted({document.domain for document in documents}):
        mine = {_split_key(document.id) for document in documents if document.domain == domain}
        new = sorted(mine - rank.keys(), key=_split_order)
        rank |= {key: (place + 0.5) / len(new) for place, key in enumerate(new)}
    keys = sorted(rank, key=lambda key: (rank[key], _split_order(key)))
    if len(keys) < 3:
        raise ValueError(
            f"{setting(data)} gives {len(keys)} different documents, and train, validation and "
            "test need one each: give more text (in a text file, blank lines part documents)"
        )
    tests = max(1, math.floor(len(keys) * data.test_fraction))
    held_out = tests + max(1, math.floor(len(keys) * data.validation_fraction))
    assert held_out < len(keys)  # each fraction is below one half
    split = {key: "validation" if place >= tests else "test" for place, key in enumerate(keys)}
    split |= dict.fromkeys(keys[held_out:], "train")
    parts: dict[str, list[Document]] = {"train": [], "validation": [], "test": []}
    for document in sorted(documents, key=lambda document: _split_order(document.id)):
        parts[split[_split_key(document.id)]].append(document)
    return parts


def corpus_sha256(documents: Iterable[Document]) -> str:
    """Hex SHA-256 over ids, domains and rows, in their order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps(asdict(document), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def hash_order(name: str) -> bytes:
    """A sort key that scatters names evenly and never changes."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _split_order(key: str) -> bytes:
    # Not the order in which `_listed` takes files: that would send a whole domain to one part.
    return hash_order(f"split {key}")


def _split_key(document_id: str) -> str:
    """Drop the domain: `python:a/b.py` and `prose:a/b.py` are one file."""
    return document_id.partition(":")[2] or document_id


# Installed text


def _installed_documents(data: DataConfig) -> list[Document]:
    domains = list(dict.fromkeys(data.domains))
    share = int(data.max_megabytes * 1e6 / len(domains))
    roots = {package: _package_folder(package) for package in PACKAGES}
    modules = _listed({"": sysconfig.get_paths()["stdlib"]} | roots, (".py",))
    headers = {"torch/include": os.path.join(roots["torch"], "include")}
    # From the other end than `python`, so that the same text is not taken twice.
    prose = chain.from_iterable(zip_longest(_topics(), _docstrings(reversed(modules))))
    texts = {
        "python": lambda: _read_sources(modules),
        "prose": lambda: filter(None, prose),
        "cpp": lambda: _read_sources(_listed(headers, (".h", ".hpp", ".cuh"))),
    }
    return list(chain.from_iterable(_take(name, texts[name](), share) for name in domains))


def _take(domain: str, texts: Iterator[tuple[str, str]], room: int) -> Iterator[Document]:
    """Documents up to `room` bytes; the last one is cut at a line end so that it fits."""
    limit = max(room // 20, 2_000)  # a small corpus takes small files rather than few
    for name, text in texts:
        encoded = text.encode()
        if len(encoded) > limit:
            continue
        if len(encoded) > room:
            encoded = encoded[: encoded.rfind(b"\n", 0, room) + 1]
        if len(encoded) < MIN_BYTES // 2:  # nothing shorter comes whole: the room is used up
            return
        room -= len(encoded)
        yield Document(f"{domain}:{name}", domain, {"text": encoded.decode()})


def _package_folder(package: str) -> str:
    spec = importlib.util.find_spec(package)  # looks, does not import
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"data=installed reads the package {package}, which is not installed")
    return spec.submodule_search_locations[0]


def _listed(roots: dict[str, str], suffixes: tuple[str, ...]) -> list[Source]:
    """Files below `roots` in hash order of their relative names: diverse from the first on."""
    found: list[Source] = []
    for prefix, root in roots.items():
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not SKIPPED.fullmatch(name)]
            inside = os.path.join(prefix, os.path.relpath(folder, root)).replace(os.sep, "/")
            inside = inside.removesuffix(".").strip("/")
            for file in files:
                # `_sysconfigdata` records where this interpreter was built.
                if file.endswith(suffixes) and not file.startswith("_sysconfigdata"):
                    found.append((f"{inside}/{file}".lstrip("/"), os.path.join(folder, file)))
    return sorted(found, key=lambda source: hash_order(source[0]))


def _read_sources(sources: Iterable[Source]) -> Iterator[tuple[str, str]]:
    """Names and texts of files that people wrote, each text once and without licence header."""
    seen = set()
    for name, path in sources:
        if not MIN_BYTES <= os.path.getsize(path) <= MAX_BYTES:
            continue
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        head = text[:1000].lower()
        text = _without_licence(text)
        if "generated" in head or len(text) < MIN_BYTES // 2 or text in seen:
            continue
        seen.add(text)
        yield name, text


def _without_licence(text: str) -> str:
    """Drop the licence comments at the top: thousands of files share them, word for word."""

    def kept(comment: re.Match[str]) -> str:
        return "" if re.search("licen[cs]e|copyright", comment[0], re.IGNORECASE) else comment[0]

    return (COMMENT.sub(kept, text[:2000]) + text[2000:]).lstrip("\n")


def _docstrings(sources: Iterable[Source]) -> Iterator[tuple[str, str]]:
    """One text a file: its substantial docstrings, none that an earlier file has too."""
    seen: set[str] = set()
    for name, text in _read_sources(sources):
        if text.count('"""') < 4:  # parsing is what costs
            continue
        found = [item for item in _docstrings_in(text) if item not in seen]
        seen.update(found)
        if found:
            yield name, "\n\n".join(found) + "\n"


def _docstrings_in(text: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's files
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a template, or syntax of a newer Python
            return []
    found, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        found.append((ast.get_docstring(node) or "").strip())
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes += [child for child in reversed(node.body) if isinstance(child, kinds)]
    return [docstring for docstring in found if len(docstring) >= MIN_DOCSTRING]


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics  # 0.7 MB, for this domain only

    for name in sorted(topics, key=hash_order):
        if len(topics[name]) >= MIN_BYTES:
            yield f"pydoc_data/topics.py#{name}", topics[name].strip() + "\n"


# Files and data sets: (place in the source, row)


def _file_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    known = ", ".join(READERS)
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in READERS)
        hint = f"it holds {', '.join(inside[:5])}" if inside else f"it holds none of {known}"
        raise ValueError(f"data.path {path} is a folder: name one file in it ({hint})")
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
            place = f"data.path {path}, line {number}"
            try:
                row = json.loads(line.decode("utf-8-sig").rstrip())
            except json.JSONDecodeError as error:
                reason = f"{error.msg} at column {error.colno}"
                raise ValueError(f"{place}: not valid JSON ({reason}); {rule}") from error
            except UnicodeDecodeError as error:
                raise ValueError(f"{place}: not UTF-8 text ({error.reason})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: a JSON {type(row).__name__}; {rule}")
            yield f"line {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            batches = (batch.to_pylist() for batch in file.iter_batches(batch_size=1024))
            for number, row in enumerate(chain.from_iterable(batches), start=1):
                yield f"row {number}", row
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"data.path {path}: not readable ({_first_line(error)})") from error


def _text_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path {path}: not UTF-8 text ({error.reason})") from error
    joined, number = "", 0
    for paragraph in [*re.split(r"\n(?:[ \t]*\n)+", text.strip()), ""]:
        if joined and (not paragraph or len(joined) + len(paragraph) > PARAGRAPHS):
            number += 1
            yield f"document {number}", {"text": joined}
            joined = ""
        joined = f"{joined}\n\n{paragraph}" if joined else paragraph


READERS = {".jsonl": _json_rows, ".json": _json_rows, ".parquet": _parquet_rows}
READERS[".txt"] = _text_rows


def _hub_rows(data: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets  # a second to import, and this branch alone needs it
    import datasets.exceptions

    try:
        rows = datasets.load_dataset(str(data.path), data.subset, split=data.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.path {data.path} could not be loaded ({_first_line(error)}): check data.subset "
            "and data.split, be online the first time, or use data=local with a file"
        ) from error
    return ((f"row {number}", dict(row)) for number, row in enumerate(rows, start=1))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


# Rows


def _form(row: dict[str, Any], data: DataConfig, place: str) -> dict[str, Any]:
    """The part of `row` that is used, under the names of one of the three forms."""
    found = f"columns found: {', '.join(row)}"
    named = {"prompt_column": data.prompt_column, "completion_column": data.completion_column}
    for key, column in named.items():
        if column is not None and column not in row:
            raise ValueError(f"data.{key} {column!r} is not in {place}; {found}")
    default = data.prompt_column is None and data.completion_column is None
    prompt, completion = data.prompt_column or "prompt", data.completion_column or "completion"
    if default and row.get("messages") is not None:
        return {"messages": _messages(row["messages"], place)}
    if row.get(prompt) is not None:
        return _prompt_form(row[prompt], row.get(completion), place)
    if default and row.get("text") is not None:
        return {"text": _text(row["text"], "text", place)}
    raise ValueError(
        f"{place}: nothing under {prompt if not default else 'messages, prompt or text'}; {found}; "
        "name yours by data.prompt_column and data.completion_column"
    )


def _prompt_form(prompt: Any, completion: Any, place: str) -> dict[str, Any]:
    """Text, a chat (a list of messages), or a list of user turns, of which the first is taken."""
    if isinstance(prompt, list) and prompt and all(isinstance(turn, dict) for turn in prompt):
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        return {"messages": _messages([*prompt, *(completion or [])], place)}
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    form = {"prompt": _text(prompt, "the prompt", place)}
    if completion is not None:
        form["completion"] = _text(completion, "the completion", place)
    return form


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: {name} must be text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: {name} holds half a character ({error.reason})") from error
    return value


def _messages(messages: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place}: messages must be a list of at least one message")
    checked = []
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f"{place}: {name} must have a role, one of {', '.join(ROLES)}")
        if not (message.get("content") is None and message.get("tool_calls")):
            _text(message.get("content"), f"{name}.content", place)
        # Parquet fills absent keys with null, which templates take for present.
        checked.append({key: value for key, value in message.items() if value is not None})
    return checked


def _content_hash(form: dict[str, Any]) -> str:
    """16 hex digits of what is asked: rows that differ in the answer alone share a split."""
    asked: Any = form.get("text", form.get("prompt"))
    if "messages" in form:
        roles = [message["role"] for message in form["messages"]]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        asked = form["messages"][:first] or form["messages"]
    canonical = json.dumps(asked, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
