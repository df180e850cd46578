"""Versioned drafters of one route: whole folders, and two pointers to what is served.

    <folder>/<route>/versions/v000001/    a plain drafter folder with its `version.json`
    <folder>/<route>/current, candidate   JSON, replaced atomically
    <folder>/<route>/events.jsonl, lock

It knows folders, checksums and names; not what a drafter computes, who trains it or who serves it.
Changes take a lock between processes, readers take none. A process killed at any moment leaves
the pointers on whole versions; what else it leaves, the next change clears away. A version that is
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

from torch import Tensor

from draftkit.artifacts import read_json, remove, write_json
from draftkit.config.service import DEFAULT_ROUTE, ROUTE
from draftkit.online.fingerprints import require_same
from draftkit.online.versions import (
    NAME,
    Version,
    is_whole,
    numbered,
    read_version,
    read_weights,
    state_of,
    write_version,
)

CURRENT, CANDIDATE = "current", "candidate"
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
        self._told: set[tuple[str, str | None]] = set()  # what was fallen back from, and to

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
        found = []
        for name in self._names():
            with contextlib.suppress(ValueError):
                found.append(self.version(name))
        return found

    def read(self, version: Version) -> dict[str, Tensor]:
        """Its weights. Raises ValueError, one line, if any file differs from its checksum."""
        return read_weights(version)

    def _whole(self, name: str) -> Version | None:
        """The version `name` if every file is as published: checked once, while unchanged."""
        try:
            version = self.version(name)
        except ValueError:
            return None
        state = state_of(version)
        known = self._checked.get(name)
        if known is None or known[0] != state:
            known = (state, state is not None and is_whole(version))
            self._checked[name] = known
        return version if known[1] else None

    def _pointer(self, kind: str) -> dict[str, Any] | None:
        """`name` and `ancestors` of what a pointer names; None if it names nothing.

        For a lost pointer to the current version the events tell where it was.
        """
        try:
            told = read_json(self.path / kind)
            return {"name": str(told["name"]), "ancestors": [str(n) for n in told["ancestors"]]}
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("%s is damaged: %s", self.path / kind, error)
        if kind == CURRENT:
            for event in reversed(self.events()):
                if isinstance(event.get(CURRENT), dict):
                    return event[CURRENT]
        return None

    def current(self) -> Version | None:
        """What is to be served; null before `seed`.

        If that version is deleted or damaged: its nearest whole ancestor, told by a warning and an
        event, once a process. Raises ValueError if none of them is whole.
        """
        told = self._pointer(CURRENT)
        if told is None:
            return None
        for name in (told["name"], *told["ancestors"]):
            version = self._whole(name)
            if version is not None:
                if name != told["name"]:
                    self._tell_fall(told["name"], name)
                return version
        raise ValueError(
            f"{self.path}: {told['name']} and all before it are deleted or damaged: put one back,"
            " or start the server again, which begins with draft.path"
        )

    def candidate(self) -> Version | None:
        """What is to be served to a few; null if nothing, or if it is deleted or damaged."""
        told, current = self._pointer(CANDIDATE), self._pointer(CURRENT)
        if told is None or (current is not None and told["name"] == current["name"]):
            return None  # a kill fell between the two writes of `promote`
        version = self._whole(told["name"])
        if version is None:
            self._tell_fall(told["name"], None)
        return version

    def _tell_fall(self, name: str, to: str | None) -> None:
        if (name, to) not in self._told:
            self._told.add((name, to))
            reason = f"{name} is deleted or damaged"
            served = "no candidate" if to is None else to
            _log.warning("%s: %s: %s is served instead", self.path, reason, served)
            with contextlib.suppress(OSError):  # a full disk is no reason to serve nothing
                self._note("fell_back", name, reason=reason, to=to)

    def pointers(self) -> Hashable:
        """Differs whenever a pointer was written since. Costs two `stat`."""
        found: list[tuple[int, int, int] | None] = []
        for kind in (CURRENT, CANDIDATE):
            try:
                state = os.stat(self.path / kind)
            except OSError:
                found.append(None)
            else:
                found.append((state.st_ino, state.st_mtime_ns, state.st_size))
        return tuple(found)

    def events(self) -> list[dict[str, Any]]:
        """What happened, oldest first: `time`, `event`, `name`, `reason` and more.

        Events: published, promoted, withdrawn, rolled_back, fell_back, collected.
        """
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in self._events.read_bytes().splitlines():
                with contextlib.suppress(ValueError):  # torn by a full disk
                    event = json.loads(line)
                    found += [event] if isinstance(event, dict) else []
        return found

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
        descriptor = os.open(self._events, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, (b"\n" if torn else b"") + line.encode())
        finally:
            os.close(descriptor)

    def _point(self, kind: str, version: Version, event: str, **more: Any) -> None:
        """Move a pointer, and tell. A kill in between loses the event, never the version."""
        told = {"name": version.name, "ancestors": list(version.ancestors)}
        write_json(self.path / kind, told)
        if kind == CURRENT:
            remove(self.path / CANDIDATE)
        self._note(event, version.name, **({CURRENT: told} if kind == CURRENT else {}), **more)

    def _next(self) -> str:
        """A name that was never used, though its folder may be gone."""
        names = [*self._names(), *(str(event.get("name")) for event in self.events())]
        for told in (self._pointer(CURRENT), self._pointer(CANDIDATE)):
            names += [told["name"], *told["ancestors"]] if told is not None else []
        return numbered(1 + max((_number(name) for name in names), default=0))

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
                version = write_version(
                    self._versions / self._next(),
                    write,
                    ancestors=(),
                    metrics={},
                    fingerprints=self._fingerprints,
                )
                self._point(CURRENT, version, "published", reason="the starting drafter")
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
        canary: bool,
    ) -> Version:
        """Make a version of what `write` puts into the (empty) folder it is given.

        It becomes the candidate with `canary`, else the current one; a candidate before it is one
        no more. `parent` null: the current one. Whatever `write` raises passes through, and
        nothing has changed then; ValueError if it leaves no safetensors file, or `parent` is not
        there; NotInForce if `parent` is neither the current version nor the candidate.
        """
        with self._changing():
            before = self.current() if parent is None else self._in_force(parent)
            ancestors = () if before is None else (before.name, *before.ancestors)
            version = write_version(
                self._versions / self._next(),
                write,
                ancestors=ancestors,
                metrics=metrics,
                fingerprints=self._fingerprints,
            )
            kind = CANDIDATE if canary else CURRENT
            self._point(kind, version, "published", reason=f"as the {kind} version")
            return version

    def _in_force(self, name: str) -> Version:
        """The version `name`, which is the current one or the candidate."""
        version = self.version(name)
        in_force = [one.name for one in (self.current(), self.candidate()) if one is not None]
        if name not in in_force:
            chosen = " and ".join(in_force) or "nothing"
            raise NotInForce(
                f"nothing is published: it was made of {name}, and {chosen} is in force now"
            )
        return version

    def _candidate(self, name: str) -> None:
        told = self._pointer(CANDIDATE)
        if told is None or told["name"] != name:
            found = "there is none" if told is None else f"that is {told['name']}"
            raise ValueError(f"{name} is not the candidate of route {self.route}: {found}")

    def promote(self, name: str) -> Version:
        """Make the candidate `name` the current version.

        Raises ValueError if it is not the candidate, or not whole.
        """
        with self._changing():
            self._candidate(name)
            version = self._whole(name)
            if version is None:
                raise ValueError(f"{name} is deleted or damaged: withdraw it")
            self._point(CURRENT, version, "promoted", reason="the candidate proved itself")
            return version

    def withdraw(self, name: str, *, reason: str) -> None:
        """Take the candidate back; its folder stays. ValueError if it is not the candidate."""
        with self._changing():
            self._candidate(name)
            remove(self.path / CANDIDATE)
            self._note("withdrawn", name, reason=reason)

    def rollback(self, to: str | None = None, *, reason: str) -> Version:
        """Make another version current: `to`, or the nearest whole ancestor of the current one.

        A candidate is withdrawn with it. Raises ValueError if there is no such whole version.
        """
        with self._changing():
            told = self._pointer(CURRENT)
            if told is None:
                raise ValueError(f"{self.path} has no version yet: start the server first")
            if to == told["name"]:
                raise ValueError(f"{to} is the current version already")
            names = told["ancestors"] if to is None else [to]
            found = (version for name in names if (version := self._whole(name)) is not None)
            version = next(found, None)
            if version is None:
                whole = [name for name in self._names() if self._whole(name) is not None]
                wanted = "no version before it" if to is None else f"no whole version {to}"
                raise ValueError(f"{self.path}: there is {wanted}; whole ones: {', '.join(whole)}")
            self._point(CURRENT, version, "rolled_back", reason=reason, since=told["name"])
            return version

    def collect(self, keep: int) -> list[str]:
        """Delete old versions; the names of those that went.

        The last `keep` stay, the current one, the candidate, and all their ancestors.
        """
        with self._changing():
            names = self._names()
            kept = set(names[-keep:] if keep else [])
            for told in (self._pointer(CURRENT), self._pointer(CANDIDATE)):
                kept |= {told["name"], *told["ancestors"]} if told is not None else set()
            gone = [name for name in names if name not in kept]
            for name in gone:
                self._note("collected", name, reason=f"not among the last {keep}, nor an ancestor")
                remove(self._versions / name)
            return gone


def _number(name: str) -> int:
    return int(name[1:]) if NAME.fullmatch(name) else 0
