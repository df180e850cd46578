"""From the engine's thread to the event loop: the pieces of one request's answers.

The engine calls a listener and must never wait, so pieces land in a list and the loop is woken.
What gathers while a reader waits for its client is bounded: past the bound the jobs are cancelled.
What gathers while the loop has other things to do is no fault of the reader. This module knows
the engine's interface and nothing of HTTP but that a client may leave.
"""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from draftkit.serving.engine import Engine
from draftkit.serving.jobs import Job, Piece

BACKLOG = 25_000  # token scores and alternatives of a job, some 100 bytes each, that may wait
TURNS = 3  # of the loop, in which a reader goes on whose client has made room
T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class TooSlow(Exception):
    """The client fell behind by more than BACKLOG; its jobs are cancelled."""


class Arrival(NamedTuple):
    """A piece, the number of its job within the request, and when it came (time.monotonic())."""

    index: int
    piece: Piece
    at: float


class Answers:
    """The answers to the jobs of one request as they arrive. Belongs to the running loop."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        """Submit the jobs; raises what `engine.submit` raises."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Arrival] = []
        self._backlog = 0
        self._room = BACKLOG * len(jobs)
        self._sends = 0
        self._is_sending = self._is_judged = self._too_slow = False
        self._arrived = asyncio.Event()
        self._open = len(jobs)
        self._ids: list[int] = []
        self._ids = engine.submit(
            jobs, [functools.partial(self._listen, index) for index in range(len(jobs))]
        )

    def _listen(self, index: int, piece: Piece) -> None:
        """On the engine's thread. A loop that has closed has nobody left to tell."""
        arrival = Arrival(index, piece, time.monotonic())
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, arrival)

    def _take(self, arrival: Arrival) -> None:
        if self._too_slow:
            return
        self._waiting.append(arrival)
        self._backlog += sum(1 + len(score.top) for score in arrival.piece.scores)
        if self._backlog > self._room and self._is_sending and not self._is_judged:
            self._is_judged = True
            self._loop.call_soon(self._judge, self._sends, TURNS)
        self._arrived.set()

    def _judge(self, send: int, turns: int) -> None:
        """Give the reader up if it waits for the same `send` after so many turns of the loop."""
        if send != self._sends or not self._is_sending:
            self._is_judged = False
        elif turns > 1:
            self._loop.call_soon(self._judge, send, turns - 1)
        else:
            self._too_slow = True
            self._waiting.clear()
            self.cancel()
            self._arrived.set()

    async def send(self, sending: Awaitable[None]) -> None:
        """Wait for the client to take something: the only time in which a reader is slow."""
        self._sends += 1
        self._is_sending = True
        try:
            await sending
        finally:
            self._is_sending = False

    def cancel(self) -> None:
        """Free the rows of the jobs that have not ended."""
        if self._open:
            self._engine.cancel(self._ids)

    async def arrivals(self) -> AsyncIterator[list[Arrival]]:
        """All that has arrived since the last time, until every job has ended.

        Raises TooSlow where the reader fell behind.
        """
        while self._open:
            await self._arrived.wait()
            self._arrived.clear()
            if self._too_slow:
                raise TooSlow
            found, self._waiting, self._backlog = self._waiting, [], 0
            self._open -= sum(arrival.piece.finish_reason is not None for arrival in found)
            if found:
                yield found


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, stopped with ClientLeft as soon as the client disconnects.

    The body must have been received before.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watch, task = asyncio.ensure_future(gone()), asyncio.ensure_future(work)
    try:
        await asyncio.wait((watch, task), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for each in (watch, task):
            each.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)
