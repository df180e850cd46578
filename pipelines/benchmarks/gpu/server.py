"""Part f: the server's engine under load: clients that ask again as soon as they are answered.

An engine of a 1 B target and a 0.15 B drafter of random weights, and twice as many clients as it
takes, no HTTP; halfway a new version of the drafter is published. Clients begin before anything is
timed, until each has had an answer, so that no code is made in the time that counts. First with
code as a server has it by default, captured, then compiled.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from draftkit.config import (
    DecodeConfig,
    GateConfig,
    PretrainConfig,
    SamplingConfig,
    ServeConfig,
)
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.models.adapter import CausalAdapter
from draftkit.models.devices import resolve_device
from draftkit.online.registry import Registry
from draftkit.serving.drafters import Drafters, Route
from draftkit.serving.engine import Engine
from draftkit.serving.jobs import Draining, Job, Piece
from pipelines.benchmarks.gpu.part import Part
from pipelines.benchmarks.random_models import random_model, random_texts, shape

PATIENCE = 300.0  # seconds that an answer may take: code is compiled for the first
POLL_SECONDS = 0.1
GUESSES = {"captured": 30.0, "compiled": 90.0}  # seconds of either load on a GPU


@dataclass(frozen=True)
class Size:
    """Shapes, clients, and seconds that count."""

    target: PretrainConfig
    draft: PretrainConfig
    vocab_size: int
    clients: int
    slots: int
    prompt_tokens: int
    new_tokens: int
    gamma: int
    seconds: float


REAL = Size(
    target=shape(16, 2048, 8192, 32, 2048),
    draft=shape(6, 768, 3072, 12, 2048),
    vocab_size=128_256,
    clients=32,
    slots=16,
    prompt_tokens=64,
    new_tokens=96,
    gamma=4,
    seconds=20.0,
)
REHEARSED = Size(
    target=shape(1, 32, 32, 4, 64),
    draft=shape(1, 16, 16, 4, 64),
    vocab_size=300,
    clients=3,
    slots=2,
    prompt_tokens=4,
    new_tokens=6,
    gamma=2,
    seconds=0.3,
)


@dataclass(frozen=True)
class Heard:
    """One piece of an answer, as its client heard it."""

    time: float
    tokens: int
    first: bool
    waited: float  # since the request, or the piece before


class Load:
    """Clients on threads of their own, until `stop`."""

    def __init__(self, engine: Engine, size: Size, seed: int) -> None:
        self.engine, self.size = engine, size
        self.heard: list[Heard] = []
        self.answers: list[float] = []  # seconds
        self.reasons: dict[str, int] = {}
        self._stopping = threading.Event()
        prompts = random_texts(
            size.clients, size.prompt_tokens, vocab_size=size.vocab_size, seed=seed
        )
        self._threads = [
            threading.Thread(target=self._ask_on, args=(prompt,), daemon=True) for prompt in prompts
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _ask_on(self, prompt: list[int]) -> None:
        job = Job(
            prompt_ids=prompt,
            max_new_tokens=self.size.new_tokens,
            sampling=SamplingConfig(temperature=1.0),
        )
        while not self._stopping.is_set():
            ended, asked = threading.Event(), time.monotonic()
            try:
                self.engine.submit([job], [self._listener(ended, asked)])
            except Draining:
                return
            if not ended.wait(PATIENCE):
                return
            self.answers.append(time.monotonic() - asked)

    def _listener(self, ended: threading.Event, asked: float) -> Callable[[Piece], None]:
        last, first = asked, True

        def listen(piece: Piece) -> None:
            nonlocal last, first
            now = time.monotonic()
            self.heard.append(Heard(now, len(piece.scores), first, now - last))
            last, first = now, False
            if piece.finish_reason is not None:
                self.reasons[piece.finish_reason] = self.reasons.get(piece.finish_reason, 0) + 1
                ended.set()

        return listen


def saved(model: CausalAdapter) -> Callable[[Path], None]:
    """Writes `model` into a folder, as a registry wants it."""
    return lambda folder: model.model.save_pretrained(folder)


def measured(engine: Engine, load: Load, publish: Callable[[], None]) -> dict[str, Any]:
    """Rates and waits of the seconds that count, with a swap in their midst."""
    size, load_started = load.size, time.monotonic()
    load.start()
    _until(lambda: len(load.answers) >= 2 * size.clients)
    began, swaps = time.monotonic(), engine.counters().swaps
    time.sleep(size.seconds / 2)
    published = time.monotonic()
    publish()
    _until(lambda: engine.counters().swaps > swaps)
    swapped = time.monotonic()
    time.sleep(size.seconds / 2)
    ended = time.monotonic()
    heard = [piece for piece in load.heard if began <= piece.time < ended]
    firsts = [piece.waited for piece in heard if piece.first]
    others = [piece.waited for piece in heard if not piece.first]
    around = [p.waited for p in heard if not p.first and published <= p.time < swapped + 1]
    return {
        "warming_seconds": began - load_started,
        "tokens_per_second": sum(piece.tokens for piece in heard) / (ended - began),
        "answers": len(firsts),
        "first_token_seconds": spread(firsts),
        "between_pieces_seconds": spread(others),
        "longest_around_swap_seconds": max(around, default=None),
        "publish_to_swap_seconds": swapped - published,
        "rounds_waited_seconds": engine.counters().last_swap_seconds,
        "errors": engine.counters().errors,
        "ends": load.reasons,
    }


def spread(values: list[float]) -> dict[str, float] | None:
    """Median, 95th percentile and largest."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return {"median": statistics.median(values), "p95": cuts[-1], "largest": max(values)}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine came to nothing in {PATIENCE:g} s")
        time.sleep(POLL_SECONDS)


def under_load(part: Part, size: Size, code: str) -> dict[str, Any]:
    """Start an engine that runs rounds as `code`, load it, stop it."""
    model = partial(random_model, hardware=part.config.hardware, vocab_size=size.vocab_size)
    target = model(size.target, seed=0)
    with tempfile.TemporaryDirectory(dir=part.folder) as folder:
        registry = Registry(folder)

        def make() -> DraftModelProposer:
            return DraftModelProposer(model(size.draft, seed=1))

        route = Route("default", make, registry)
        drafters = Drafters([route], GateConfig(canary_fraction=0.0), poll_seconds=POLL_SECONDS)
        engine = Engine(
            target,
            drafters,
            decode=lambda ids: " ".join(map(str, ids)),
            serve=ServeConfig(
                slots=size.slots,
                queue=2 * size.clients,
                max_length=size.prompt_tokens + size.new_tokens,
                adapts=False,
                top_logprobs=0,
            ),
            decoding=DecodeConfig(gamma=size.gamma, compile=code),
        )
        load = Load(engine, size, part.config.seed)
        newer = model(size.draft, seed=2)

        def publish() -> None:
            registry.publish(saved(newer), metrics={}, canary=False)

        engine.start()
        try:
            return measured(engine, load, publish)
        finally:
            load.stop()
            engine.stop()


def run(part: Part) -> None:
    """The server under load, with code of either kind; on a CPU eager."""
    size = REHEARSED if part.rehearses else REAL
    on_cuda = resolve_device(part.config.hardware).type == "cuda"
    told = {"clients": size.clients, "slots": size.slots, "gamma": size.gamma}
    for name, code in (("captured", "captured"), ("compiled", "true" if on_cuda else "false")):
        part.step(
            f"load, {name}",
            lambda code=code: told | under_load(part, size, code),
            guess=GUESSES[name],
        )
