"""What an operator sees of a service: what it serves, what was decided, what it takes.

One file of HTML in the folder of the service, which its owner alone reads. It holds numbers, times
(UTC), names of versions and reasons; no text of a request, and no ids of one.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from draftkit.artifacts import atomic_path
from draftkit.evaluation.page import AFTER, MUTED, REPORT, Figure
from draftkit.evaluation.report import numeric
from draftkit.online.buffer import Buffer, total
from draftkit.online.push import PUSHED
from draftkit.online.refit import Refit
from draftkit.online.registry import PUBLISHED
from draftkit.templates import interval, render, signed

EVERY_SECONDS = 600.0  # after which the page is written anew, whatever has happened
SHOWN = 30  # rows of a table, and what a figure marks: the newest
POINTS = 60  # of a curve, at most, each of so many seconds:
WIDTHS = {60: "minute", 300: "5 minutes", 1800: "half hour", 10800: "3 hours", 86400: "day"}
APART = 0.05  # of a figure's width, between two names in it
STAMP = "%Y-%m-%d %H:%M"
_log = logging.getLogger(__name__)


@dataclass
class ServicePage:
    """The page of the service in `folder`, of the experiment `name`; a refit for each route."""

    name: str
    folder: Path
    refits: Sequence[Refit]
    buffer: Buffer
    clock: Callable[[], float] = time.time
    _shown: Any = field(default=None, init=False)

    def refresh(self) -> None:
        """Write it anew where there is an update, another version in force or at the engine, or a
        minute has passed.

        What goes wrong is logged: no update fails for it.
        """
        try:
            news = [
                (one.state["update"], one.registry.changes()[-1:], one.registry.served())
                for one in self.refits
            ]
            if self._shown == (shown := (news, self.clock() // EVERY_SECONDS)):
                return
            self._shown = shown
            text = self.text()
            with atomic_path(self.folder / REPORT) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(text, encoding="utf-8")
        except Exception:
            _log.exception("%s is not written", self.folder / REPORT)

    def text(self) -> str:
        """The page as HTML."""
        routes = [Route(one, self.buffer) for one in self.refits]
        published = sum(len(one.state["chosen"]) for one in self.refits)
        # One that a killed update, or a person, has published is no update of the state.
        refused = max(0, sum(one.state["update"] for one in self.refits) - published)
        changes = [change for route in routes for change in route.changes]
        back = [change for route in routes for change in route.taken_back]
        is_bad = bool(back) and max(changes, key=lambda change: change["time"]) in back
        verdict = f"{published} published, {refused} refused, {len(back)} taken back"
        return render(
            "service.html",
            name=self.name,
            verdict=verdict if published or refused or back else "No update yet",
            tone="bad" if is_bad else "good" if published else "open",
            written=f"{moment(self.clock()):{STAMP}}",
            routes=routes,
            versions=versions_table(routes),
            decisions=decisions_table(routes),
            records=records_table(self.buffer, routes),
            disk=disk_table(self.buffer, routes),
        )


class Route:
    """What the page says of one route."""

    def __init__(self, refit: Refit, buffer: Buffer) -> None:
        self.name, self.refit, self.registry = refit.route, refit, refit.registry
        self.changes = self.registry.changes()
        self.taken_back = [c for c in self.changes if c["before"] and c["reason"] != PUBLISHED]
        self.decisions = refit.state["decisions"]
        self.served = {one.version: one for one in buffer.served(self.name)}
        self.in_force = "a damaged version"
        with suppress(ValueError):
            version = self.registry.current()
            self.in_force = "no version" if version is None else version.name
        # An engine does not say by which version it drafts: what it serves is known by the time.
        since = self.changes[-1]["time"] if self.changes else 0.0
        newer = buffer.served_by_time(self.name, max(WIDTHS), since=since)
        self.now = self.served.get(self.in_force) or total([one for _, one in newer])
        for self.width in WIDTHS:
            self.points = buffer.served_by_time(self.name, self.width, most=POINTS + 1)
            if len(self.points) <= POINTS:
                break

    @property
    def figures(self) -> list[Figure]:
        """Acceptance and tokens a pass over time; none where nothing is known of them."""
        if not any(one.tested for _, one in self.points):
            return []
        return [self._curve("alpha", "alpha"), self._curve("acceptance_length", "tokens a pass")]

    def _curve(self, name: str, label: str) -> Figure:
        """The rate `name` of what was served, and when versions came into force."""
        first, last, half = self.points[0][0], self.points[-1][0] + self.width, self.width / 2
        rates = [(moment(at + half), getattr(one, name)) for at, one in self.points if one.tested]
        marks = [change for change in self.changes if first <= change["time"] <= last]

        def draw(axes: Any) -> None:
            from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

            axes.margins(y=0.3)  # room for the names
            axes.plot(*zip(*rates, strict=True), "o-", color=AFTER, markersize=3, linewidth=1)
            named, style = 2 * last, {"color": MUTED, "fontsize": 7, "rotation": 90, "va": "top"}
            for change in reversed(marks):
                at, line = change["time"], "-" if change in self.taken_back else ":"
                is_named = named - at >= APART * (last - first)
                if is_named or len(marks) <= SHOWN:
                    axes.axvline(moment(at), color=MUTED, linewidth=0.8, linestyle=line)
                if is_named:
                    named, up = at, axes.get_xaxis_transform()
                    axes.text(moment(at), 1, change["name"], transform=up, ha="right", **style)
            locator = AutoDateLocator(minticks=2, maxticks=6)
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
            axes.set(xlabel="UTC", ylabel=label)

        words = f"Route {self.name}: {label} as served, a point for each {WIDTHS[self.width]}. "
        words += "Dotted: this version was published; whole line: gone back to."
        return Figure(draw, words + " Not all are marked." * (len(marks) > SHOWN))

    @property
    def gate(self) -> Figure:
        """The gains at the newest gates."""

        def draw(axes: Any) -> None:
            for one in self.decisions[-SHOWN:]:
                mean, style = one["gain"]["mean"], {"fmt": "x", "color": MUTED, "capsize": 3}
                low, high = one["gain"]["ci95"] or (mean, mean)
                style |= {"fmt": "o", "color": AFTER} if one["version"] else {}
                axes.errorbar(one["update"], mean, [[mean - low], [high - mean]], **style)
            axes.axhline(0, color=MUTED, linewidth=1, linestyle=":")
            axes.set(xlabel="update", ylabel=f"{self.refit.judge.measure} gained")
            axes.xaxis.get_major_locator().set_params(integer=True)

        words = f"Route {self.name}: what updates gained on held-out traffic over the version in "
        words += "force, with 95 % intervals. Round: published; crosses: refused."
        return Figure(draw, words)


def moment(seconds: float) -> datetime:
    """Of a time since 1970."""
    return datetime.fromtimestamp(seconds, UTC)


def versions_table(routes: Sequence[Route]) -> Table:
    """What the newest versions of each route served, and what was measured of them."""
    numbers = ["answers", "proposed a pass", "tokens a pass", "alpha served"]
    numbers += "gain at the gate", "on later traffic"
    table = Table("route", "version", *map(numeric, numbers), "in force since")
    table.title = f"the newest {SHOWN} versions of a route; *: in force"
    table.caption = (
        "Tokens a pass: 1 + accepted / rounds. They can fall while alpha rises: a server proposes "
        "less where that is faster. Alpha served: over all positions tested. A gain at "
        "the gate is too high on average, as it chose the version; so alpha (of heads and in one "
        "pass: tokens a pass) is measured again on held-out traffic that came later."
    )
    for route in routes:
        since = {change["name"]: change["time"] for change in route.changes}
        for name in sorted({*route.registry.names(), *route.served}, reverse=True)[:SHOWN]:
            one, gain, later = route.served.get(name), None, route.refit.state["alphas"]
            with suppress(ValueError, OSError):  # deleted, damaged, or an engine
                gain = route.registry.version(name).metrics.get("gain")
            length, alpha = (one.acceptance_length, one.alpha) if one else (None, None)
            table.add_row(
                route.name,
                name + " *" * (name == route.in_force),
                f"{one.requests:,}" if one else "-",
                f"{one.drafted / one.rounds:.2f}" if one and one.rounds else "-",
                "-" if length is None else f"{length:.2f}",
                "-" if alpha is None else f"{alpha:.3f}",
                signed(gain) if gain else "-",
                interval(later[name]) if name in later else "-",
                f"{moment(since[name]):{STAMP}}" if name in since else "-",
            )
    return table


def decisions_table(routes: Sequence[Route]) -> Table:
    """The newest decisions of the gate, and versions that were taken back."""
    rows = []
    for route in routes:
        for one in route.decisions:
            outcome = f"published {one['version']}" if one["version"] else "refused"
            cells = outcome, signed(one["gain"]), str(one["update"]), one["reason"]
            rows.append((one["time"], route.name, *cells))
        for one in route.taken_back:
            outcome = f"{one['before']} taken back to {one['name']}"
            rows.append((one["time"], route.name, outcome, "-", "-", one["reason"]))
    why = Column("why", max_width=60)
    table = Table("when", "route", "outcome", numeric("gain"), numeric("update"), why)
    table.title = f"the newest {SHOWN}"
    for seconds, *cells in sorted(rows, reverse=True)[:SHOWN]:
        table.add_row(f"{moment(seconds):{STAMP}}", *cells)
    return table


def records_table(buffer: Buffer, routes: Sequence[Route]) -> Table:
    """Records by day and route, the newest days first."""
    rows, limits = buffer.days(), buffer.settings
    names = [*dict.fromkeys([*(route.name for route in routes), *(row[1] for row in rows)])]
    table = Table("day", *map(numeric, names), numeric("MB"))
    records, size = sum(row[2] for row in rows), sum(row[3] for row in rows)
    table.title = f"{records:,} records, {size / 1e6:,.1f} of at most {limits.max_megabytes:g} MB"
    table.caption = (
        f"Kept for at most {limits.retention_days:g} days; the newest {SHOWN} are shown."
    )
    days = [(day, [*group]) for day, group in groupby(rows, key=lambda row: row[0])]
    for day, of_day in days[: -SHOWN - 1 : -1]:
        counts = {route: count for _, route, count, _ in of_day}
        cells = (f"{counts.get(name, 0):,}" for name in names)
        table.add_row(f"{moment(day):%Y-%m-%d}", *cells, f"{sum(r[3] for r in of_day) / 1e6:,.2f}")
    return table


def disk_table(buffer: Buffer, routes: Sequence[Route]) -> Table:
    """What the service takes, and what is left."""
    sizes = {"traffic": size_of(buffer.path.parent.glob(f"{buffer.path.name}*"))}
    for route in routes:
        versions = f"versions of {route.name}: {len(route.registry.names())}"
        sizes[versions] = size_of(route.registry.path.rglob("*"))
        pushed = buffer.path.parent / PUSHED / route.name
        if pushed.is_dir():
            sizes[f"for the engine of {route.name}"] = size_of(pushed.rglob("*"))
        sizes[f"trainer of {route.name}"] = size_of(route.refit.folder.rglob("*"))
    sizes["all of these"] = sum(sizes.values())
    sizes["free on this disk"] = shutil.disk_usage(buffer.path.parent).free
    table = Table("what", numeric("MB"))
    for what, size in sizes.items():
        table.add_row(what, f"{size / 1e6:,.1f}")
    return table


def size_of(files: Iterable[Path]) -> int:
    """The bytes of those that are still there."""
    size = 0
    for file in files:
        with suppress(OSError):
            size += file.lstat().st_size
    return size
