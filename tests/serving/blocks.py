"""How long an event loop is held: the processor time of its thread, whatever the machine does."""

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator


@contextlib.contextmanager
def watched_loops() -> Iterator[list[float]]:
    """Seconds of every callback that the loops of this process run meanwhile."""
    run, spent = asyncio.Handle._run, []
    gc.collect()
    gc.freeze()  # a collection would go through what earlier tests left, which takes 0.2 s

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        spent.append(time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        gc.unfreeze()
        asyncio.Handle._run = run  # type: ignore[method-assign]
