"""From finished answers to the traffic buffer, on a thread of its own: serving never waits.

Answers wait in a queue of bounded number and size, become records and are written together; where
it is full or the disk refuses, records are dropped and counted. Of requests whose owner opted out
only counts are written, which hold no text. Whatever is recorded, what is in the buffer does not
outlive its time: the same thread looks after it. Knows no models and no HTTP.
"""

import logging
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from draftkit.config import BufferConfig
from draftkit.data.rollouts import SCHEMA, Record
from draftkit.data.store import pack
from draftkit.online.buffer import COUNTS, Buffer, Served
from draftkit.online.sink import Sink
from draftkit.serving.answers import Answer, Counters, DrafterKey

QUEUE = 1024  # answers that wait to be written; more are dropped
QUEUE_NUMBERS = 1 << 22  # ids and scores that they hold together, of some 40 bytes each
BATCH = 64  # records of a transaction, at most
GATHER_SECONDS = 0.25  # for which a batch is gathered, as each costs a flush to the disk
TELL_SECONDS = 1.0  # between two tellings of counts
UPKEEP_SECONDS = 600.0  # between two upkeeps of the buffer
CLOSE_SECONDS = 10.0  # for what is still in the queue at the end
log = logging.getLogger(__name__)


Make = Callable[[], Sequence[Record]]


class Recorder:
    """Writes what `take` is given, and a `settings.fraction` of what is `offer`ed; see the module's
    docstring."""

    def __init__(self, store: Buffer, settings: BufferConfig, sink: Sink | None = None) -> None:
        self.top_k = settings.top_k
        self._refused = self._lost = 0  # by whoever offers, and by the thread that writes
        self._came = self._gone = 0  # numbers that answers hold, by the same two
        self._store, self._sink = store, sink
        self._fraction = settings.fraction
        self._queue: queue.SimpleQueue[tuple[str, Make, int]] = queue.SimpleQueue()
        self._written: dict[DrafterKey, Served] = {}
        self._failing = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Records that should have been written."""
        return self._refused + self._lost + (self._sink.dropped if self._sink else 0)

    def offer(self, answer: Answer) -> None:
        """Take a finished answer, if its owner lets it and the fraction wants it; never waits."""
        is_wanted = answer.job.records and random.random() < self._fraction
        if is_wanted and answer.completion.output_ids:
            scores = self.top_k > 0
            size = len(answer.job.prompt_ids) + len(answer.completion.output_ids)
            size += 2 * sum(map(len, answer.completion.topk_ids))
            self.take(answer.job.route, lambda: [record_of(answer, with_scores=scores)], size)

    def take(self, route: str, make: Make, size: int) -> bool:
        """Take records of `route`, which `make` makes on the thread that writes; never waits.

        size: the numbers that are held until then. False where there is no room for them.
        """
        if self._queue.qsize() >= QUEUE or self._came - self._gone + size > QUEUE_NUMBERS:
            self._refused += 1
            return False
        self._came += size
        self._queue.put((route, make, size))
        return True

    def start(self, counters: Callable[[], Counters]) -> None:
        """Write from now on, also what `counters` says, and delete what is too old."""
        self._counters = counters
        pack([], SCHEMA)  # of Arrow the first takes most of a second, and all threads wait for it
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Write what is left, within `CLOSE_SECONDS`, and end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._sink is not None:
            self._sink.close()

    def _run(self) -> None:
        counted = maintained = -math.inf
        while not self._stopping.is_set():
            if self._queue.qsize() < BATCH:
                self._stopping.wait(GATHER_SECONDS)
            self._write_batch()
            if time.monotonic() >= counted + TELL_SECONDS:
                counted = time.monotonic()
                self._write_counts()
            if time.monotonic() >= maintained + UPKEEP_SECONDS:
                maintained = time.monotonic()
                self._try(self._store.maintain)
        deadline = time.monotonic() + CLOSE_SECONDS
        while not self._queue.empty() and time.monotonic() < deadline:
            self._write_batch()
        self._lost += self._queue.qsize()
        self._write_counts()

    def _write_batch(self) -> None:
        """Write the next answers of the queue, if there are any."""
        batch = [self._queue.get_nowait() for _ in range(min(BATCH, self._queue.qsize()))]

        entries = list[tuple[str, Record]]()

        def append() -> None:
            entries.extend((route, record) for route, make, _ in batch for record in make())
            self._store.append(entries)

        if batch and not self._try(append):
            self._lost += len(entries) or len(batch)
        self._gone += sum(size for _, _, size in batch)
        if self._sink is not None:
            self._sink.offer(entries)

    def _write_counts(self) -> None:
        """Store how busy the server is, and what has been counted since the last time."""
        counters, rows = self._counters(), list[Served]()
        for (route, version), now in counters.drafters.items():
            before = self._written.get((route, version)) or Served(route=route, version=version)
            if now != before:
                came = {name: getattr(now, name) - getattr(before, name) for name in COUNTS[2:]}
                rows.append(replace(now, **came))
        if rows and self._try(lambda: self._store.add_served(rows)):
            self._written = counters.drafters
        self._try(lambda: self._store.set_queued(counters.queued))

    def _try(self, write: Callable[[], None]) -> bool:
        """Whether `write` could; told once until it can again."""
        try:
            write()
        except Exception as error:  # serving goes on, whatever the disk says
            if not self._failing:
                log.error("the traffic buffer cannot be written, records are lost: %s", error)
            self._failing = True
            return False
        if self._failing:
            log.warning("the traffic buffer can be written again")
        self._failing = False
        return True


def record_of(answer: Answer, *, with_scores: bool) -> Record:
    """What the buffer keeps of a finished answer, with the target's likeliest ids if asked."""
    job = answer.job
    return Record(
        prompt_ids=list(job.prompt_ids),
        sampler="speculative",
        sampler_version=answer.version,
        sampling={name: float(value) for name, value in asdict(job.sampling).items()},
        seed=answer.seed,
        row=job.row,
        document=job.conversation,
        **answer.completion.recorded(likeliest=with_scores, proposals=True),
    )
