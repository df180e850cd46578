"""What the user names, with a checksum of its content: models and texts.

A local file or folder is read once: its checksum is remembered by path, inode, size and times in
`<root>/shared/checksums.json`, which may be deleted.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from transformers.utils.hub import cached_file

from draftkit.artifacts import fingerprint, sha256_file, sha256_tree, write_json
from draftkit.config import DataConfig, ModelConfig
from draftkit.data.installed import OPTIONAL, PACKAGES
from draftkit.models.loading import check_folder

from .plan import Given

CARD = "README.md"  # about a model, no part of it
# Where a package is called otherwise than what is imported.
DISTRIBUTIONS = {"hydra": "hydra-core", "PIL": "pillow"}
MEMORY = Path("shared") / "checksums.json"


def given_model(model: ModelConfig, key: str, root: str) -> Given:
    """The model of a section that names one; of the hub, its name and the commit of its revision.

    Raises ValueError naming `key` where there is no model.
    """
    assert model.path is not None
    check_folder(model, key)
    folder, commit = Path(model.location), model.revision or "main"
    if folder.is_dir():
        return Given(remembered(folder, root, model_sha256), model.location)
    with suppress(OSError, ValueError):  # where nobody knows the commit loading says what is wrong
        file = Path(str(cached_file(model.path, "config.json", revision=commit)))
        commit = file.parent.name  # snapshots/<commit>/config.json of the hub's cache
    return Given(f"{model.path}@{commit}", model.path)


def model_sha256(folder: Path) -> str:
    """Checksum of a model folder, but for its card."""
    return sha256_tree(folder, skip=lambda name: name == CARD)


def given_text(data: DataConfig, root: str) -> Given:
    """What `data` names: a file's content, or the versions of the packages that are read.

    Raises ValueError for a missing file.
    """
    if data.name == "local":
        path = Path(str(data.path))
        if not path.is_file():
            raise ValueError(f"data.path {path}: no such file")
        return Given(remembered(path, root, sha256_file), str(path))
    if data.name == "hub":
        return Given(fingerprint([data.path, data.subset, data.split]), str(data.path))
    return Given(fingerprint([sys.version, sorted(versions_read().items())]))


def versions_read() -> dict[str, str | None]:
    """The versions of the packages that `installed` text is read of; None for a missing one."""
    # Not of all distributions in sight: compiling, for one, brings more of them into sight.
    names = [DISTRIBUTIONS.get(package, package) for package in (*PACKAGES, *OPTIONAL)]
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def remembered(path: Path, root: str, checksum: Callable[[Path], str]) -> str:
    """`checksum(path)`, from memory where no file of it has changed since."""
    memory, key = Path(root) / MEMORY, str(path.resolve())
    files = [file for file in sorted(path.rglob("*")) if file.is_file()] or [path]
    stats = [(str(file.relative_to(path)), file.stat()) for file in files]
    state = fingerprint(
        [[name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in stats]
    )
    known: dict[str, list[str]] = {}
    with suppress(OSError, ValueError):
        stored = json.loads(memory.read_text(encoding="utf-8"))
        known = stored if isinstance(stored, dict) else {}
    if known.get(key, [""])[0] == state:
        return known[key][1]
    digest = checksum(path)
    with suppress(OSError):  # a memory that cannot be written costs time alone
        write_json(memory, {**known, key: [state, digest]})
    return digest
