"""Versioned drafters of one route: whole folders, and a pointer to the one that is served.

    <folder>/<route>/versions/v000001/    a plain drafter folder with its `version.json`
    <folder>/<route>/current              JSON, replaced atomically: name, ancestors, why
    <folder>/<route>/lock

It knows folders, checksums and names; not what a drafter computes, who trains it or who serves it.
Changes take a lock between processes, readers take none. A process killed at any moment leaves
the pointer on a whole version; what else it leaves, the next change clears away. A version that is
gone or has other content is damaged; what merely cannot be read at the moment raises OSError.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, remove, write_json
from draftkit.config.service import DEFAULT_ROUTE
from draftkit.online.fingerprints import require_same
from draftkit.online.versions import (
    NAME,
    Version,
    is_whole,
    read_version,
    read_weights,
    state_of,
    write_version,
)

CURRENT = "current"
_log = logging.getLogger(__name__)


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
        self._checked: dict[str, tuple[Any, bool]] = {}  # name: state of its files, whether whole
        self._warned: set[str] = set()  # versions that are known to be damaged

    # Reading

    def version(self, name: str) -> Version:
        """One of them. Raises ValueError, one line, if it is not there or cannot be read."""
        if NAME.fullmatch(name) is None:
            raise ValueError(f"{name!r} is no version: those are called like v000001")
        return read_version(self._versions / name)

    def _names(self) -> list[str]:
        if not self._versions.is_dir():
            return []
        names = [path.name for path in self._versions.iterdir()]
        return sorted((name for name in names if NAME.fullmatch(name)), key=_number)

    def versions(self) -> list[Version]:
        """All that are there, by name; contents are not checked."""
        versions = []
        for name in self._names():
            with contextlib.suppress(ValueError):
                versions.append(self.version(name))
        return versions

    read = staticmethod(read_weights)

    def _whole(self, name: str) -> Version | None:
        """The version `name` if every file is as published: checked once, while unchanged."""
        try:
            version = self.version(name)
        except ValueError:
            return None
        state = state_of(version)
        if self._checked.get(name, (None, False))[0] != state:
            self._checked[name] = (state, is_whole(version))
        return version if state is not None and self._checked[name][1] else None

    def _pointer(self) -> tuple[list[str], int]:
        """The version that the pointer names with its ancestors, and the last number in use.

        A pointer that cannot be read is taken to be on the newest version.
        """
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            pointer = read_json(self.path / CURRENT)
            names = [str(name) for name in (pointer["name"], *pointer["ancestors"])]
            return names, int(pointer["last"])
        versions = self.versions()
        return [name for one in versions[-1:] for name in (one.name, *one.ancestors)], 0

    def current(self) -> Version | None:
        """What is to be served; null before `seed`.

        If that version is deleted or damaged: its nearest whole ancestor, with a warning, once a
        process. Raises ValueError if none of them is whole.
        """
        names, _ = self._pointer()
        for name in names:
            if (version := self._whole(name)) is not None:
                if name != names[0] and names[0] not in self._warned:
                    self._warned.add(names[0])
                    reason = f"{names[0]} is deleted or damaged: {name} is served instead"
                    _log.warning("%s: %s", self.path, reason)
                return version
        if names:
            raise ValueError(
                f"{self.path}: {names[0]} and all before it are deleted or damaged: put one back,"
                " or start the server again, which begins with draft.path"
            )
        return None

    def pointer(self) -> Hashable:
        """Differs whenever the pointer was written since. Costs a `stat`."""
        try:
            state = os.stat(self.path / CURRENT)
        except OSError:
            return None
        return (state.st_ino, state.st_mtime_ns, state.st_size)

    # Changing

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Alone among all processes and threads, with leftovers of killed ones cleared away."""
        self._versions.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in self._versions.glob(".v[0-9]*"):  # nobody writes here while this one may
                shutil.rmtree(path, ignore_errors=True)
            yield

    def _point(self, version: Version, reason: str) -> None:
        last = max(_number(version.name), self._pointer()[1])
        pointer = {"name": version.name, "ancestors": list(version.ancestors)}
        write_json(self.path / CURRENT, pointer | {"last": last, "reason": reason})

    def _write(
        self, write: Callable[[Path], None], parent: Version | None, metrics: dict[str, Any]
    ) -> Version:
        """A new version of what `write` makes, under a name that was never in force."""
        names, last = self._pointer()  # of which folders may be gone
        number = 1 + max([last, *map(_number, [*names, *self._names()])])
        return write_version(
            self._versions / f"v{number:06d}",
            write,
            ancestors=() if parent is None else (parent.name, *parent.ancestors),
            metrics=metrics,
            fingerprints=self._fingerprints,
        )

    def seed(self, write: Callable[[Path], None]) -> Version:
        """The current version; where there is none, what `write` puts into a folder becomes it.

        Raises ValueError, one line, for a version that was made with something else.
        """
        with self._changing():
            try:
                version = self.current()
            except ValueError as error:  # all are gone: begin again rather than ask for a hand
                _log.warning("%s", error)
                version = None
            if version is None:
                version = self._write(write, None, {})
                self._point(version, "the starting drafter")
            elif self._fingerprints:
                stored, wanted = version.fingerprints, self._fingerprints
                require_same(version.path, stored=stored, wanted=wanted)
            return version

    def publish(
        self,
        write: Callable[[Path], None],
        *,
        metrics: dict[str, Any],
        parent: str | None = None,
    ) -> Version:
        """Make a version of what `write` puts into the (empty) folder it is given.

        It becomes the current one. `parent` null: the current one. Whatever `write` raises passes
        through, and nothing has changed then; ValueError if it leaves no safetensors file;
        NotInForce if `parent` is not the current version.
        """
        with self._changing():
            before = self.current()
            if parent is not None:
                _require(before, parent, f"nothing is published: it was made of {parent}, and")
            version = self._write(write, before, metrics)
            self._point(version, "published")
            return version

    def rollback(
        self, to: str | None = None, *, reason: str, current: str | None = None
    ) -> Version:
        """Make another version current: `to`, or the nearest whole ancestor of the current one.

        Raises ValueError if there is no such whole version; NotInForce if `current` is given, and
        another version is in force.
        """
        none_yet = ValueError(f"{self.path} has no version yet: start the server first")
        if not self.path.is_dir():  # of what is refused nothing is made
            raise none_yet
        with self._changing():
            names, _ = self._pointer()
            if not names:
                raise none_yet
            if current is not None:
                _require(self.current(), current, f"{current} is not taken back:")
            if to == names[0]:
                raise ValueError(f"{to} is the current version already")
            wanted = names[1:] if to is None else [to]
            version = next(filter(None, map(self._whole, wanted)), None)
            if version is None:
                whole = ", ".join(name for name in self._names() if self._whole(name) is not None)
                missing = "no version before it" if to is None else f"no whole version {to}"
                raise ValueError(f"{self.path}: there is {missing}; whole ones: {whole}")
            self._point(version, reason)
            return version

    def collect(self, keep: int) -> list[str]:
        """Delete old versions; the names of those that went.

        The last `keep` stay, the current one, and all its ancestors.
        """
        with self._changing():
            names = self._names()
            kept = {*self._pointer()[0], *(names[-keep:] if keep else ())}
            gone = [name for name in names if name not in kept]
            for name in gone:
                remove(self._versions / name)
            return gone


def _require(current: Version | None, name: str, refusal: str) -> None:
    """Raise NotInForce unless the `current` version is `name`."""
    if current is None or current.name != name:
        now = "nothing" if current is None else current.name
        raise NotInForce(f"{refusal} {now} is in force now")


def _number(name: str) -> int:
    return int(name[1:]) if NAME.fullmatch(name) else 0
