"""Records to any address that fsspec knows, part by part: traffic for a trainer elsewhere.

A part is one Parquet file, whole or absent, and any number of writers share an address: the name of
a part is its time and a random word. A part is sealed once it has grown or aged enough, so what a
kill costs is at most that much of the sink; the buffer beside it keeps its own. Nothing waits for
an address that does not answer: what it cannot take is dropped and counted.
"""

import io
import logging
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from draftkit.artifacts import atomic_path, first_line
from draftkit.data.rollouts import Record
from draftkit.data.rows import IDS

QUEUE = 8192  # records that wait to be sent; more are dropped
PART_TOKENS = 1 << 20  # of a part, some 4 MB before it is packed
PART_SECONDS = 300.0  # after which a part is sealed, however small
LOOK_SECONDS = 0.5
SCHEMA = pa.schema(
    [
        *((name, pa.list_(pa.int32())) for name in IDS),
        *((name, pa.string()) for name in ("document", "domain", "route", "sampler_version")),
        *((name, pa.float64()) for name in ("temperature", "top_k", "top_p", "repetition_penalty")),
    ]
)
Entries = Sequence[tuple[str, Record]]
log = logging.getLogger(__name__)


class Sink:
    """Sends records to `address`, a folder; see the module's docstring. Close it at the end.

    Raises ValueError naming `online.sink` for an address that cannot be used.
    """

    def __init__(self, address: str) -> None:
        try:
            self._files, self._folder = fsspec.url_to_fs(address)
            self._files.makedirs(self._folder, exist_ok=True)
        except Exception as error:  # of whatever library the address needs, or lacks
            raise ValueError(
                f"online.sink={address}: {first_line(error)}: name a folder by fsspec, as "
                "file:///DIR, s3://BUCKET/DIR or gs://BUCKET/DIR, and install what it needs"
            ) from error
        self.dropped = 0  # records
        self._address = address
        self._queue: queue.Queue[tuple[str, Record]] = queue.Queue(QUEUE)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sink", daemon=True)
        self._thread.start()

    def offer(self, entries: Entries) -> None:
        """Take records, each with its route; never waits."""
        for entry in entries:
            try:
                self._queue.put_nowait(entry)
            except queue.Full:
                self.dropped += 1

    def close(self) -> None:
        """Send what is left, and end."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        part, tokens, began = list[tuple[str, Record]](), 0, time.monotonic()
        while not (self._stopping.is_set() and self._queue.empty()):
            try:
                route, record = self._queue.get(timeout=LOOK_SECONDS)
                part.append((route, record))
                tokens += len(record.prompt_ids) + len(record.output_ids)
            except queue.Empty:
                pass
            if tokens >= PART_TOKENS or time.monotonic() >= began + PART_SECONDS:
                self._seal(part)
                part, tokens, began = [], 0, time.monotonic()
        self._seal(part)

    def _seal(self, part: Entries) -> None:
        if not part:
            return
        name = f"{self._folder}/part-{time.time_ns()}-{secrets.token_hex(4)}.parquet"
        try:
            if isinstance(self._files, LocalFileSystem):
                with atomic_path(Path(name)) as temporary:
                    temporary.write_bytes(packed(part))
            else:
                self._files.pipe_file(name, packed(part))  # an object is there whole, or not
        except Exception as error:  # serving goes on, whatever the address says
            self.dropped += len(part)
            log.error("%s takes no records, %d are lost: %s", self._address, len(part), error)


def packed(part: Entries) -> bytes:
    """The bytes of a part."""
    rows = [
        {
            **{"prompt_ids": one.prompt_ids, "output_ids": one.output_ids, "route": route},
            **{"document": one.document, "domain": one.domain},
            **{"sampler_version": one.sampler_version, **one.sampling},
        }
        for route, one in part
    ]
    content = io.BytesIO()
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, content, compression="zstd", write_page_checksum=True)
    return content.getvalue()
