"""Files that are whole or absent: atomic writes, checksums, fingerprints, provenance.

Everything the project stores goes through `atomic_path`: it is written under a temporary sibling
name, flushed to the disk, and renamed. A process killed at any moment leaves the old product or
the new one, and at most a temporary name that `recover` clears away on the next open.

This module does not know what it stores, nor which stage or experiment asks. One process writes a
path at a time; the stage folder's lock sees to that.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PINNED_PACKAGES = (
    "draftkit",
    "torch",
    "transformers",
    "datasets",
    "peft",
    "accelerate",
    "wandb",
    "hydra-core",
    "tokenizers",
    "safetensors",
    "pyarrow",
    "numpy",
)
_TEMPORARY, _ASIDE = ".tmp-", ".old-"
_READ_BYTES = 1 << 20


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened: dependencies explain themselves at length."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _siblings(path: Path, mark: str) -> list[Path]:
    """Leftovers of `path` under `mark` whose writer is dead (or was an earlier one of our pid)."""
    prefix = f".{path.name}{mark}"
    if not path.parent.is_dir():
        return []
    found = []
    for sibling in sorted(path.parent.iterdir()):
        pid = sibling.name.removeprefix(prefix)
        if sibling.name.startswith(prefix) and pid.isdigit():
            dead = int(pid) == os.getpid() or not _alive(int(pid))
            found += [sibling] if dead else []
    return found


def recover(path: Path) -> None:
    """Undo what a killed writer of `path` left: finish or forget it, so that `path` is whole.

    A folder is replaced in two renames; if the kill fell between them, the old one comes back.
    """
    for aside in _siblings(path, _ASIDE):
        if path.exists():
            _remove(aside)
        else:
            aside.rename(path)
    for temporary in _siblings(path, _TEMPORARY):
        _remove(temporary)


def recover_tree(folder: Path) -> None:
    """`recover` every path inside `folder`, at any depth."""
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            for mark in (_ASIDE, _TEMPORARY):
                stem, found, pid = name.rpartition(mark)
                if found and stem.startswith(".") and pid.isdigit():
                    recover(Path(parent) / stem[1:])


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(path: Path) -> None:
    if path.is_dir():
        for child in path.iterdir():
            _sync_tree(child)
    _sync(path)


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; the caller makes it, as a file or as a folder.

    On success it is flushed and takes the place of `path` (whatever was there goes). On any
    exception it is removed and `path` stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    temporary = path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")
    aside = path.with_name(f".{path.name}{_ASIDE}{os.getpid()}")
    try:
        yield temporary
        _sync_tree(temporary)
        if path.is_dir():  # a folder cannot be renamed over a full one
            path.rename(aside)
        temporary.replace(path)
        _sync(path.parent)
    except BaseException:
        if aside.exists() and not path.exists():
            aside.rename(path)
        with contextlib.suppress(OSError):  # the first error is the one to tell
            _remove(temporary)
        raise
    if aside.exists():
        _remove(aside)


def remove(path: str | Path) -> None:
    """Delete a file or folder, if there is one, so that a kill never leaves half a folder."""
    path = Path(path)
    recover(path)
    if path.exists():
        temporary = path.with_name(f".{path.name}{_TEMPORARY}{os.getpid()}")
        path.rename(temporary)
        _remove(temporary)


def write_bytes(path: str | Path, content: bytes) -> None:
    """Replace `path` by `content` atomically. Raises OSError (a full disk) and changes nothing."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | Path, text: str) -> None:
    """Replace `path` by `text`, in UTF-8, atomically."""
    write_bytes(path, text.encode())


def _plain(value: Any) -> Any:
    """`value` in JSON's types: paths as text, NaN and infinities as null (JSON has neither)."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Replace `path` by `value` as indented JSON, atomically; NaN and infinities become null."""
    write_text(path, json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """The JSON value in `path`. Raises ValueError naming the file if it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): remove it and run again") from error


def _update_from_file(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    _update_from_file(digest, Path(path))
    return digest.hexdigest()


def sha256_tree(folder: str | Path, *, skip: Callable[[str], bool] | None = None) -> str:
    """Hex SHA-256 over the relative names and bytes of all files below `folder`.

    `skip` is asked for every name directly inside `folder`. Times and permissions do not count.
    """
    folder = Path(folder)
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda file: file.relative_to(folder).as_posix()):
        relative = path.relative_to(folder)
        if path.is_file() and not (skip is not None and skip(relative.parts[0])):
            digest.update(f"{relative.as_posix()}\0{path.stat().st_size}\0".encode())
            _update_from_file(digest, path)
    return digest.hexdigest()


def fingerprint(value: Any) -> str:
    """16 hex digits that stand for a JSON value, whatever the order of its keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _git(*arguments: str) -> str | None:
    """What git says about the checkout that holds this file; None outside one."""
    checkout = Path(__file__).resolve().parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {}
    for package in PINNED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _hardware() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    hardware: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": usable,
        "memory_bytes": memory,
        "gpu": [],
        "torch_threads": None,
    }
    torch = sys.modules.get("torch")  # asked only if somebody needed it: provenance stays cheap
    if torch is not None:
        hardware["torch_threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            hardware["gpu"] = [torch.cuda.get_device_name(index) for index in range(count)]
    return hardware


def provenance(arguments: list[str] | None = None) -> dict[str, Any]:
    """Which code, versions, machine and command made a product (`arguments` null: this process)."""
    status = _git("status", "--porcelain")
    command = sys.argv if arguments is None else arguments
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": _versions(),
        "hardware": _hardware(),
        "argv": [Path(command[0]).name, *command[1:]] if command else [],
    }
