"""The stage folder on disk: whose it is, whether it is complete, and one writer at a time.

    <root>/<name>/<stage>/   config.yaml  manifest.json  metrics.jsonl  the product  summary.json
    <root>/shared/<stage>/<fingerprint>/     the same, for stages that experiments share

`manifest.json` comes first and holds the settings and inputs that the product is made of;
`summary.json` comes last and means complete. This module does not know what a stage computes and
never sees Hydra. A process killed between any two lines leaves a folder that `claim` can use.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, recover, recover_tree, remove, sha256_tree, write_json
from draftkit.tracking import Tracker

CONFIG, MANIFEST, METRICS, SUMMARY = "config.yaml", "manifest.json", "metrics.jsonl", "summary.json"
RECORDS = (CONFIG, MANIFEST, METRICS, SUMMARY, "wandb")
LOCK = ".lock"
_CLEARED = {"cleared": True}
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Identity:
    """Where a stage's product lives and what it is made of: declared settings, input hashes."""

    stage: str
    path: Path
    settings: dict[str, Any]
    inputs: dict[str, str]


@dataclass(frozen=True)
class StageFolder:
    """What a stage gets: its folder, its tracker, and whether an interrupted run began there.

    `is_main` is false on the other ranks of a distributed launch: they read and never write.
    """

    path: Path
    tracker: Tracker
    resumed: bool = False
    is_main: bool = True
    stage: str = ""

    def note(self, text: str) -> None:
        """Print one line to the person who started the stage."""
        if self.is_main:
            print(f"{self.stage}: {text}" if self.stage else text, flush=True)


def is_record(name: str) -> bool:
    """Whether a name directly inside a stage folder is ours to write and no part of the product."""
    return name in RECORDS or name.startswith(".")


def product_digest(path: Path) -> str:
    """SHA-256 of what the stage made, without the records about it."""
    return sha256_tree(path, skip=is_record)


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


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    def shown(settings: dict[str, Any], key: str) -> str:
        return repr(settings[key]) if key in settings else "(not known)"

    keys = [key for key in {**wanted, **stored} if stored.get(key) != wanted.get(key)]
    return [f"{key} was {shown(stored, key)}, now {shown(wanted, key)}" for key in keys]


def _is_of(identity: Identity, manifest: Any) -> bool:
    """Whether the stage wrote this manifest: at its start, or before it cleared the folder."""
    if manifest == _CLEARED:  # earlier versions did not note whose folder they cleared
        return True
    if not isinstance(manifest, dict):
        return False
    known = "settings" in manifest or manifest.get("cleared") is True
    return known and manifest.get("stage") == identity.stage


def _manifest(identity: Identity) -> dict[str, Any] | None:
    """What the stage has written about the folder; None where it has to begin.

    Raises ValueError for a folder that holds the files of somebody else.
    """
    path = identity.path / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path)
    if not _is_of(identity, manifest):
        raise _foreign(identity, MANIFEST)
    return manifest if "settings" in manifest else None


def _foreign(identity: Identity, name: str) -> ValueError:
    return ValueError(
        f"{identity.path} holds files that no {identity.stage} stage wrote ({name}, ...):"
        " move them away, or use name=..."
    )


def _stored(identity: Identity) -> dict[str, Any] | None:
    """The manifest that belongs to a usable folder; None where the stage has to start.

    Raises ValueError: naming the keys, if the folder was made with other settings; naming a file,
    if another than this stage has written it.
    """
    stored = _manifest(identity)
    if stored is None:
        return None
    if differences := _differences(stored["settings"], identity.settings):
        raise ValueError(
            f"{identity.path} was made with other settings ({'; '.join(differences)}): use name=..."
            f" for another experiment, or `python -m pipelines.{identity.stage} ..."
            " overwrite=true` to redo this one"
        )
    return stored


def complete_summary(identity: Identity) -> dict[str, Any] | None:
    """The summary, if the folder is complete and its inputs are the present ones.

    Raises ValueError as `_stored` does.
    """
    stored = _stored(identity)
    summary = identity.path / SUMMARY
    if stored is None or stored["inputs"] != identity.inputs or not summary.is_file():
        return None
    return read_json(summary)


def wait_until_complete(identity: Identity) -> None:
    """Return when the first rank has made the product (the launcher ends us if that one fails)."""
    while complete_summary(identity) is None:
        time.sleep(_POLL_SECONDS)


def _clear(identity: Identity) -> None:
    """Empty the folder but for its lock. A kill inside leaves a manifest that says so."""
    path = identity.path
    (path / SUMMARY).unlink(missing_ok=True)
    write_json(path / MANIFEST, {"stage": identity.stage, **_CLEARED})
    for child in list(path.iterdir()):
        if child.name in (LOCK, MANIFEST):
            continue
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def claim(identity: Identity, *, overwrite: bool) -> tuple[dict[str, Any] | None, str]:
    """Make the locked folder usable: its manifest if an interrupted run goes on, and what was done.

    The second value is a line for the person, or empty. Raises ValueError when the folder was made
    with other settings (unless `overwrite`), or holds the files of somebody else.
    """
    path = identity.path
    recover(path)
    recover_tree(path)
    if not (path / MANIFEST).is_file():
        foreign = sorted({child.name for child in path.iterdir()} - {*RECORDS, LOCK})
        if foreign:
            raise _foreign(identity, foreign[0])
        return None, ""
    stored = _manifest(identity) if overwrite else _stored(identity)
    if stored is None or overwrite:
        _clear(identity)
        return None, f"redoing {path} (overwrite=true)" if overwrite else ""
    if stored["inputs"] != identity.inputs:
        changed = sorted(
            key
            for key in {**stored["inputs"], **identity.inputs}
            if stored["inputs"].get(key) != identity.inputs.get(key)
        )
        _clear(identity)
        return None, f"{path} is stale, redoing it (changed: {', '.join(changed)})"
    return stored, f"going on in {path}"


def discard_if_empty(path: Path) -> None:
    """Remove a folder in which a refused run has stored nothing but records."""
    if all(is_record(child.name) for child in path.iterdir()):
        remove(path)
        if not any(path.parent.iterdir()):
            path.parent.rmdir()
