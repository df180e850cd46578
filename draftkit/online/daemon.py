"""The refit loop of a service: look at the buffer, update where enough is new, wait, tell.

It runs beside the server and knows nothing of it but what lies in the buffer: records, counts and
how many requests wait. While more wait than `online.pause_queue` no step is taken. Either process
may die at any moment: the server serves on, and the daemon goes on from its last update.

Updates become rarer while the gate refuses them, and while the versions in service have saved less
time than all updates have cost.
"""

import logging
from collections.abc import Callable, Sequence
from threading import Event

from draftkit.config import OnlineConfig
from draftkit.online.buffer import Buffer
from draftkit.online.refit import Refit, Update

FRESH_SECONDS = 10.0  # a server that has not told its load for so long is not there
HOLD_SECONDS = 0.2  # between two looks at a busy server

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The daemon was told to stop in the middle of an update, which is given up."""


class Daemon:
    """Refits the drafters of all routes in turns until `stop` is set."""

    def __init__(
        self,
        refits: Sequence[Refit],
        *,
        buffer: Buffer,
        settings: OnlineConfig,
        log: Callable[[Refit, Update], None],
        stop: Event,
    ) -> None:
        self.updates = 0
        self._refits = list(refits)
        self._buffer = buffer
        self._settings = settings
        self._log = log
        self._stop = stop

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
        """Update one route if it is due; whatever goes wrong is told, and tried again later."""
        try:
            if self._is_done() or not refit.due():
                return False
            self.hold()
            update = refit.update(self.hold)
        except (ValueError, OSError) as error:
            logger.warning("route %s: no update: %s", refit.route, error)
            return False
        self.updates += 1
        if update.version is not None and not self._pays():
            refit.back_off()
        self._log(refit, update)
        refit.registry.collect(self._settings.keep)
        self._buffer.maintain()
        return True

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
