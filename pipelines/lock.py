"""One writer at a time: a folder is held by one process, and a killed holder lets go."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold `folder` (made if missing) for this process alone.

    Raises ValueError when another process holds it, unless `wait`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise ValueError(
                f"{folder} is in use by another run: wait until it ends, or use name=..."
            ) from None
        print(f"waiting for another run that is making {folder}", flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
