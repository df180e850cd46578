"""Text that every installation has: source code, documentation and headers of the packages.

So that examples and tests run with no network and no download. Files are taken in the order of a
hash of their names, so that what is taken first is diverse.
"""

import ast
import importlib.util
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from draftkit.data.store import hash_order

# Direct dependencies only: these are present wherever draftkit is.
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "peft", "hydra", "omegaconf")
PACKAGES += ("numpy", "matplotlib", "rich", "tokenizers", "safetensors", "huggingface_hub")
# Tests, packages of others, and `encodings`: tables of numbers.
SKIPPED = re.compile("__pycache__|(?:site|dist)-packages|tests?|testing|idle_test|encodings")
MIN_BYTES, MAX_BYTES = 400, 100_000  # of an installed file: neither empty nor a giant table
MIN_DOCSTRING = 200  # characters; shorter ones name a function again
COMMENT = re.compile(r"^(?:(?:#[^\n]*\n)+|(?://[^\n]*\n)+|/\*.*?\*/[^\n]*\n)", re.M | re.S)

Source = tuple[str, str]  # relative name with forward slashes, path
Text = tuple[str, str, str]  # domain, name, text


def installed_texts(domains: Sequence[str], *, megabytes: float) -> Iterator[Text]:
    """Texts of `domains`, which share the room equally, in an order that the installation decides.

    Raises ValueError naming a package that is missing.
    """
    domains = list(dict.fromkeys(domains))
    share = int(megabytes * 1e6 / len(domains))
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
    for domain in domains:
        yield from _take(domain, texts[domain](), share)


def _take(domain: str, texts: Iterator[tuple[str, str]], room: int) -> Iterator[Text]:
    """Texts up to `room` bytes; the last one is cut at a line end so that it fits."""
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
        yield domain, name, encoded.decode()


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
