"""A service whose processes are killed at random moments: nothing to repair, nothing lost."""

import random
import time
from pathlib import Path

import httpx
import pytest

from draftkit.data.rollouts import Record, read_parts
from draftkit.online.buffer import Buffer
from pipelines.plan import GENERATE
from pipelines.service import registry_of
from pipelines.stage import ensure
from tests.services import buffer_of
from tests.test_online import BARE, composed, ended, fill, start, until

ROUNDS = 8


@pytest.fixture(scope="module")
def records(root: Path) -> list[Record]:
    return list(read_parts(ensure(GENERATE, composed(root, "+experiment=serve"))))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_daemon_killed_anywhere_leaves_whole_versions(root: Path, records: list[Record]) -> None:
    """During steps, the gate, the saving of a version and of the state: whenever it comes."""
    name, moments = "daemon", random.Random(1)
    config = composed(root, "+experiment=serve", f"name={name}")
    fill(config, records)
    registry = registry_of(config, "default")
    eager = [*BARE, "online.min_records=1", "online.poll_seconds=0.05"]
    eager += ["online.gate.records=256"]  # the same prompts come again: enough different ones
    published: list[str] = []
    for turn in range(ROUNDS):
        daemon = start(root, name, *eager, "optim.learning_rate=1e-4")
        try:
            until(daemon, lambda line: "watching" in line)
            fill(config, records[turn : turn + 4])  # something new, so that it begins an update
            time.sleep(moments.uniform(0, 1.5))
        finally:
            daemon.kill()
        ended(daemon)
        current = registry.current()
        assert current is not None
        names = [version.name for version in registry.versions()]
        assert names[: len(published)] == published
        for version in registry.versions():
            assert registry.read(version)
        published = names
    last = start(root, name, *eager, "online.most_updates=1")
    fill(config, records[:8])
    assert "all updates done" in ended(last)
    assert last.returncode == 0


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_server_killed_anywhere_keeps_what_it_acknowledged(
    root: Path, records: list[Record]
) -> None:
    """Records that were once seen in the buffer are there after every kill, whole."""
    name, moments, seen = "server", random.Random(2), 0
    config = composed(root, "+experiment=serve", f"name={name}")
    model = Path(config.target.path).name
    for _ in range(ROUNDS // 2):
        server = start(root, name, "serve.port=0", stage="serve")
        try:
            said = until(server, lambda line: "answers at" in line)
            url = said.rsplit(" ", 1)[-1].strip()
            for record in records[: moments.randrange(2, 6)]:
                body = {"model": model, "prompt": record.prompt_ids, "max_tokens": 8}
                httpx.post(f"{url}/completions", json=body, timeout=60).raise_for_status()
            time.sleep(moments.uniform(0, 0.5))
            acknowledged = held(config)
        finally:
            server.kill()
        ended(server)
        assert held(config) >= acknowledged >= seen
        seen = acknowledged
    assert seen > 0


def held(config) -> int:
    """Records that another process can read; all of them are read."""
    buffer: Buffer = buffer_of(config)
    both = [buffer.newest("default", 10_000, held_out=side) for side in (False, True)]
    buffer.close()
    return sum(map(len, both))
