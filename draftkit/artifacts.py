"""Files that are whole or absent: atomic writes, locks, checksums, fingerprints, provenance.

Everything the project stores goes through `atomic_path`: it is written under a temporary sibling
name, flushed to the disk, and renamed. A process killed at any moment leaves the old product or
the new one, and at most a temporary name that `recover` clears away on the next open.

This module does not know what it stores, nor which stage or experiment asks. One process writes a
path at a time: it holds a folder by `locked`.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LOCK = ".lock"
PINNED_PACKAGES = ("draftkit", "torch", "transformers", "datasets", "peft", "accelerate", "wandb")
PINNED_PACKAGES += ("hydra-core", "tokenizers", "safetensors", "pyarrow", "numpy")
_LEFTOVER = re.compile(r"\.(.+)\.(tmp|old)-(\d+)")  # of which path, what, and whose


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened: dependencies explain themselves at length."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, kind: str) -> Path:
    """The name by which this process keeps a new (`tmp`) or replaced (`old`) version of `path`."""
    return path.with_name(f".{path.name}.{kind}-{os.getpid()}")


def _settle(leftover: Path) -> None:
    """Finish or forget what a dead writer left, or an earlier one of our pid."""
    match = _LEFTOVER.fullmatch(leftover.name)
    if match is None or not leftover.exists():
        return
    path, pid = leftover.with_name(match[1]), int(match[3])
    if pid != os.getpid():
        try:
            os.kill(pid, 0)
            return  # it is alive
        except PermissionError:
            return  # so is it
        except ProcessLookupError:
            pass
    if match[2] == "old" and not path.exists():
        leftover.rename(path)
    else:
        _remove(leftover)


def recover(path: Path) -> None:
    """Undo what a killed writer of `path` left, so that it is whole or absent.

    A folder is replaced in two renames; if the kill fell between them, the old one comes back.
    """
    for kind in ("old", "tmp"):
        for leftover in sorted(path.parent.glob(f".{escape(path.name)}.{kind}-*")):
            _settle(leftover)


def recover_tree(folder: Path) -> None:
    """`recover` every path inside `folder`, at any depth."""
    for leftover in sorted(folder.rglob(".*-*")):
        _settle(leftover)


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path`; the caller makes it, as a file or as a folder.

    On success it is flushed and takes the place of `path` (whatever was there goes). On any
    exception it is removed and `path` stays as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    recover(path)
    temporary, aside = _beside(path, "tmp"), _beside(path, "old")
    try:
        yield temporary
        _sync(*temporary.rglob("*"), temporary)
        if path.is_dir():  # a folder cannot be renamed over a full one
            path.rename(aside)
        temporary.replace(path)
        _sync(path.parent)
    except BaseException:
        if aside.exists() and not path.exists():
            aside.rename(path)
        with suppress(OSError):  # the first error is the one that counts
            _remove(temporary)
        raise
    if aside.exists():
        _remove(aside)


def remove(path: str | Path) -> None:
    """Delete a file or folder, if there is one, so that a kill never leaves half a folder."""
    path = Path(path)
    recover(path)
    if path.exists():
        temporary = _beside(path, "tmp")
        path.rename(temporary)
        _remove(temporary)


@contextmanager
def locked(folder: Path, *, wait: Callable[[str], object] | None = None) -> Iterator[None]:
    """Hold `folder` (made if missing) for this thread alone; a killed holder lets go.

    Raises ValueError when another one holds it, unless it is waited for: that is told to `wait`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait is None:
            raise ValueError(
                f"{folder} is in use by another run: wait until it ends, or use name=..."
            ) from None
        wait(f"waiting for another run that is making {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_text(path: str | Path, text: str) -> None:
    """Replace `path` by `text`, in UTF-8, atomically. On OSError (a full disk) nothing changes."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


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


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_tree(folder: str | Path, *, skip: Callable[[str], bool] = lambda name: False) -> str:
    """Hex SHA-256 over the relative names and bytes of all files below `folder`.

    `skip` gets every name directly inside `folder`. Times and permissions do not count.
    """
    folder, digest = Path(folder), hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda file: file.relative_to(folder).as_posix()):
        relative = path.relative_to(folder)
        if path.is_file() and not skip(relative.parts[0]):
            digest.update(f"{relative.as_posix()}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)  # goes on with the same one
    return digest.hexdigest()


def remembered(
    path: Path, memory: Path, checksum: Callable[[Path], str], files: Iterable[Path]
) -> str:
    """`checksum(path)`, from `memory` where none of `files` has changed since.

    Changes are seen by inode, size and times. `memory`: a JSON file that may be deleted. `files`:
    those at or below `path` that the checksum reads.
    """
    key = str(path.resolve())
    stats = [(file.relative_to(path).as_posix(), file.stat()) for file in files]
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


def _hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if named := re.search(r"^model name.*?:(.*)$", text, re.MULTILINE):
            cpu = named[1].strip()
    cores, memory = os.cpu_count(), None
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    if "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules.get("torch")  # only where somebody needed it: provenance stays cheap
    gpus = 0 if torch is None else torch.cuda.device_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "memory_bytes": memory,
        "gpu": [torch.cuda.get_device_name(index) for index in range(gpus)] if torch else [],
        "torch_threads": torch.get_num_threads() if torch else None,
    }


def machine(*, gpu: bool) -> str:
    """What computes, in words: the first GPU, or the processor with the threads in use."""
    hardware = _hardware()
    threads = hardware["torch_threads"] or hardware["cores"]
    if gpu:
        return str(hardware["gpu"][0])
    return f"{hardware['cpu']}, {threads} thread{'s' * (threads != 1)}"


def provenance() -> dict[str, Any]:
    """Which code, versions, machine and command make a product in this process."""
    status, versions = _git("status", "--porcelain"), {}
    for package in PINNED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "hardware": _hardware(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
