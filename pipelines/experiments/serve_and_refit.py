"""`python -m pipelines.experiments.serve_and_refit`: server and daemon under load.

Shows that a service gets better while it serves: clients send prompts of one domain, the daemon
refits the drafter from what was recorded, the server takes each version that the gate lets
through. With several routes each has a domain and a drafter of its own (as Liu et
al. 2310.07177 customise drafts by topic), and the requests take turns. Ends when all are answered.
What is told comes from the buffer's counts.
"""

import itertools
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config
from draftkit.data.prompts import read_splits
from draftkit.serving.intake import ROUTE_HEADER

from ..command import main
from ..online import check_drafter
from ..plan import ANCHORS, PAIR_AND_TEXT, ROLLOUTS
from ..prepare import check_pair
from ..product import SUMMARY, Stage
from ..refitting import daemon
from ..serve import serve
from ..service import begin_anew, buffer_of, checksums_of, daemon_folder, service_folder
from ..stage import StageFolder

START_SECONDS = 300.0  # until the server must have answered
END_SECONDS = 60.0  # until a process that was told to stop must have
REQUEST_SECONDS = 120.0
CLIENTS = 4  # that wait for their answers before they ask again
BEGUN = "service.json"  # in the stage folder: the service folder's content is this experiment's
STAGE = Stage(
    name="serve_and_refit",
    code="experiments.serve_and_refit",
    reads=(
        *("seed", "data", "sampling", "divergence", "optim", "decode", "serve", "online"),
        *("draft.pretrain", "draft.lora", *ROLLOUTS, "evaluate.prompts"),
        *("evaluate.validation_prompts", "evaluate.max_new_tokens", "evaluate.batch_size"),
    ),
    inputs=(*PAIR_AND_TEXT, *ANCHORS),
    version=3,
    product=None,
)


def check(config: Config) -> None:
    """Raise ValueError for a pair that does not fit together, and a drafter that nobody refits."""
    check_pair(config)
    check_drafter(config)


def free_port(host: str) -> int:
    """A port that nobody uses."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def attended(task: Callable[[Config], None], config: Config) -> None:
    """`task(config)`, told to stop when the process that started this one is dead, killed too."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=follow, daemon=True).start()
    task(config)


@contextmanager
def running(task: Callable[[Config], None], config: Config) -> Iterator[Any]:
    """`task(config)` in a process of its own, told to stop at the end."""
    spawning = multiprocessing.get_context("spawn")
    process = spawning.Process(target=attended, args=(task, config), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join(END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def wait_until_healthy(url: str, process: Any) -> None:
    """Wait for the server. Raises ValueError if it ends, or takes too long."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.is_alive():
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise ValueError("the server did not start: see its message above")


def requests_of(config: Config, texts: Path) -> list[tuple[str, Sequence[int]]]:
    """Route and prompt ids of every request, in turn. Raises ValueError naming the keys."""
    online, traffic = config.online, config.online.traffic
    if len(traffic.domains) != len(online.routes):
        raise ValueError(
            f"online.traffic.domains names {len(traffic.domains)} domains for "
            f"{len(online.routes)} of online.routes: give one for each"
        )
    turns = []
    for route, domain in zip(online.routes, traffic.domains, strict=True):
        examples = [one for one in read_splits(texts).train if one.domain == domain]
        if not examples:
            raise ValueError(f"online.traffic.domains: the text has no prompts of {domain!r}")
        turns.append([(route, example.prompt_ids) for example in examples])
    taken = itertools.chain.from_iterable(zip(*map(itertools.cycle, turns), strict=True))
    return list(itertools.islice(taken, traffic.requests))


def ask(url: str, requests: Sequence[tuple[str, Sequence[int]]], config: Config) -> dict[str, Any]:
    """Send all requests, `clients` at a time; how many were answered, and how fast."""
    traffic = config.online.traffic
    name = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]

    def one(request: tuple[str, Sequence[int]]) -> tuple[float, int]:
        """Seconds of a request, and the tokens of its answer."""
        route, prompt = request
        body = {"model": name, "prompt": list(prompt), "max_tokens": traffic.max_new_tokens}
        headers = {ROUTE_HEADER: route}
        started = time.perf_counter()
        answer = httpx.post(
            f"{url}/v1/completions", json=body, headers=headers, timeout=REQUEST_SECONDS
        )
        answer.raise_for_status()
        used = int(answer.json()["usage"]["completion_tokens"])
        return time.perf_counter() - started, used

    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        seconds, used = zip(*clients.map(one, requests), strict=True)
    return {
        "requests": len(seconds),
        "tokens": sum(used),
        "tokens_per_second": sum(used) / (time.perf_counter() - started),
        "median_seconds": statistics.median(seconds),
        "slowest_seconds": max(seconds),
    }


def serve_and_refit(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run both from an empty service folder, load them, and tell what each version did.

    Raises ValueError where that folder holds what no run of this experiment has left.
    """
    requests = requests_of(config, folder.input("texts"))
    begun = folder.path / BEGUN
    begin_anew(config, ours=config.overwrite or begun.exists())
    write_json(begun, {"service": str(service_folder(config))})
    serving = replace(config.serve, host="127.0.0.1", port=free_port("127.0.0.1"))
    both = replace(config, serve=serving, overwrite=False)
    url = f"http://127.0.0.1:{serving.port}"
    with running(serve, both) as server:
        wait_until_healthy(url, server)
        with running(daemon, both) as refitting:
            load = ask(url, requests, both)
            alive = {"server": server.is_alive(), "daemon": refitting.is_alive()}
    buffer = buffer_of(both, checksums_of(folder))
    rows = [
        {
            "route": route,
            "version": served.version,
            "requests": served.requests,
            "tokens": served.tokens,
            "acceptance_length": served.tokens / served.rounds if served.rounds else None,
            "alpha": served.acceptance / served.tested if served.tested else None,
        }
        for route in both.online.routes
        for served in buffer.served(route)
    ]
    buffer.close()
    path = daemon_folder(both) / SUMMARY
    updates = read_json(path) if path.exists() else {}
    for row in rows:
        drafted = ", nothing drafted"
        if row["alpha"] is not None:
            drafted = f", alpha {row['alpha']:.3f}, tau {row['acceptance_length']:.2f}"
        folder.note(f"{row['route']}/{row['version']}: {row['requests']} answers{drafted}")
    return {**updates, **load, "alive": alive, "served": rows}


if __name__ == "__main__":
    main(STAGE)
