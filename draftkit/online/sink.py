"""Records to any address that fsspec knows, part by part: traffic for a trainer elsewhere.

A part is one Parquet file, whole or absent, and any number of writers share an address: the name of
a part is its time and a random word. A part is sealed once it has grown or aged enough, so what a
kill costs is at most that much of the sink; the buffer beside it keeps its own. Nothing waits for
an address that does not answer: what it cannot take is dropped and counted.
"""

import io
import logging
import queue
import re
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
from draftkit.data.rows import IDS, TARGET

QUEUE = 1024  # records that wait to be sent; more are dropped
QUEUE_TOKENS = 1 << 22  # of these together, some 40 bytes each
PART_TOKENS = 1 << 20  # of a part, some 4 MB before it is packed
PART_SECONDS = 300.0  # after which a part is sealed, however small
LOOK_SECONDS = 0.5
CLOSE_SECONDS = 10.0  # for what is left at the end
# Where an object is there whole or not at all; elsewhere a part is moved to its name.
OBJECTS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory")
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

    target: the checksum of the model whose answers they are, which every part names. Raises
    ValueError naming `online.sink` for an address that cannot be used.
    """

    def __init__(self, address: str, target: str) -> None:
        self._address = re.sub(r"//[^/@]*@", "//", address)  # as it is shown, without a password
        self._refused = self._lost = 0  # by whoever offers, and by the thread that sends
        self._came = self._gone = 0  # tokens, by the same two
        self._schema = SCHEMA.with_metadata({TARGET: target})
        try:
            self._files, self._folder = fsspec.url_to_fs(address)
            names = self._files.protocol
            names = [names] if isinstance(names, str) else names
            self._is_of_objects = not {*names}.isdisjoint(OBJECTS)
            if isinstance(self._files, LocalFileSystem):
                Path(self._folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = f"{self._folder}/probe-{secrets.token_hex(4)}"
            self._put(probe, b"")
            self._files.rm(probe)
        except Exception as error:  # of whatever library the address needs, or lacks
            raise ValueError(
                f"online.sink={self._address}: {first_line(error)}: name a folder by fsspec, as "
                "file:///DIR, s3://BUCKET/DIR or gs://BUCKET/DIR, and install what it needs"
            ) from error
        self._queue: queue.SimpleQueue[tuple[str, Record]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sink", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records that the address did not take."""
        return self._refused + self._lost

    def offer(self, entries: Entries) -> None:
        """Take records, each with its route; never waits."""
        for entry in entries:
            if self._queue.qsize() >= QUEUE or self._came - self._gone >= QUEUE_TOKENS:
                self._refused += 1
                continue
            self._came += tokens_of(entry[1])
            self._queue.put(entry)

    def close(self) -> None:
        """Send what is left, within `CLOSE_SECONDS`, and end."""
        self._stopping.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("%s does not answer: its last records are lost", self._address)

    def _run(self) -> None:
        part, tokens, began = list[tuple[str, Record]](), 0, time.monotonic()
        while not (self._stopping.is_set() and self._queue.empty()):
            try:
                route, record = self._queue.get(timeout=LOOK_SECONDS)
                part.append((route, record))
                tokens += tokens_of(record)
                self._gone += tokens_of(record)
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
            self._put(name, packed(part, self._schema))
        except Exception as error:  # serving goes on, whatever the address says
            self._lost += len(part)
            log.error("%s takes no records, %d are lost: %s", self._address, len(part), error)

    def _put(self, name: str, content: bytes) -> None:
        """Write a file, which its owner alone reads where it lies on a disk, whole or not."""
        if isinstance(self._files, LocalFileSystem):
            with atomic_path(Path(name)) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_bytes(content)
        elif self._is_of_objects:
            self._files.pipe_file(name, content)
        else:
            self._files.pipe_file(f"{name}.part", content)
            self._files.mv(f"{name}.part", name)


def tokens_of(record: Record) -> int:
    return len(record.prompt_ids) + len(record.output_ids)


def packed(part: Entries, schema: pa.Schema) -> bytes:
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
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, content, compression="zstd", write_page_checksum=True)
    return content.getvalue()
