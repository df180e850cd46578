"""Under load: throughput, and for how long a swap holds rounds.

Ratios of neighbours in time, medians of them: other work on the machine hits both sides.
"""

import copy
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftkit.config import SamplingConfig
from draftkit.models.adapter import Adapter
from draftkit.online.registry import Registry
from draftkit.serving.engine import Engine
from tests import tiny
from tests.serving.running import answers, job, publish, serving, until

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
TARGET, DRAFT = tiny.pair(**SHAPE, noise=0.05)
PROMPTS = tiny.prompts([12] * 32)
SAMPLING = SamplingConfig(temperature=0.8)
NEW = 32


def draft() -> Adapter:
    return copy.deepcopy(DRAFT)


def run(engine: Engine, clients: int, each: int) -> float:
    """Requests a second of so many clients at once."""

    def client(number: int) -> None:
        for _ in range(each):
            (one,) = answers(engine, job(PROMPTS[number], NEW, sampling=SAMPLING))
            assert (one.reason, len(one.ids)) == ("length", NEW)

    started = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    return clients * each / (time.monotonic() - started)


@pytest.mark.soak
def test_many_clients_are_served_at_twice_the_rate_of_one() -> None:
    with serving(TARGET, draft, slots=16, queue=64) as engine:
        run(engine, 16, 1)
        ratios = []
        for _ in range(3):
            single = run(engine, 1, 6)
            ratios.append(run(engine, 32, 3) / single)
        assert statistics.median(ratios) >= 2
        assert engine.counters().errors == 0


@pytest.mark.soak
def test_a_swap_holds_the_rounds_for_less_than_one_of_them(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    weights = {name: tensor.clone() for name, tensor in DRAFT.weights().items()}
    with serving(TARGET, draft, slots=16, queue=64, registries={"default": registry}) as engine:
        rounds: list[float] = []
        step = engine._round

        def timed() -> None:
            started = time.perf_counter()
            step()
            rounds.append(time.perf_counter() - started)

        engine._round = timed
        swaps = []
        load = threading.Thread(target=run, args=(engine, 32, 8))
        load.start()
        while load.is_alive():
            name = publish(registry, weights)
            until(lambda name=name: engine.drafters.versions()["default"] == name)
            swaps.append(engine.counters().last_swap_seconds)
        load.join()
    assert len(swaps) >= 20
    assert statistics.median(swaps) < statistics.median(rounds)
