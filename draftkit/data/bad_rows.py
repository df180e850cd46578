"""Rows that cannot be used: they are left out and counted, and the first of each kind is shown.

This module does not know what makes a row unusable.
"""

import re

KINDS = 5  # of reasons that have a line of their own; all later ones share one
VARIES = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")  # between reasons of one kind


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason, without file and line."""


def reason_of(error: Exception) -> str:
    """Why a row cannot be used, in one line."""
    if isinstance(error, RecursionError):
        return "nested too deep to be read"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error.reason})"
    if isinstance(error, UnicodeEncodeError):
        return f"holds half a character ({error.reason})"
    return " ".join(str(error).split())[:400]


class BadRows:
    """Counts rows that cannot be used. most: the share of all rows up to which they may be."""

    def __init__(self, most: float) -> None:
        self.count = 0
        self._most = most
        self._kinds: dict[str, tuple[str, int]] = {}  # the first of each kind, and how many

    def add(self, origin: str, reason: str) -> None:
        """Count the row that stands at `origin`."""
        kind = VARIES.sub("", reason)
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            kind = ""
        first, alike = self._kinds.get(kind, (f"{origin}: {reason}", 0))
        self._kinds[kind] = first, alike + 1
        self.count += 1

    @property
    def lines(self) -> list[str]:
        """The first row of each kind, and how many are like it."""
        return [
            first + (f" ({alike - 1:,} more like it)" if alike > 1 else "")
            for first, alike in self._kinds.values()
        ]

    def check(self, rows: int) -> None:
        """Raise ValueError if of `rows` that were read none is left, or too many are bad."""
        if not self.count or (self.count < rows and self.count / rows <= self._most):
            return
        verdict = f"none of the first {rows:,} rows can be used"
        if self.count < rows:
            verdict = (
                f"{self.count:,} of {rows:,} rows cannot be used, more than "
                f"data.max_bad_rows={self._most:g}: mend them, or raise it"
            )
        shown = "; ".join(self.lines[:2])
        raise ValueError(shown if rows == 1 else f"{shown}; so {verdict}")
