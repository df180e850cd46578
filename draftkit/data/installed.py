"""Text that every installation has: source code, documentation and headers of the packages.

So that examples and tests run with no network and no download. Files are taken in the order of a
hash of their names, so that what is taken first is diverse. The name of a file alone decides
whether it is held out: whole packages are for tests, and a hash of the path picks what validates.
So what one run trained on, no other run judges on, however much text either of them takes. A file
that repeats half of another one is left out, and rather from training than from what is held out.
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

# Present wherever a model can be loaded.
PACKAGES = ("torch", "transformers", "datasets", "accelerate", "peft", "hydra", "omegaconf")
PACKAGES += ("numpy", "matplotlib", "rich", "tokenizers", "safetensors", "huggingface_hub")
# What a machine may do without: read where it is installed.
OPTIONAL = ("pyarrow", "wandb", "pydantic", "fastapi", "uvicorn", "httpx", "jinja2", "sympy")
OPTIONAL += ("networkx", "pandas", "mpmath", "fontTools", "pygments", "PIL", "fsspec", "starlette")
OPTIONAL += ("anyio", "click", "typer", "urllib3", "filelock", "packaging")
HEADERS = {"torch": "include", "pyarrow": "include", "numpy": "_core/include"}
# Held out for tests: of every domain some packages of which nothing is trained on.
TEST_PACKAGES = ("accelerate/", "rich/", "hydra/", "omegaconf/", "asyncio/", "email/")
TEST_PACKAGES += ("torch/include/c10/", "torch/include/pybind11/", "pyarrow/include/arrow/compute/")
# Tests, packages of others, and `encodings`: tables of numbers.
SKIPPED = re.compile("__pycache__|(?:site|dist)-packages|tests?|testing|idle_test|encodings")
MIN_BYTES, MAX_BYTES = 400, 100_000  # of an installed file: neither empty nor a giant table
MIN_DOCSTRING = 200  # characters; shorter ones name a function again
MIN_LINE = 20  # characters; shorter lines are alike in files that have nothing in common
COMMENT = re.compile(r"^(?:(?:#[^\n]*\n)+|(?://[^\n]*\n)+|/\*.*?\*/[^\n]*\n)", re.M | re.S)

Source = tuple[str, str]  # relative name with forward slashes, path
Text = tuple[str, str, str]  # domain, name, text


def part_of(name: str) -> str:
    """The split of the installed file `name`: `train`, `validation` (one in twenty) or `test`."""
    if name.startswith(TEST_PACKAGES):
        return "test"
    return "validation" if hash_order(f"part {name}") < b"\x0d" else "train"  # 13 of 256


def installed_texts(
    domains: Sequence[str],
    *,
    megabytes: float,
    validation_fraction: float = 0.05,
    test_fraction: float = 0.05,
) -> Iterator[Text]:
    """Texts of `domains`, which share the room equally, in an order that the installation decides.

    Of a domain's room the splits have the given fractions; `part_of` tells them apart.
    Raises ValueError naming a package that is missing.
    """
    domains = list(dict.fromkeys(domains))
    room = int(megabytes * 1e6 / len(domains))
    fractions = {"test": test_fraction, "validation": validation_fraction}
    fractions["train"] = 1 - sum(fractions.values())  # last: it repeats nothing of the others
    roots = {package: _package_folder(package) for package in PACKAGES}
    roots |= {name: folder for name in OPTIONAL if (folder := _folder(name)) is not None}
    modules = _listed({"": sysconfig.get_paths()["stdlib"]} | roots, (".py",))
    headers = {
        f"{name}/{inside}": f"{roots.get(name)}/{inside}" for name, inside in HEADERS.items()
    }
    sources = {
        "python": modules,
        # From the other end than `python`, so that the same text is not taken twice.
        "prose": modules[::-1],
        "cpp": _listed(headers, (".h", ".hpp", ".cuh")) if "cpp" in domains else [],
    }
    for domain in domains:
        seen: set[int] = set()
        for part, fraction in fractions.items():
            files = _read_sources([s for s in sources[domain] if part_of(s[0]) == part], seen)
            texts = files
            if domain == "prose":
                topics = (topic for topic in _topics() if part_of(topic[0]) == part)
                texts = filter(None, chain.from_iterable(zip_longest(topics, _docstrings(files))))
            yield from _take(domain, texts, int(room * fraction), max(room // 20, 2_000))
            if part != "train":
                for _ in files:  # what held-out files say must not be trained on, taken or not
                    pass


def _take(domain: str, texts: Iterable[tuple[str, str]], room: int, limit: int) -> Iterator[Text]:
    """Texts up to `room` bytes, none above `limit`: a small corpus has small files, not few.

    The last one is cut at a line end so that it fits.
    """
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


def _folder(package: str) -> str | None:
    spec = importlib.util.find_spec(package)  # looks, does not import
    if spec is None or not spec.submodule_search_locations:
        return None
    return spec.submodule_search_locations[0]


def _package_folder(package: str) -> str:
    if (folder := _folder(package)) is None:
        raise ValueError(f"data=installed reads the package {package}, which is not installed")
    return folder


def _listed(roots: dict[str, str], suffixes: tuple[str, ...]) -> list[Source]:
    """Files below `roots` in hash order of their relative names: diverse from the first on."""
    sources: list[Source] = []
    for prefix, root in roots.items():
        for folder, folders, files in os.walk(root):
            folders[:] = [name for name in folders if not SKIPPED.fullmatch(name)]
            inside = os.path.join(prefix, os.path.relpath(folder, root)).replace(os.sep, "/")
            inside = inside.removesuffix(".").strip("/")
            for file in files:
                # `_sysconfigdata` records where this interpreter was built.
                if file.endswith(suffixes) and not file.startswith("_sysconfigdata"):
                    sources.append((f"{inside}/{file}".lstrip("/"), os.path.join(folder, file)))
    return sorted(sources, key=lambda source: hash_order(source[0]))


def _read_sources(sources: Iterable[Source], seen: set[int]) -> Iterator[tuple[str, str]]:
    """Names and texts of files that people wrote, without licence header and without repetitions.

    seen: hashes of the lines of files before, which grows.
    """
    for name, path in sources:
        if not MIN_BYTES <= os.path.getsize(path) <= MAX_BYTES:
            continue
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        head = text[:1000].lower()
        text = _without_licence(text)
        if "generated" in head or len(text) < MIN_BYTES // 2 or _repeats(text, seen):
            continue
        yield name, text


def _repeats(text: str, seen: set[int]) -> bool:
    """Whether over half of the long lines of `text` stand in texts before; else they are added."""
    lines = {hash(line) for line in map(str.strip, text.splitlines()) if len(line) >= MIN_LINE}
    if 2 * len(lines & seen) > len(lines):
        return True
    seen |= lines
    return False


def _without_licence(text: str) -> str:
    """Drop the licence comments at the top: thousands of files share them, word for word."""

    def kept(comment: re.Match[str]) -> str:
        return "" if re.search("licen[cs]e|copyright", comment[0], re.IGNORECASE) else comment[0]

    return (COMMENT.sub(kept, text[:2000]) + text[2000:]).lstrip("\n")


def _docstrings(files: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """One text a file: its substantial docstrings, none that an earlier file has too."""
    seen: set[str] = set()
    for name, text in files:
        if text.count('"""') < 4:  # parsing is what costs
            continue
        new = [item for item in _docstrings_in(text) if item not in seen]
        seen.update(new)
        if new:
            yield name, "\n\n".join(new) + "\n"


def _docstrings_in(text: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's files
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a template, or syntax of a newer Python
            return []
    docstrings, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        docstrings.append((ast.get_docstring(node) or "").strip())
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes += [child for child in reversed(node.body) if isinstance(child, kinds)]
    return [docstring for docstring in docstrings if len(docstring) >= MIN_DOCSTRING]


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics  # 0.7 MB, for this domain only

    for name in sorted(topics, key=hash_order):
        if len(topics[name]) >= MIN_BYTES:
            yield f"pydoc_data/topics.py#{name}", topics[name].strip() + "\n"
