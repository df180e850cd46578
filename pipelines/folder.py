"""The stage folder on disk: one writer at a time, and cleared only by whoever made it.

    <root>/<name>/<stage>/   config.yaml  manifest.json  metrics.jsonl  the product  summary.json
    <root>/shared/<stage>/<fingerprint>/     the same, for stages that experiments share

`manifest.json` comes first and holds the settings and inputs that the product is made of;
`summary.json` comes last and means complete. This module does not know what a stage computes and
never sees Hydra. A process killed between any two lines leaves a folder that `claim` can use.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftkit.artifacts import recover, recover_tree, remove, sha256_tree, write_json

from .plan import (
    MANIFEST,
    SUMMARY,
    Step,
    changed_inputs,
    foreign,
    own_manifest,
    stored_manifest,
)

CONFIG, METRICS = "config.yaml", "metrics.jsonl"
RECORDS = (CONFIG, MANIFEST, METRICS, SUMMARY, "wandb")
LOCK = ".lock"


def is_record(name: str) -> bool:
    """Whether a name directly inside a stage folder is ours to write and no part of the product."""
    return name in RECORDS or name.startswith(".")


def product_digest(folder: Path) -> str:
    """SHA-256 of all that the stage made, without the records about it."""
    return sha256_tree(folder, skip=is_record)


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Hold the folder `path` (made if missing) for this process alone.

    Raises ValueError when another process holds it, unless `wait`. A killed holder lets go.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                os.close(descriptor)
                raise ValueError(
                    f"{path} is in use by another run: wait until it ends, or use name=..."
                ) from None
            print(f"waiting for another run that is making {path}", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # The holder before us may have removed the folder: then this is nobody's lock.
        if (path / LOCK).exists() and os.path.samestat(os.fstat(descriptor), os.stat(path / LOCK)):
            break
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def _clear(step: Step) -> None:
    """Empty the folder but for its lock. A kill inside leaves a manifest that says so."""
    path = step.folder
    (path / SUMMARY).unlink(missing_ok=True)
    write_json(path / MANIFEST, {"stage": step.name, "cleared": True})
    for child in list(path.iterdir()):
        if child.name in (LOCK, MANIFEST):
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def claim(step: Step, *, overwrite: bool) -> tuple[dict[str, Any] | None, str]:
    """Make the locked folder usable: its manifest if an interrupted run goes on, and what was done.

    The second value is a line for the person, or empty. Raises ValueError when the folder was made
    with other settings (unless `overwrite`), or holds the files of somebody else.
    """
    path = step.folder
    recover(path)
    recover_tree(path)
    if not (path / MANIFEST).is_file():
        strangers = sorted({child.name for child in path.iterdir()} - {*RECORDS, LOCK})
        if strangers:
            raise foreign(step, strangers[0])
        return None, ""
    stored = own_manifest(step) if overwrite else stored_manifest(step)
    if stored is None or overwrite:
        _clear(step)
        return None, f"redoing {path} (overwrite=true)" if overwrite else ""
    if changed := changed_inputs(step, stored):
        _clear(step)
        return None, f"{path} is stale, redoing it (changed: {', '.join(sorted(changed))})"
    return stored, f"going on in {path}"


def discard_if_empty(path: Path) -> None:
    """Remove a folder in which a refused run has stored nothing but records."""
    if all(is_record(child.name) for child in path.iterdir()):
        remove(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
