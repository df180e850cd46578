"""`python -m pipelines.experiments.loop_vllm +experiment=loop_vllm`: the loop around a vLLM, run.

vLLM's CPU build (`make engines`) serves the target with a drafter that has read prose alone, on one
half of the cores. Clients ask through the recording proxy, first for prose, then for C++. On the
other half the daemon refits the drafter from what was recorded. Its teacher is the engine itself:
no target is in memory, but for a head (`draft=eagle3`), which reads its hidden states. What the
gate lets through is pushed into the running engine.

Held-out C++ prompts are answered greedily by vLLM without a drafter, before the loop, and after it:
tokens a pass by vLLM's own counters, paired by prompt, and whether the answers are the same.
"""

import ctypes
import json
import multiprocessing
import operator
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from draftkit.artifacts import atomic_path, read_json
from draftkit.config import DEFAULT_ROUTE, Config
from draftkit.data.splits import read_splits
from draftkit.endpoint import COMPLETIONS, Endpoint, completion
from draftkit.engines import push_vllm
from draftkit.engines.counters import ACCEPTED, PASSES, VLLM, Answer, Server
from draftkit.engines.folder import write_folder
from draftkit.evaluation.intervals import estimate
from draftkit.theory.acceptance import Rate

from ..capture import capture
from ..command import main
from ..online import check_drafter, online
from ..plan import PAIR_AND_TEXT, ROLLOUTS, TEXTS
from ..prepare import check_pair
from ..product import MANIFEST, SUMMARY, Input, Stage, plan
from ..service import (
    BUFFER,
    SERVER,
    STATE,
    buffer_of,
    checksums_of,
    clear_service,
    daemon_folder,
    registry_of,
    service_folder,
)
from ..stage import StageFolder

LOTS = {"prose": 4, "cpp": 20}  # of requests, by domain, in turn
LOT = 32  # requests
HELD_OUT = 48  # prompts of the last domain
MAX_NEW_TOKENS = 48
CLIENTS = 2  # that wait for their answers before they ask again
CONNECTS = 30  # rounds in which the proxy is asked until it is there: four minutes
START_SECONDS, END_SECONDS = 300.0, 60.0  # until an engine answers; until a process has ended
MADE_BY_US = Path(".engines/vllm/bin/python")  # `make engines`
ENGINE_LOG, FIGURE = "engine.log", "loop.png"
PR_SET_PDEATHSIG = 1  # of prctl(2)
STAGE = Stage(
    name="loop_vllm",
    code="experiments.loop_vllm",
    reads=(
        *("seed", "data", "sampling", "divergence", "optim", "decode", "online"),
        *("draft.pretrain", "draft.lora", *ROLLOUTS, "generate.top_k", "evaluate.prompts"),
        *("evaluate.validation_prompts", "evaluate.max_new_tokens", "evaluate.batch_size"),
    ),
    inputs=(*PAIR_AND_TEXT, Input("asked", lambda config: [plan(TEXTS, of_all(config))])),
    product=None,
)


def of_all(config: Config) -> Config:
    """`config` with the texts of all domains that are asked for; the drafter has read its own."""
    return replace(config, data=replace(config.data, domains=[*LOTS]))


def check(config: Config) -> None:
    """Raise ValueError for a pair that does not fit, a missing vLLM, and a service that no run of
    this experiment has begun: its records would be deleted."""
    check_pair(config)
    check_drafter(config)
    if config.draft.kind == "medusa":
        raise ValueError("draft.kind=medusa is served by no engine: use plain or eagle3")
    python_of_vllm()
    folder, begun = service_folder(config), (plan(STAGE, config).folder / MANIFEST).is_file()
    if not (begun or config.overwrite) and (folder / BUFFER).exists():
        raise ValueError(
            f"{folder} holds a service that this experiment has not begun: use name=..., or "
            "overwrite=true to delete its records and all its drafter versions"
        )


def python_of_vllm() -> str:
    """The Python that has vLLM: that of `make engines`, or this one. ValueError for neither."""
    if MADE_BY_US.is_file():
        return str(MADE_BY_US.absolute())
    if find_spec("vllm") is None:
        raise ValueError("loop_vllm needs vLLM: run `make engines` first, or install it here")
    return sys.executable


