"""Versioned drafters of one route: whole folders, and a pointer to the one that is served.

    <folder>/<route>/versions/v000001/    a plain drafter folder with its `version.json`
    <folder>/<route>/current              JSON, replaced atomically: name, ancestors, why, and
                                          what was in force before, and why
    <folder>/<route>/served               JSON: the version that another engine serves, or null

It knows folders, checksums and names; not what a drafter computes, who trains it or who serves it.
Changes take a lock between processes, readers take none. A process killed at any moment leaves
the pointer on a whole version; what else it leaves, the next change clears away. What a version
holds is compared with its checksums whenever weights are read.
"""

import contextlib
import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from draftkit.artifacts import atomic_path, locked, read_json, remove, sha256_file, write_json
from draftkit.config.service import DEFAULT_ROUTE

CURRENT, SERVED, ABOUT = "current", "served", "version.json"
CHANGES = 200  # of the version in force, that the pointer tells of
PUBLISHED = "published"  # the reason of a change that is no rollback
NAME = re.compile(r"v[0-9]{6,12}")
_WEIGHTS = ".safetensors"
_log = logging.getLogger(__name__)


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


def require_same(path: Path, *, stored: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise ValueError, one line, naming the keys whose fingerprints differ, and what to do then.

    Weights of one target say nothing of another, ids of one tokenizer mean nothing in another, and
    a refitted drafter is no other starting drafter's successor. `stored` is empty where it was
    never told what the content of `path` is made with.
    """
    if stored == wanted:
        return
    names = [key for key in {**wanted, **stored} if stored.get(key) != wanted.get(key)]
    reason = f"was made with another {' and '.join(names)}"
    if not stored:
        reason = f"does not tell with which {' and '.join(names)} it was made"
    raise ValueError(
        f"{path} {reason}: use name=... for another service, or overwrite=true to begin this one "
        "anew, which deletes its records and all its drafter versions"
    )


class NotInForce(ValueError):
    """What a change was to start from is not in force: another version is, meanwhile."""


class Registry:
    """The versions of one route, below `<folder>/<route>/`. Several threads may use it."""

    def __init__(
        self,
        folder: str | Path,
        route: str = DEFAULT_ROUTE,
        *,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        """Look at the registry in `folder`; nothing is written.

        `fingerprints`: of what its versions are made with, by configuration key; each of them
        tells, and `seed` refuses others. None: nobody knows, so nobody asks.
        """
        self.path = Path(folder) / route
        self._fingerprints = dict(fingerprints or {})
        self._versions = self.path / "versions"

    # Reading

    def version(self, name: str) -> Version:
        """One of them; its weights are not looked at.

        Raises ValueError, one line, if it is not there or is damaged; OSError if that cannot be
        known at the moment.
        """
        if NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is no version: those are called like v000001")
        path = self._versions / name
        try:
            about = read_json(path / ABOUT)
            return Version(path=path, **about | {"ancestors": tuple(about["ancestors"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
            state = "missing" if isinstance(error, FileNotFoundError) else "damaged"
            raise ValueError(f"{path / ABOUT} is {state}: roll back to another version") from error

    def names(self) -> list[str]:
        """The names of all that are there, the oldest first."""
        if not self._versions.is_dir():
            return []
        names = [path.name for path in self._versions.iterdir()]
        return sorted((name for name in names if NAME.fullmatch(name)), key=_number)

    def versions(self) -> list[Version]:
        """All that are there, the oldest first. Raises ValueError for one that is damaged."""
        return [self.version(name) for name in self.names()]

    def read(self, version: Version) -> dict[str, Tensor]:
        """The tensors of all its safetensors files, from the bytes whose checksums were right.

        Raises ValueError, one line, if any of its files is gone or differs from its checksum;
        OSError if one cannot be read at the moment.
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

    def _pointer(self, *, lenient: bool = False) -> dict[str, Any]:
        """What the pointer says: a version's name, its ancestors, the last number in use.

        Raises ValueError, unless `lenient`, for one that is damaged where versions are there.
        """
        path, names = self.path / CURRENT, self.names()
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            pointer = json.loads(path.read_text(encoding="utf-8"))
            if all(map(NAME.fullmatch, [pointer["name"], *pointer["ancestors"]])):
                return {"changes": []} | pointer | {"last": int(pointer["last"])}
        if names and path.exists() and not lenient:
            raise ValueError(
                f"{path} is damaged, so that nothing says which of {names[0]} to {names[-1]} is in "
                "force: `rollback` makes the newest whole one current"
            )
        last = max([0, *map(_number, names)])
        return {"name": None, "ancestors": [], "last": last, "changes": []}

    def current(self) -> Version | None:
        """What is to be served; null before `seed`. Raises ValueError if it is not there."""
        name = self._pointer()["name"]
        return None if name is None else self.version(name)

    def served(self) -> str | None:
        """The version that another engine serves, as far as its daemon knows."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.path / SERVED).read_text(encoding="utf-8"))
        return None

    def changes(self) -> list[dict[str, Any]]:
        """The newest changes of the version in force, the oldest first: `time` in seconds since
        1970, `before` (null: none was known), `name` and `reason`. None of a damaged pointer.
        """
        return self._pointer(lenient=True)["changes"]

    # Changing

    def note_served(self, name: str | None) -> None:
        """Keep what `served` says; None: it is not known."""
        write_json(self.path / SERVED, name)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Alone among all processes and threads, with leftovers of killed ones cleared away."""
        with locked(self.path, wait=_log.info):
            self._versions.mkdir(exist_ok=True)
            for path in self._versions.glob(".v[0-9]*"):  # nobody writes here while this one may
                shutil.rmtree(path, ignore_errors=True)
            yield

    def _point(self, version: Version, reason: str) -> None:
        before = self._pointer(lenient=True)
        change = {"time": round(time.time(), 3), "before": before["name"], "name": version.name}
        pointer = {
            "name": version.name,
            "ancestors": list(version.ancestors),
            "last": max(_number(version.name), before["last"]),
            "reason": reason,
            "changes": [*before["changes"], change | {"reason": reason}][-CHANGES:],
        }
        write_json(self.path / CURRENT, pointer)

    def _write(
        self, write: Callable[[Path], None], parent: Version | None, metrics: dict[str, Any]
    ) -> Version:
        """A new version of what `write` makes, under a name that was never in force.

        Its folder appears whole and flushed, or not at all.
        """
        name = f"v{1 + max([self._pointer()['last'], *map(_number, self.names())]):06d}"
        with atomic_path(self._versions / name) as folder:
            folder.mkdir()
            write(folder)
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            sums = {file.relative_to(folder).as_posix(): sha256_file(file) for file in files}
            if not any(file.endswith(_WEIGHTS) for file in sums):
                raise ValueError(f"nothing is published: no {_WEIGHTS} file was written")
            ancestors = () if parent is None else (parent.name, *parent.ancestors)
            about = {"ancestors": ancestors, "sha256": sums, "metrics": metrics}
            write_json(folder / ABOUT, about | {"fingerprints": self._fingerprints})
        return self.version(name)

    def seed(self, write: Callable[[Path], None]) -> Version:
        """The current version; where there is none, what `write` puts into a folder becomes it.

        Where the pointer alone is gone, the newest whole version is current again. Raises
        ValueError, one line, for a version that was made with something else, or is gone.
        """
        with self._changing():
            version, reason = self.current(), "the pointer was gone"
            if version is None:
                version = next(self._whole(self.names()[::-1]), None)
                if version is None:
                    version, reason = self._write(write, None, {}), "the starting drafter"
                self._point(version, reason)
            if self._fingerprints:
                stored, wanted = version.fingerprints, self._fingerprints
                require_same(version.path, stored=stored, wanted=wanted)
            return version

    def publish(
        self, write: Callable[[Path], None], *, metrics: dict[str, Any], parent: str | None = None
    ) -> Version:
        """Make a version of what `write` puts into the (empty) folder it is given.

        It becomes the current one. `parent` null: the current one. Whatever `write` raises passes
        through, and nothing has changed then; ValueError if it leaves no safetensors file;
        NotInForce if `parent` is not the current version.
        """
        with self._changing():
            before = self.current()
            if parent is not None:
                now = None if before is None else before.name
                if now != parent:
                    raise NotInForce(
                        f"nothing is published: it was made of {parent}, and {now or 'nothing'} "
                        "is in force now"
                    )
            version = self._write(write, before, metrics)
            self._point(version, PUBLISHED)
            return version

    def rollback(
        self, to: str | None = None, *, reason: str, current: str | None = None
    ) -> Version:
        """Make another version current: `to`, or the nearest whole ancestor of the current one.

        Where nothing says which one is current, the newest whole one. Raises ValueError if there is
        no such whole version; NotInForce if `current` is given, and another version is in force.
        """
        if not self.names() and self._pointer()["name"] is None:  # of a refusal nothing is left
            raise ValueError(f"{self.path} has no version yet: start the server first")
        with self._changing():
            pointer = self._pointer(lenient=True)
            if current not in (None, now := pointer["name"]):
                raise NotInForce(f"{current} is not taken back: {now or 'nothing'} is in force now")
            if to and to == pointer["name"]:
                raise ValueError(f"{to} is the current version already")
            before = pointer["ancestors"] if pointer["name"] else self.names()[::-1]
            wanted = before if to is None else [to]
            version = next(self._whole(wanted), None)
            if version is None:
                whole = ", ".join(version.name for version in self._whole(self.names()))
                missing = "no version before it" if to is None else f"no whole version {to}"
                raise ValueError(f"{self.path}: there is {missing}; whole ones: {whole}")
            self._point(version, reason)
            return version

    def _whole(self, names: Sequence[str]) -> Iterator[Version]:
        """Those of the versions `names` whose files are all as they were published."""
        for name in names:
            with contextlib.suppress(ValueError):
                version = self.version(name)
                self.read(version)
                yield version

    def collect(self, keep: int) -> list[str]:
        """Delete old versions; the names of those that went.

        The last `keep` stay, the current one, and all its ancestors.
        """
        with self._changing():
            names, pointer = self.names(), self._pointer()
            kept = {pointer["name"], *pointer["ancestors"], *(names[-keep:] if keep else ())}
            gone = [name for name in names if name not in kept]
            for name in gone:
                remove(self._versions / name)
            return gone


def _number(name: str) -> int:
    return int(name[1:])
