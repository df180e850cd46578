"""`python -m pipelines.experiments.serve_and_refit`: server and daemon under load.

Shows that a service gets better while it serves: clients send prompts of one domain, the daemon
refits the drafter from what was recorded, the server takes each version that the gate lets
through. With several routes each has a domain and a drafter of its own (as Liu et
al. 2310.07177 customise drafts by topic), and the requests take turns. Ends when all are answered.
The table comes from the buffer's counts.
"""

import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path
from threading import Thread
from typing import Any

from draftkit.artifacts import read_json
from draftkit.config import DEFAULT_ROUTE, Config
from draftkit.data.splits import read_splits
from draftkit.endpoint import COMPLETIONS, Endpoint
from draftkit.serving.intake import ROUTE_HEADER

from ..command import main
from ..online import check_drafter, online
from ..plan import ANCHORS, PAIR_AND_TEXT, ROLLOUTS
from ..prepare import check_pair
from ..product import MANIFEST, SUMMARY, Stage, plan
from ..serve import serve
from ..service import (
    BUFFER,
    SERVER,
    STATE,
    buffer_of,
    checksums_of,
    clear_service,
    daemon_folder,
    service_folder,
)
from ..stage import StageFolder

DOMAINS = {DEFAULT_ROUTE: "prose", "code": "cpp"}  # whose prompts are sent, by route
REQUESTS = 600  # of each route
MAX_NEW_TOKENS = 64
CLIENTS = 4  # that wait for their answers before they ask again
CONNECTS = 20  # attempts to reach the server after the first, within two minutes
END_SECONDS = 60.0  # until a process that was told to stop must have
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
    """Raise ValueError for a pair that does not fit, and for routes that nobody refits or asks.

    So for a service that no run of this experiment has begun: its records would be deleted.
    """
    check_pair(config)
    check_drafter(config)
    if unknown := [route for route in config.online.routes if route not in DOMAINS]:
        known = ", ".join(DOMAINS)
        raise ValueError(f"online.routes: this experiment has {known}, no {unknown[0]}")
    folder, begun = service_folder(config), (plan(STAGE, config).folder / MANIFEST).is_file()
    if not (begun or config.overwrite) and (folder / BUFFER).exists():
        raise ValueError(
            f"{folder} holds a service that this experiment has not begun: use name=..., or "
            "overwrite=true to delete its records and all its drafter versions"
        )


def serve_and_refit(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run both from an empty service folder, load them, and tell what each version did."""
    requests = requests_of(config, folder.inputs["texts"])
    clear_service(config, SERVER, STATE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        serving = replace(config.serve, host="127.0.0.1", port=probe.getsockname()[1])
    both = replace(config, serve=serving, overwrite=False)
    endpoint = Endpoint("serve", f"http://127.0.0.1:{serving.port}", retries=CONNECTS)
    with running(serve, both) as server, endpoint:
        name = endpoint.model()["id"]
        with running(online, both) as refitting:
            load = ask(endpoint, name, requests)
            alive = {"server": server.is_alive(), "daemon": refitting.is_alive()}
    buffer, rows = buffer_of(both, checksums_of(both, folder)), []
    for route in both.online.routes:
        for one in buffer.served(route):  # what each version has served
            tau = one.tokens / one.rounds if one.rounds else None
            alpha = one.acceptance / one.tested if one.tested else None
            row = {"route": route, "version": one.version, "requests": one.requests}
            rows.append({**row, "tokens": one.tokens, "acceptance_length": tau, "alpha": alpha})
            drafted = ", nothing drafted"
            if alpha is not None:
                drafted = f", alpha {alpha:.3f}, tau {tau:.2f}"
            folder.note(f"{route}/{one.version}: {one.requests} answers{drafted}")
    buffer.close()
    path = daemon_folder(both) / SUMMARY
    updates = read_json(path) if path.exists() else {}
    return {**updates, **load, "alive": alive, "served": rows}


def requests_of(config: Config, texts: Path) -> list[tuple[str, Sequence[int]]]:
    """Route and prompt ids of every request, in turn."""
    train, routes = read_splits(texts).train, config.online.routes
    prompts = [
        cycle([(route, one.prompt_ids) for one in train if one.domain == DOMAINS[route]])
        for route in routes
    ]
    return list(islice(chain.from_iterable(zip(*prompts, strict=True)), REQUESTS * len(routes)))


def ask(
    server: Endpoint, model: str, requests: Sequence[tuple[str, Sequence[int]]]
) -> dict[str, Any]:
    """Send all requests, `CLIENTS` at a time; how many were answered, and how fast."""

    async def one(request: tuple[str, Sequence[int]]) -> tuple[float, int]:
        """Seconds of a request, and the tokens of its answer."""
        route, prompt = request
        body = {"model": model, "prompt": list(prompt), "max_tokens": MAX_NEW_TOKENS}
        answer = await server.send(COMPLETIONS, body, headers={ROUTE_HEADER: route})
        return answer.elapsed.total_seconds(), answer.json()["usage"]["completion_tokens"]

    started = time.perf_counter()
    seconds, tokens = zip(*server.map(one, requests, at_once=CLIENTS), strict=True)
    return {
        "requests": len(seconds),
        "tokens": sum(tokens),
        "tokens_per_second": sum(tokens) / (time.perf_counter() - started),
        "median_seconds": statistics.median(seconds),
        "slowest_seconds": max(seconds),
    }


# Processes


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
        process.kill()
        process.join()


def attended(task: Callable[[Config], None], config: Config) -> None:
    """`task(config)`, told to stop when the process that started this one is dead, killed too."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=follow, daemon=True).start()
    task(config)


if __name__ == "__main__":
    main(STAGE)
