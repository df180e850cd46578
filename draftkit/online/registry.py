"""Versioned drafters of one route: whole folders, and two pointers to what is served.

It knows folders, checksums and names; not what a drafter computes, who trains it or who serves it.
Changes take a lock between processes; readers take none.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Version:
    """One published drafter: a plain `save_pretrained` folder that never changes."""

    name: str  # v000001; names rise and are not used twice
    path: Path
    parent: str | None  # the version it was trained from; null for the starting drafter
    ancestors: tuple[str, ...]  # the parent, its parent, and so on
    sha256: dict[str, str]  # of every file, by its relative name
    metrics: dict[str, Any]
    window: dict[str, Any]  # the data it was trained on: ids, times, records
    created: float  # unix time


class Registry:
    """The versions of one route, below `<folder>/<route>/`."""

    def __init__(self, folder: str | Path, route: str = "default") -> None:
        """Look at the registry in `folder`; nothing is written. ValueError for a bad route name."""
        raise NotImplementedError

    def seed(self, write: Callable[[Path], None]) -> Version:
        """The current version; where there is none, what `write` puts into a folder becomes it."""
        raise NotImplementedError

    def publish(
        self,
        write: Callable[[Path], None],
        *,
        metrics: dict[str, Any],
        window: dict[str, Any],
        parent: str | None = None,
        canary: bool,
    ) -> Version:
        """Make a version of what `write` puts into the (empty) folder it is given.

        It becomes the candidate with `canary`, else the current one. `parent` null: the current
        one. Whatever `write` raises passes through, and nothing has changed then; ValueError if
        it leaves no safetensors file.
        """
        raise NotImplementedError

    def current(self) -> Version | None:
        """What is to be served; null before `seed`.

        If that version is deleted or damaged: its nearest whole ancestor, told by a warning and an
        event, once a process.
        """
        raise NotImplementedError

    def candidate(self) -> Version | None:
        """What is to be served to a few; null if nothing, or if it is deleted or damaged."""
        raise NotImplementedError

    def versions(self) -> list[Version]:
        """All that are there, by name; contents are not checked."""
        raise NotImplementedError

    def version(self, name: str) -> Version:
        """One of them. Raises ValueError, one line, if it is not there or cannot be read."""
        raise NotImplementedError

    def read(self, version: Version) -> dict[str, Tensor]:
        """Its weights. Raises ValueError, one line, if any file differs from its checksum."""
        raise NotImplementedError

    def promote(self, name: str) -> Version:
        """Make the candidate `name` the current version. ValueError if it is not the candidate."""
        raise NotImplementedError

    def withdraw(self, name: str, *, reason: str) -> None:
        """Take the candidate back; its folder stays. ValueError if it is not the candidate."""
        raise NotImplementedError

    def rollback(self, to: str | None = None, *, reason: str) -> Version:
        """Make another version current: `to`, or the nearest whole ancestor of the current one.

        A candidate is withdrawn with it. Raises ValueError if there is no such whole version.
        """
        raise NotImplementedError

    def pointers(self) -> Hashable:
        """Differs whenever a pointer was written since. Costs two `stat`."""
        raise NotImplementedError

    def collect(self, keep: int) -> list[str]:
        """Delete old versions; the names of those that went.

        The last `keep` stay, the current one, the candidate, and all their ancestors.
        """
        raise NotImplementedError

    def events(self) -> list[dict[str, Any]]:
        """What happened, oldest first: `time`, `event`, `name`, `reason` and more.

        Events: published, promoted, withdrawn, rolled_back, fell_back, collected.
        """
        raise NotImplementedError
