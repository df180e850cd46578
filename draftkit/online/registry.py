"""Versioned drafters of one route: whole folders, and a pointer to the one that is served.

    <folder>/<route>/versions/v000001/    a plain drafter folder with its `version.json`
    <folder>/<route>/current              JSON, replaced atomically
    <folder>/<route>/events.jsonl, lock

It knows folders, checksums and names; not what a drafter computes, who trains it or who serves it.
Changes take a lock between processes, readers take none. A process killed at any moment leaves
the pointer on a whole version; what else it leaves, the next change clears away. A version that is
gone or has other content is damaged; what merely cannot be read at the moment raises OSError.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json, remove, write_json
from draftkit.config.service import DEFAULT_ROUTE, ROUTE
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
    """What a new version was made of is not in force: it has been taken back meanwhile."""


class Registry:
    """The versions of one route, below `<folder>/<route>/`. Several threads may use it."""

    def __init__(
        self,
        folder: str | Path,
        route: str = DEFAULT_ROUTE,
        *,
        fingerprints: Mapping[str, str] | None = None,
    ) -> None:
        """Look at the registry in `folder`; nothing is written. ValueError for a bad route name.

        `fingerprints`: of what its versions are made with, by configuration key; each of them
        tells, and `seed` refuses others. None: nobody knows, so nobody asks.
        """
        if ROUTE.fullmatch(route) is None:
            raise ValueError(f"route {route!r} must be of a-z, 0-9, _ and -, at most 32 long")
        self.route = route
        self.path = Path(folder) / route
        self._fingerprints = dict(fingerprints or {})
        self._versions = self.path / "versions"
        self._events = self.path / "events.jsonl"
        self._checked: dict[str, tuple[Any, bool]] = {}  # name: state of its files, whether whole
        self._falls: set[tuple[str, str]] = set()  # from where, and to which version

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

    def _pointer(self) -> list[str]:
        """The version that the pointer names, and its ancestors; nothing if it names none.

        Of a lost pointer the events tell where it was.
        """
        try:
            return _lineage(read_json(self.path / CURRENT))
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("%s is damaged: %s", self.path / CURRENT, error)
        moves = [event for event in self.events() if isinstance(event.get(CURRENT), dict)]
        return _lineage(moves[-1][CURRENT]) if moves else []

    def current(self) -> Version | None:
        """What is to be served; null before `seed`.

        If that version is deleted or damaged: its nearest whole ancestor, told by a warning and an
        event, once a process. Raises ValueError if none of them is whole.
        """
        names = self._pointer()
        for name in names:
            if (version := self._whole(name)) is not None:
                if name != names[0]:
                    self._fall(names[0], name)
                return version
        if names:
            raise ValueError(
                f"{self.path}: {names[0]} and all before it are deleted or damaged: put one back,"
                " or start the server again, which begins with draft.path"
            )
        return None

    def _fall(self, name: str, to: str) -> None:
        if (name, to) not in self._falls:
            self._falls.add((name, to))
            reason = f"{name} is deleted or damaged"
            _log.warning("%s: %s: %s is served instead", self.path, reason, to)
            with contextlib.suppress(OSError):  # a full disk is no reason to serve nothing
                self._note("fell_back", name, reason=reason, to=to)

    def pointer(self) -> Hashable:
        """Differs whenever the pointer was written since. Costs a `stat`."""
        try:
            state = os.stat(self.path / CURRENT)
        except OSError:
            return None
        return (state.st_ino, state.st_mtime_ns, state.st_size)

    def events(self) -> list[dict[str, Any]]:
        """What happened, oldest first: `time`, `event`, `name`, `reason` and more.

        Events: published, rolled_back, fell_back, collected.
        """
        events = []
        with contextlib.suppress(FileNotFoundError):
            for line in self._events.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # torn by a full disk
                    event = json.loads(line)
                    events += [event] if isinstance(event, dict) else []
        return events

    # Changing

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Alone among all processes and threads, with leftovers of killed ones cleared away."""
        self._versions.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for path in self._versions.glob(".*"):  # nobody writes here while this one may
                if NAME.fullmatch(path.name[1:].partition(".")[0]):  # others' files are theirs
                    shutil.rmtree(path, ignore_errors=True)
            yield

    def _note(self, event: str, name: str, **more: Any) -> None:
        """Append an event, in one write: others may append meanwhile."""
        line = json.dumps({"time": time.time(), "event": event, "name": name} | more) + "\n"
        with self._events.open("a+b", buffering=0) as file:
            size = file.tell()
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            file.write((b"\n" if torn else b"") + line.encode())

    def _point(self, version: Version, event: str, **more: Any) -> None:
        """Move the pointer, and tell. A kill in between loses the event, never the version."""
        pointer = {"name": version.name, "ancestors": list(version.ancestors)}
        write_json(self.path / CURRENT, pointer)
        self._note(event, version.name, **more, **{CURRENT: pointer})

    def _write(
        self, write: Callable[[Path], None], parent: Version | None, metrics: dict[str, Any]
    ) -> Version:
        """A new version of what `write` makes, under a name that was never used."""
        names = [str(event.get("name")) for event in self.events()]  # folders may be gone
        names += [*self._names(), *self._pointer()]
        return write_version(
            self._versions / f"v{1 + max(map(_number, names), default=0):06d}",
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
                self._point(version, "published", reason="the starting drafter")
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
        through, and nothing has changed then; ValueError if it leaves no safetensors file, or
        `parent` is not there; NotInForce if `parent` is not the current version.
        """
        with self._changing():
            before = self.current()
            if parent is not None:
                before = self.version(parent)
                self._require_in_force(
                    parent, f"nothing is published: it was made of {parent}, and"
                )
            version = self._write(write, before, metrics)
            self._point(version, "published", reason="as the current version")
            return version

    def _require_in_force(self, name: str, refusal: str) -> None:
        current = self.current()
        if current is None or current.name != name:
            now = "nothing" if current is None else current.name
            raise NotInForce(f"{refusal} {now} is in force now")

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
            names = self._pointer()
            if not names:
                raise none_yet
            if current is not None:
                self._require_in_force(current, f"{current} is not taken back:")
            if to == names[0]:
                raise ValueError(f"{to} is the current version already")
            wanted = names[1:] if to is None else [to]
            version = next(filter(None, map(self._whole, wanted)), None)
            if version is None:
                whole = ", ".join(name for name in self._names() if self._whole(name) is not None)
                missing = "no version before it" if to is None else f"no whole version {to}"
                raise ValueError(f"{self.path}: there is {missing}; whole ones: {whole}")
            self._point(version, "rolled_back", reason=reason, since=names[0])
            return version

    def collect(self, keep: int) -> list[str]:
        """Delete old versions; the names of those that went.

        The last `keep` stay, the current one, and all its ancestors.
        """
        with self._changing():
            names = self._names()
            kept = set(self._pointer())
            kept.update(names[-keep:] if keep else ())
            gone = [name for name in names if name not in kept]
            for name in gone:
                self._note("collected", name, reason=f"not among the last {keep}, nor an ancestor")
                remove(self._versions / name)
            return gone


def _number(name: str) -> int:
    return int(name[1:]) if NAME.fullmatch(name) else 0


def _lineage(pointer: Any) -> list[str]:
    return [str(name) for name in (pointer["name"], *pointer["ancestors"])]