def loop_vllm(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run engine, proxy and daemon from an empty service folder, and tell what changed."""
    started = time.perf_counter()
    engine_cores, own_cores = halves(sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, own_cores)
    requests, held_out = prompts_of(folder.inputs["asked"])
    clear_service(config, SERVER, STATE)
    target, draft = folder.model(config, "target"), folder.path / "draft"
    gamma = max(1, config.proposals)
    if not draft.exists():
        start, dtype = folder.model(config, "draft"), "float32"
        write_folder(start, target, draft, gamma=gamma, dtype=dtype, untied=True)
    method = "eagle3" if config.draft.is_head else "draft_model"
    options = {"method": method, "model": str(draft.absolute()), "num_speculative_tokens": gamma}
    if config.draft.kind == "pard" or config.draft.head.parallel:
        options["parallel_drafting"] = True
    speculation = ["--speculative-config", json.dumps(options)]
    log = folder.path / ENGINE_LOG
    with vllm(target.location, config, [], log, engine_cores) as url:
        expected = answers_of(url, held_out)
        folder.note(f"vLLM without a drafter has answered {len(held_out)} held-out prompts")
    with vllm(target.location, config, speculation, log, engine_cores) as url:
        before = counted(url, config, held_out)
        both = around(config, url)
        with running(capture, both), running(online, both) as daemon:
            proxy = f"http://127.0.0.1:{both.capture.port}"
            lots = loaded(both, proxy, url, requests, folder.note)
            alive = daemon.is_alive()
        after = counted(url, config, held_out)
        served = registry_of(both, DEFAULT_ROUTE).served()
    gain = estimate(tokens_a_pass(after), tokens_a_pass(before), compare=operator.sub)
    draw(lots, folder.path / FIGURE)
    updates = read_json(path) if (path := daemon_folder(both) / SUMMARY).exists() else {}
    buffer = buffer_of(both, checksums_of(both, folder))
    recorded = buffer.count(DEFAULT_ROUTE, held_out=False)
    recorded += buffer.count(DEFAULT_ROUTE, held_out=True)
    buffer.close()
    same = [
        one.text == text
        for made in (before, after)
        for one, text in zip(made, expected, strict=True)
    ]
    return {
        **updates,
        "lots": lots,
        "records": recorded,
        "alive": alive,
        "version_served": served,
        "acceptance_length_before": estimate(tokens_a_pass(before)).as_dict(),
        "acceptance_length_after": estimate(tokens_a_pass(after)).as_dict(),
        "acceptance_length_gain": gain.as_dict(),
        "same_answers": sum(same),
        "answers": len(same),
        "minutes": (time.perf_counter() - started) / 60,
    }


def show(config: Config, folder: Path) -> None:
    """Print what changed, and where the figure is."""
    summary = read_json(folder / SUMMARY)
    for one in summary["lots"]:
        version = one["version"] or "the drafter of launch"
        print(f"{one['domain']:<6} {one['acceptance_length']:.2f} tokens a pass, {version}")
    low, high = summary["acceptance_length_gain"]["ci95"] or (float("nan"), float("nan"))
    before, after = (summary[f"acceptance_length_{when}"]["mean"] for when in ("before", "after"))
    print(
        f"held-out prompts: {before:.2f} tokens a pass before, {after:.2f} after, gain "
        f"{after - before:+.2f} [{low:+.2f}, {high:+.2f}]; {summary['same_answers']} of "
        f"{summary['answers']} answers are those of vLLM without a drafter"
    )
    print(f"Tokens a pass over time: {folder / FIGURE}")


def halves(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The engine's cores and all others; of one core the same."""
    middle = max(1, len(cores) // 2)
    return cores[:middle], cores[middle:] or cores


def prompts_of(texts: Path) -> tuple[list[tuple[str, Sequence[int]]], list[list[int]]]:
    """Domain and prompt of every request, in order; held-out prompts of the last domain."""
    splits, requests = read_splits(texts), list[tuple[str, Sequence[int]]]()
    for domain, lots in LOTS.items():
        own = [(domain, one.prompt_ids) for one in splits.train if one.domain == domain]
        requests += islice(cycle(own), lots * LOT)
    last = [*LOTS][-1]
    return requests, [one.prompt_ids for one in splits.test if one.domain == last][:HELD_OUT]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def around(config: Config, url: str) -> Config:
    """How proxy and daemon run around the engine at `url`, which is the teacher too."""
    return replace(
        config,
        overwrite=False,
        engine=replace(config.engine, url=url),
        target=replace(config.target, urls=[url]),
        online=replace(config.online, push="vllm"),
        capture=replace(config.capture, port=free_port()),
    )


# The engine


@contextmanager
def vllm(
    target: str, config: Config, options: Sequence[str], log: Path, cores: Sequence[int]
) -> Iterator[str]:
    """The address of a vLLM on loopback that serves `target`, in development mode."""
    port = free_port()
    words = [
        *(python_of_vllm(), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(Path(target).absolute()) if Path(target).is_dir() else target),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-num-seqs", str(CLIENTS + 2), "--max-logprobs", str(config.teacher_top_k)),
        *(("--per-request-spec-decode-metrics", "summary") if options else ()),
        *("--worker-extension-cls", "push_vllm.Push", *options),
    ]
    environment = {
        **os.environ,
        **{"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
        "PYTHONPATH": str(Path(push_vllm.__file__).parent),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with log.open("a", encoding="utf-8") as lines:
        process = subprocess.Popen(
            words,
            stdout=lines,
            stderr=lines,
            env=environment,
            start_new_session=True,
            preexec_fn=partial(begin, cores),
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(url, process, log)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def begin(cores: Sequence[int]) -> None:
    """In the engine's process: its cores, and an end with the process that started it."""
    os.sched_setaffinity(0, cores)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the engine answers. Raises ValueError where it ends, or takes too long."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5.0).is_success:
                return
        time.sleep(0.5)
    raise ValueError(f"vLLM did not start: {log} says why")


def greedy(config: Config) -> Any:
    return replace(config.sampling, temperature=0.0, top_k=0, top_p=1.0)


def answers_of(url: str, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The greedy answers of an engine, one after the other."""
    with Endpoint("engine", url) as server:
        model, texts = server.model()["id"], []
        for row, prompt in enumerate(prompts):
            body = completion(prompt, greedy(Config()), limit=MAX_NEW_TOKENS, seed=0, row=row)
            choice = server.ask(COMPLETIONS, {**body, "model": model}).json()["choices"][0]
            texts.append(choice["text"])
    return texts


def counted(url: str, config: Config, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """The same answers, with what vLLM counts of each. Nobody else may ask it meanwhile."""
    with Endpoint("engine", url) as endpoint:
        server = Server(endpoint)
        return server.answers(prompts, sampling=greedy(config), limit=MAX_NEW_TOKENS, seed=0)


def tokens_a_pass(answers: Sequence[Answer]) -> Rate:
    """1 + accepted / passes, by prompt."""
    return Rate.of((one.accepted + one.passes, one.passes) for one in answers)


# The load


def loaded(
    config: Config,
    proxy: str,
    engine: str,
    requests: Sequence[tuple[str, Sequence[int]]],
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Send all requests through the proxy; of each lot what vLLM counted, and the version then."""
    lots: list[dict[str, Any]] = []
    registry = registry_of(config, DEFAULT_ROUTE)
    with Endpoint("proxy", proxy, retries=CONNECTS) as server, Endpoint("engine", engine) as direct:
        model, counters = server.model()["id"], Server(direct).counters
        for first in range(0, len(requests), LOT):
            lot, before = requests[first : first + LOT], counters()

            async def ask(numbered: tuple[int, Sequence[int]], name: str = model) -> int:
                row, prompt = numbered
                sampling = greedy(config)
                body = completion(prompt, sampling, limit=MAX_NEW_TOKENS, seed=config.seed, row=row)
                answer = await server.send(COMPLETIONS, {**body, "model": name})
                return answer.json()["usage"]["completion_tokens"]

            started = time.perf_counter()
            tokens = sum(server.map(ask, enumerate(p for _, p in lot), at_once=CLIENTS))
            seconds, after = time.perf_counter() - started, counters()
            passes, accepted = (
                after[key] - before.get(key, 0.0) for key in (PASSES[VLLM], f"{ACCEPTED}_total")
            )
            lots.append(
                {
                    "domain": lot[0][0],
                    "requests": first + len(lot),
                    "acceptance_length": 1 + accepted / passes if passes else 1.0,
                    "tokens_per_second": tokens / seconds,
                    "version": registry.served(),
                }
            )
            note(
                f"{lots[-1]['requests']:,} of {len(requests):,} requests, {lot[0][0]}: "
                f"{lots[-1]['acceptance_length']:.2f} tokens a pass, {lots[-1]['version']} serves"
            )
    return lots


def draw(lots: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens a pass over the requests; domains and versions begin at dotted lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="requests", ylabel="tokens a pass, counted by vLLM")
    ends, lengths = ([one[key] for one in lots] for key in ("requests", "acceptance_length"))
    axes.plot(ends, lengths, marker="o", color="#0072b2")
    axes.margins(y=0.15)
    low, high = axes.get_ylim()
    before: Mapping[str, Any] = {"domain": "", "version": None}
    for one in lots:
        begins = one["requests"] - LOT
        if one["domain"] != before["domain"]:
            axes.axvline(begins, color="#cccccc", linestyle=":", zorder=0)
            axes.text(begins, high, f" {one['domain']}", va="bottom", color="#666666")
        if one["version"] not in (None, before["version"]):
            axes.axvline(one["requests"], color="#0072b2", linestyle=":", linewidth=1, zorder=0)
            axes.text(one["requests"], low, f" {one['version']}", rotation=90, va="bottom")
        before = one
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


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
