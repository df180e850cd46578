"""The refit loop of a service: look at the buffer, update where enough is new, wait, tell.

It runs beside the server and knows nothing of it but what lies in the buffer: records, counts and
how many requests wait. While more wait than `online.pause_queue` no step is taken. Either process
may die at any moment: the server serves on, and the daemon goes on from its last update.

Updates become rarer while the gate refuses them, and while the versions in service have saved less
time than all updates have cost. No error of a route ends the daemon: it is logged with its
traceback, and the route is left alone for a while that doubles with every error in a row.
"""

import logging
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
MOST_PAUSE_SECONDS = 300.0  # after errors, unless `online.poll_seconds` is longer

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The daemon was told to stop in the middle of an update, which is given up."""


@dataclass(frozen=True)
class _Pause:
    """How long a route is left alone after an error, and until when by the clock."""

    seconds: float
    until: float


class Daemon:
    """Refits the drafters of all routes in turns until `stop` is set.

    `clock` (seconds) and the waits of `stop` are all that it knows of time.
    """

    def __init__(
        self,
        refits: Sequence[Refit],
        *,
        buffer: Buffer,
        settings: OnlineConfig,
        log: Callable[[Refit, Update], None],
        stop: Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.updates = 0
        self._refits = list(refits)
        self._buffer = buffer
        self._settings = settings
        self._log = log
        self._stop = stop
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}  # by route, of those whose last turn failed

    def run(self) -> None:
        """Update until told to stop, or until `online.most_updates` are done."""
        while not self._stop.is_set() and not self._is_done():
            try:
                if not any([self._turn(refit) for refit in self._refits]):
                    self._stop.wait(self._settings.poll_seconds)
            except Stopped:
                return

    def _is_done(self) -> bool:
        most = self._settings.most_updates
        return most is not None and self.updates >= most

    def _turn(self, refit: Refit) -> bool:
        """Update one route if it is due; whatever goes wrong is logged, and tried again later."""
        pause = self._pauses.get(refit.route)
        if self._is_done() or (pause is not None and self._clock() < pause.until):
            return False
        try:
            if not refit.due():
                update = None
            else:
                self.hold()
                update = refit.update(self.hold)
        except Stopped:
            raise
        except NotInForce as error:  # the next update starts from what is: nothing to wait for
            logger.warning("route %s: %s", refit.route, error)
            update = None
        except Exception:
            self._pause(refit.route)
            return False
        self._pauses.pop(refit.route, None)
        if update is not None:
            self._finish(refit, update)
        return update is not None

    def _pause(self, route: str) -> None:
        """Log the error at hand, and leave `route` alone: twice as long as the last time."""
        shortest = self._settings.poll_seconds
        before = self._pauses.get(route)
        seconds = shortest if before is None else 2 * before.seconds
        seconds = min(seconds, max(shortest, MOST_PAUSE_SECONDS))
        self._pauses[route] = _Pause(seconds, self._clock() + seconds)
        logger.exception("route %s: no update, tried again in %.0f s", route, seconds)

    def _finish(self, refit: Refit, update: Update) -> None:
        """What follows an update, which stands whatever becomes of that."""
        self.updates += 1

        def weigh() -> None:
            if update.version is not None and not self._pays():
                refit.back_off()

        for step in (
            weigh,
            lambda: self._log(refit, update),
            lambda: refit.registry.collect(self._settings.keep),
            self._buffer.maintain,
        ):
            try:
                step()
            except Exception:
                logger.exception("route %s: an error after an update, which stands", refit.route)

    def _pays(self) -> bool:
        """Whether what was published has saved what updates cost; true before it has served."""
        saved = sum(refit.seconds_saved() for refit in self._refits)
        return saved == 0 or saved >= sum(refit.state["seconds"] for refit in self._refits)

    def hold(self) -> None:
        """Wait while the server is busy. Raises `Stopped` when told to stop."""
        while not self._stop.is_set():
            load = self._buffer.load()
            is_there = load is not None and load.age_seconds <= FRESH_SECONDS
            if load is None or not is_there or load.queued <= self._settings.pause_queue:
                return
            self._stop.wait(HOLD_SECONDS)
        raise Stopped
