"""Under load: throughput, fairness, what recording costs, and for how long a swap holds rounds.

Ratios of neighbours in time, medians of them: other work on the machine hits both sides.
"""

import copy
import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftkit.config import BufferConfig, SamplingConfig
from draftkit.models.adapter import Adapter
from draftkit.online.buffer import Buffer
from draftkit.serving.engine import Engine
from tests import tiny
from tests.serving.running import Shelf, answers, job, serving, until

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
TARGET, DRAFT = tiny.pair(**SHAPE, noise=0.05)
PROMPTS = tiny.prompts([12] * 32)
SAMPLING = SamplingConfig(temperature=0.8)
NEW = 32


def draft() -> Adapter:
    return copy.deepcopy(DRAFT)


@dataclass(frozen=True)
class Span:
    """When a request came and when its answer was whole."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def overlaps(self, other: "Span") -> bool:
        return self.start < other.end and other.start < self.end


def run(engine: Engine, clients: int, each: int) -> tuple[float, list[list[Span]]]:
    """Requests a second of so many clients at once, and the spans of each one's requests."""
    spans: list[list[Span]] = [[] for _ in range(clients)]
    failures: list[BaseException] = []

    def client(number: int) -> None:
        try:
            for _ in range(each):
                started = time.monotonic()
                (found,) = answers(engine, job(PROMPTS[number], NEW, sampling=SAMPLING))
                spans[number].append(Span(started, time.monotonic()))
                assert found.reason == "length"
                assert len(found.ids) == NEW
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    return clients * each / (time.monotonic() - started), spans


def unfairness(spans: Sequence[Sequence[Span]]) -> float:
    """The longest wait over the median one of those that waited beside it.

    Of requests that came before any client had ended: after that the queue empties.
    Mates share whatever stalls the machine, so other work on it does not count as unfair.
    """
    end = min(mine[-1].end for mine in spans)
    steady = [span for mine in spans for span in mine if span.start < end]
    worst = 0.0
    for span in steady:
        mates = [other.seconds for other in steady if other.overlaps(span) and other is not span]
        worst = max(worst, span.seconds / statistics.median(mates))
    return worst


@pytest.mark.soak
def test_many_clients_are_served_at_twice_the_rate_of_one_and_fairly() -> None:
    with serving(TARGET, draft, slots=16, queue=64) as engine:
        run(engine, 16, 1)
        ratios = []
        for _ in range(3):
            single, _ = run(engine, 1, 6)
            many, _ = run(engine, 32, 3)
            ratios.append(many / single)
        assert statistics.median(ratios) >= 2
        _, spans = run(engine, 32, 20)
        assert engine.counters().errors == 0
    assert unfairness(spans) <= 2
    totals = [sum(span.seconds for span in mine) for mine in spans]  # of 20 requests each
    assert max(totals) <= 2 * statistics.median(totals)


@pytest.mark.soak
def test_who_joins_last_first_is_not_fair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure above bites: where the newest job joins first, old ones wait."""
    with serving(TARGET, draft, slots=16, queue=64) as engine:
        admit, arrivals = engine._admit, {}

        def newest_first() -> None:
            with engine._changed:
                for answer in engine._waiting:
                    arrivals.setdefault(answer, len(arrivals))
                engine._waiting = deque(sorted(engine._waiting, key=arrivals.get, reverse=True))
            admit()

        monkeypatch.setattr(engine, "_admit", newest_first)
        _, spans = run(engine, 32, 6)
    assert unfairness(spans) > 2


@pytest.mark.soak
def test_recording_costs_at_most_three_hundredths_of_the_processor(tmp_path: Path) -> None:
    """By processor time, which other work on the machine moves less than the rate.

    What is refused is a median of ten ratios that lies surely, at 97 %, above the bound.
    """
    buffer = Buffer(tmp_path / "traffic.db", BufferConfig())
    none, all_of_them = BufferConfig(fraction=0.0), BufferConfig()
    with (
        serving(TARGET, draft, slots=16, queue=64, buffer=none) as bare,
        serving(TARGET, draft, slots=16, queue=64, disk=buffer, buffer=all_of_them) as recording,
    ):
        ratios = []
        for _ in range(12):
            spent = []
            for engine in (bare, recording):
                started = time.process_time()
                run(engine, 32, 2)
                spent.append(time.process_time() - started)
            ratios.append(spent[1] / spent[0])
    buffer.close()
    least = sorted(ratios[2:])[1]  # of ten: the lower end of the median's interval
    assert least <= 1.03, ratios


@pytest.mark.soak
def test_a_swap_holds_the_rounds_for_less_than_one_of_them() -> None:
    shelf = Shelf()
    weights = {name: tensor.clone() for name, tensor in DRAFT.weights().items()}
    with serving(TARGET, draft, slots=16, queue=64, registries={"default": shelf}) as engine:
        rounds: list[float] = []
        step = engine._rows.round

        def timed() -> None:
            started = time.perf_counter()
            step()
            rounds.append(time.perf_counter() - started)

        engine._rows.round = timed
        swaps = []
        load = threading.Thread(target=run, args=(engine, 32, 8))
        load.start()
        while load.is_alive():
            name = shelf.publish(weights)
            until(lambda name=name: engine.versions()["default"] == name)
            swaps.append(engine.counters().last_swap_seconds)
        load.join()
    assert len(swaps) >= 20
    assert statistics.median(swaps) < statistics.median(rounds)
