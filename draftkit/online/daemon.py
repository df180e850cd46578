"""The refit loop of a service: look at the buffer, update where enough is new, wait, tell.

A version that serves worse than the one before it is taken back first.

It runs beside the server and knows nothing of it but what lies in the buffer: records, counts and
how many requests wait. While more wait than `PAUSE_QUEUE` no step is taken. Either process
may die at any moment: the server serves on, and the daemon goes on from its last update.

No error of a route ends the daemon: it is logged with its traceback, and the route is left alone
for a while.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event

from draftkit.config import OnlineConfig
from draftkit.online.buffer import Buffer
from draftkit.online.refit import Refit, Update
from draftkit.online.registry import NotInForce

FRESH_SECONDS = 10.0  # a server that has not told its load for so long is not there
HOLD_SECONDS = 0.2  # between two looks at a busy server
KEPT_VERSIONS = 5  # beside the ancestors of what is served
PAUSE_QUEUE = 8  # requests waiting at the server above which training pauses
LAST_SECONDS = 900.0  # for which the last update is brought again and again
PAUSE_POLLS = 30  # times `online.poll_seconds`, for which a route is left alone after an error

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The daemon was told to stop in the middle of an update, which is given up."""


@dataclass
class Daemon:
    """Refits the drafters of all routes in turns until `stop` is set.

    begin: called before an update, which may take minutes. bring: what is in force on a route to
    the engine that serves, at every turn; True: it is there.
    `clock` (seconds) and the waits of `stop` are all that it knows of time.
    """

    refits: Sequence[Refit]
    buffer: Buffer
    settings: OnlineConfig
    log: Callable[[Refit, Update], None]
    show: Callable[[], None]  # called after every turn, in which something may have changed
    stop: Event
    bring: Callable[[str], bool] = lambda route: True
    begin: Callable[[Refit], None] = lambda refit: None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.updates = 0
        self._paused: dict[str, float] = {}  # until when, of routes whose last turn failed

    def run(self) -> None:
        """Update until told to stop, or until `online.most_updates` are done."""
        while not self.stop.is_set() and not self._is_done():
            try:
                is_idle = True
                for refit in self.refits:
                    is_idle &= not self._turn(refit)
                    self.show()
                if is_idle:
                    self.stop.wait(self.settings.poll_seconds)
            except Stopped:
                return
        self._bring_last()

    def _is_done(self) -> bool:
        most = self.settings.most_updates
        return most is not None and self.updates >= most

    def _turn(self, refit: Refit) -> bool:
        """Update one route if it is due; whatever goes wrong is logged, and tried again later."""
        route = refit.route
        if self._is_done():
            return False
        if self.clock() < self._paused.get(route, -math.inf):
            self._bring(route)
            return False
        self._bring(route)  # first: an engine that was left paused gives a review no scores
        try:
            if (reason := refit.review()) is not None:
                logger.warning("route %s: the version in force is taken back: %s", route, reason)
                self._bring(route)
            if not refit.due():
                return False
            self.hold()
            self.begin(refit)
            update = refit.update(self.hold)
        except Stopped:
            raise
        except NotInForce as error:  # the next update starts from what is: nothing to wait for
            logger.warning("route %s: %s", route, error)
            return False
        except Exception:
            seconds = PAUSE_POLLS * self.settings.poll_seconds
            self._paused[route] = self.clock() + seconds
            logger.exception("route %s: no update, tried again in %.0f s", route, seconds)
            return False
        self.updates += 1
        self._bring(route)
        try:
            self.log(refit, update)
            refit.registry.collect(KEPT_VERSIONS)
        except Exception:
            logger.exception("route %s: an error after an update, which stands", route)
        return True

    def _bring(self, route: str) -> bool:
        try:
            return self.stop.is_set() or self.bring(route)
        except Exception:
            logger.exception("route %s: an error beside the updates, which go on", route)
            return False

    def _bring_last(self) -> None:
        """What no later turn would bring, to an engine that may be starting anew."""
        end, left = self.clock() + LAST_SECONDS, [refit.route for refit in self.refits]
        while left := [route for route in left if not self._bring(route)]:
            self.show()
            if self.clock() > end:
                logger.warning("what is in force did not reach the engine of %s", ", ".join(left))
                return
            self.stop.wait(self.settings.poll_seconds)
        self.show()

    def hold(self) -> None:
        """Wait while the server is busy. Raises `Stopped` when told to stop."""
        while not self.stop.is_set():
            if self.buffer.queued(within=FRESH_SECONDS) <= PAUSE_QUEUE:
                return
            self.stop.wait(HOLD_SECONDS)
        raise Stopped
