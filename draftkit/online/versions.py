"""A published drafter: a folder with its weights and, written last, `version.json`.

This module writes such a folder and reads it. It does not know which version is served.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from draftkit.artifacts import atomic_path, read_json, sha256_file, write_json

NAME = re.compile(r"v[0-9]{6,12}")
ABOUT = "version.json"
_WEIGHTS = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Version:
    """One published drafter: a plain `save_pretrained` folder that never changes."""

    path: Path
    ancestors: tuple[str, ...]  # the parent, its parent, and so on
    sha256: dict[str, str]  # of every file, by its relative name
    metrics: dict[str, Any]
    fingerprints: dict[str, str]  # of what it was made with, by configuration key; may be empty

    @property
    def name(self) -> str:
        """As v000001; names rise and are not used twice."""
        return self.path.name

    @property
    def parent(self) -> str | None:
        """The version it was trained from; null for the starting drafter."""
        return self.ancestors[0] if self.ancestors else None


def write_version(
    path: Path,
    write: Callable[[Path], None],
    *,
    ancestors: tuple[str, ...],
    metrics: dict[str, Any],
    fingerprints: dict[str, str],
) -> Version:
    """Make the folder `path` of what `write` puts into the empty one it is given.

    The folder appears whole and flushed, or not at all. Raises ValueError if `write` leaves no
    safetensors file; whatever `write` raises passes through.
    """
    with atomic_path(path) as folder:
        folder.mkdir()
        write(folder)
        files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != ABOUT)
        sums = {file.relative_to(folder).as_posix(): sha256_file(file) for file in files}
        if not any(name.endswith(_WEIGHTS) for name in sums):
            raise ValueError(f"nothing is published: no {_WEIGHTS} file was written")
        about = {"ancestors": ancestors, "sha256": sums, "metrics": metrics}
        write_json(folder / ABOUT, about | {"fingerprints": fingerprints})
    return read_version(path)


def read_version(path: Path) -> Version:
    """The version in the folder `path`; its other files are not looked at.

    Raises ValueError, one line, if it is not there or is damaged; OSError if that cannot be known
    at the moment.
    """
    try:
        about = read_json(path / ABOUT)
        return Version(path=path, **about | {"ancestors": tuple(about["ancestors"])})
    except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
        state = "missing" if isinstance(error, FileNotFoundError) else "damaged"
        raise ValueError(f"{path / ABOUT} is {state}: roll back to another version") from error


def read_weights(version: Version) -> dict[str, Tensor]:
    """The tensors of all its safetensors files, from the very bytes whose checksums were right.

    Raises ValueError, one line, if any of its files is gone or differs from its checksum; OSError
    if one cannot be read at the moment.
    """
    tensors: dict[str, Tensor] = {}
    for name, expected in version.sha256.items():
        file = version.path / name
        try:
            content = file.read_bytes()
            if hashlib.sha256(content).hexdigest() != expected:
                raise ValueError(f"{file} of {version.name} differs from its checksum")
            if name.endswith(_WEIGHTS):
                tensors |= safetensors.torch.load(content)
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(f"{file} of {version.name} cannot be read ({error})") from error
    return tensors
