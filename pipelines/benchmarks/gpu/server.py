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
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from draftkit.config import DecodeConfig, SamplingConfig, ServeConfig
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.online.registry import Registry
from draftkit.serving.drafters import Drafters, Route
from draftkit.serving.engine import Engine
from draftkit.serving.jobs import Draining, Job, Piece

from ..random_models import TINY, random_model, random_texts, shape
from .part import Part

PATIENCE = 300.0  # seconds that an answer may take: code is compiled for the first
POLL_SECONDS = 0.1
GUESSES = {"captured": 30.0, "compiled": 90.0}  # seconds of either load on a GPU


class Heard(NamedTuple):
    """One piece of an answer, as its client heard it."""

    time: float
    tokens: int
    first: bool
    waited: float  # since the request, or the piece before


class Load:
    """Clients on threads of their own, each with a prompt that it sends again and again."""

    def __init__(self, engine: Engine, prompts: list[list[int]], new_tokens: int) -> None:
        self.engine, self.new_tokens = engine, new_tokens
        self.heard: list[Heard] = []
        self.ends: list[str] = []  # why each answer ended
        self.stopping = threading.Event()
        self.threads = [
            threading.Thread(target=self._client, args=(prompt,), daemon=True) for prompt in prompts
        ]

    def _client(self, prompt: list[int]) -> None:
        sampling = SamplingConfig(temperature=1.0)
        job = Job(prompt_ids=prompt, max_new_tokens=self.new_tokens, sampling=sampling)
        while not self.stopping.is_set():
            ended, last, first = threading.Event(), time.monotonic(), True

            def listen(piece: Piece, ended: threading.Event = ended) -> None:
                nonlocal last, first
                now = time.monotonic()
                self.heard.append(Heard(now, len(piece.scores), first, now - last))
                last, first = now, False
                if piece.finish_reason is not None:
                    self.ends.append(piece.finish_reason)
                    ended.set()

            try:
                self.engine.submit([job], [listen])
            except Draining:
                return
            if not ended.wait(PATIENCE):
                return


def measured(
    engine: Engine, load: Load, publish: Callable[[], object], seconds: float
) -> dict[str, Any]:
    """Rates and waits of the seconds that count, with a swap in their midst."""
    load_started = time.monotonic()
    for thread in load.threads:
        thread.start()
    _until(lambda: len(load.ends) >= 2 * len(load.threads))
    began, swaps = time.monotonic(), engine.counters().swaps
    time.sleep(seconds / 2)
    published = time.monotonic()
    publish()
    _until(lambda: engine.counters().swaps > swaps)
    swapped = time.monotonic()
    time.sleep(seconds / 2)
    ended = time.monotonic()
    heard = [piece for piece in load.heard if began <= piece.time < ended]
    firsts = [piece.waited for piece in heard if piece.first]
    others = [piece for piece in heard if not piece.first]
    around = [piece.waited for piece in others if published <= piece.time < swapped + 1]
    return {
        "warming_seconds": began - load_started,
        "tokens_per_second": sum(piece.tokens for piece in heard) / (ended - began),
        "answers": len(firsts),
        "first_token_seconds": quantiles(firsts),
        "between_pieces_seconds": quantiles([piece.waited for piece in others]),
        "longest_around_swap_seconds": max(around, default=None),
        "publish_to_swap_seconds": swapped - published,
        "rounds_waited_seconds": engine.counters().last_swap_seconds,
        "errors": engine.counters().errors,
        "ends": dict(Counter(load.ends)),
    }


def quantiles(values: list[float]) -> dict[str, float] | None:
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


def under_load(part: Part, code: str) -> dict[str, Any]:
    """Start an engine that runs rounds as `code`, load it, stop it."""
    counts = {"clients": part.size(32, 3), "slots": part.size(16, 2), "gamma": part.size(4, 2)}
    prompt_tokens, new_tokens = part.size(64, 4), part.size(96, 6)
    vocab_size = part.size(128_256, 300)
    target_shape = part.size(shape(16, 2048, 8192, 32, 2048), TINY)
    draft_shape = part.size(shape(6, 768, 3072, 12, 2048), TINY)
    model = partial(random_model, hardware=part.config.hardware, vocab_size=vocab_size)
    newer: Any = model(draft_shape, seed=2).model
    prompts = random_texts(
        counts["clients"], prompt_tokens, vocab_size=vocab_size, seed=part.config.seed
    )
    with tempfile.TemporaryDirectory(dir=part.folder) as folder:
        registry = Registry(folder)
        route = Route("default", DraftModelProposer(model(draft_shape, seed=1)), registry)
        engine = Engine(
            model(target_shape, seed=0),
            Drafters([route], poll_seconds=POLL_SECONDS),
            decode=lambda ids: " ".join(map(str, ids)),
            serve=ServeConfig(
                slots=counts["slots"],
                queue=2 * counts["clients"],
                max_length=prompt_tokens + new_tokens,
                adapts=False,
                top_logprobs=0,
            ),
            decoding=DecodeConfig(gamma=counts["gamma"], compile=code),
        )
        load = Load(engine, prompts, new_tokens)
        publish = partial(registry.publish, newer.save_pretrained, metrics={})
        engine.start()
        try:
            return counts | measured(engine, load, publish, part.size(20.0, 0.3))
        finally:
            load.stopping.set()
            engine.stop()


def run(part: Part) -> None:
    """The server under load, with code of either kind; on a CPU eager."""
    compiled = "true" if part.device.type == "cuda" else "false"
    for name, code in (("captured", "captured"), ("compiled", compiled)):
        part.step(f"load, {name}", lambda code=code: under_load(part, code), guess=GUESSES[name])
