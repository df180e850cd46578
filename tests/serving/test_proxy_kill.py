"""The recording proxy killed at random moments under load: what it said to be written is there."""

import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from draftkit.config import BufferConfig
from draftkit.data.rollouts import SCHEMA
from draftkit.data.store import pack
from draftkit.online.buffer import Buffer
from draftkit.serving import recorder
from tests.online.traffic import stored
from tests.serving.fakes import running, wait_for
from tests.serving.test_proxy import COMPLETION, Stub, capturing

KILLS, CLIENTS = 20, 16
WHOLE = (b'"finish_reason":"stop"', b"data: [DONE]")  # in a reply, and at the end of a stream


def capture_until_killed(folder: Path, engine: str, tell: Connection) -> None:
    """Say where it listens, then the seeds of the records of each transaction that is done."""
    real = Buffer.append

    def append(self: Buffer, entries) -> None:
        real(self, entries)
        tell.send([record.seed for _, record in entries])

    Buffer.append = append
    recorder.GATHER_SECONDS = 0.005  # so that a kill often comes while it writes
    with capturing(folder, engine=engine) as capture:
        tell.send(capture.address)
        signal.pause()


@contextlib.contextmanager
def proxy(folder: Path, engine: str) -> Iterator[tuple[int, str, Connection]]:
    """The process of a proxy, where it listens, and what it tells."""
    forking = multiprocessing.get_context("fork")
    hear, tell = forking.Pipe(duplex=False)
    process = forking.Process(target=capture_until_killed, args=(folder, engine, tell))
    process.start()
    tell.close()  # so that its end is heard
    try:
        assert hear.poll(20)
        yield process.pid or 0, hear.recv(), hear
    finally:
        process.kill()
        process.join()


class Client(threading.Thread):
    """Asks until an error comes, whole replies and streams in turns."""

    def __init__(self, address: str, seeds: Iterator[int]) -> None:
        super().__init__()
        self.address, self.seeds = address, seeds
        self.answered, self.cut, self.error = 0, 0, ""

    def run(self) -> None:
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=20)) as connection:
            try:
                for seed in self.seeds:
                    self.ask(connection, seed)
            except (OSError, http.client.HTTPException) as error:
                self.error = type(error).__name__

    def ask(self, connection: http.client.HTTPConnection, seed: int) -> None:
        body = {**COMPLETION, "n": 1, "seed": seed, "stream": seed % 2 == 1}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        with connection.getresponse() as reply:
            content = reply.read()
            self.cut += reply.status != 200 or WHOLE[seed % 2] not in content
            self.answered += 1


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_proxy_keeps_what_it_said_to_be_written(tmp_path: Path) -> None:
    """And each client gets its error, at once, or a whole reply."""
    moments, seeds, told = random.Random(1), itertools.count(), list[int]()
    errors, answered = Counter[str](), 0
    pack([], SCHEMA)  # whose first call takes long, so that no fork makes it
    with running(Stub().app) as engine:
        for _ in range(KILLS):
            with proxy(tmp_path, engine) as (pid, address, hear):
                clients = [Client(address, seeds) for _ in range(CLIENTS)]
                for client in clients:
                    client.start()
                assert wait_for(lambda some=clients: any(one.answered for one in some))
                time.sleep(moments.uniform(0, 0.5))
                os.kill(pid, signal.SIGKILL)
                for client in clients:
                    client.join(10)  # well below its own patience
                    assert not client.is_alive()
                    assert client.cut == 0
                    errors[client.error] += 1
                    answered += client.answered
                with contextlib.suppress(EOFError):
                    while True:
                        told += hear.recv()
            with contextlib.closing(Buffer(tmp_path / "b.sqlite", BufferConfig())) as buffer:
                kept = Counter(record.seed for record in stored(buffer))
            assert kept.total() == len(kept)  # none twice
            assert {*told} <= kept.keys()
    assert len(told) > 2 * KILLS
    assert answered > 2 * KILLS
    assert errors[""] == 0
