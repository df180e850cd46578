"""What Prometheus reads: vLLM's names where vLLM has one, `draftkit:` for the rest.

Counts come from the engine when they are asked for, so serving never waits for them; latencies
are observed as answers are sent. Everything lives in a registry of its own.
"""

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from draftkit.serving.engine import Engine
from draftkit.serving.jobs import DrafterCounters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # seconds
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """The metrics of one server, labelled with the name that clients call its model by."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(engine, model_name))

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, what, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model_name)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From request to first token.", LONG
        )
        self.between_tokens = histogram(
            "vllm:inter_token_latency_seconds",
            "Time between tokens; those of one round share it equally.",
            SHORT,
        )
        self.whole = histogram(
            "vllm:e2e_request_latency_seconds", "From request to last token.", LONG
        )
        self._ended = Counter(
            "vllm:request_success",
            "Answers by what ended them.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._model_name = model_name

    def ended(self, reason: str) -> None:
        self._ended.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        """The exposition, of type CONTENT_TYPE."""
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's counts, read when Prometheus asks."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._name = model_name

    def describe(self) -> list[Metric]:
        """None in advance: the engine may not have begun."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics of the engine."""
        yield from self._load()
        yield from self._totals()
        yield from self._by_version()

    def _load(self) -> Iterator[Metric]:
        load = self._engine.load()
        yield self._gauge("vllm:num_requests_running", "Answers being decoded.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Answers that wait.", load.queued)
        yield self._gauge("draftkit:slots", "Answers that can be decoded at once.", load.slots)

    def _totals(self) -> Iterator[Metric]:
        counts = self._engine.counters()
        drafters = list(counts.drafters.values())
        spec = "vllm:spec_decode_num_"
        for name, what, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("vllm:generation_tokens", "Tokens of answers.", counts.generated_tokens),
            (f"{spec}drafts", "Rounds with proposals.", sum(d.drafts for d in drafters)),
            (f"{spec}draft_tokens", "Tokens proposed.", sum(d.drafted for d in drafters)),
            (f"{spec}accepted_tokens", "Of them accepted.", sum(d.accepted for d in drafters)),
            ("draftkit:swaps", "Drafter versions taken into service.", counts.swaps),
            ("draftkit:refused_versions", "Versions not fit to serve.", counts.refused_versions),
            ("draftkit:records_dropped", "Records lost to a full queue.", counts.records_dropped),
            ("draftkit:failed_rounds", "Rounds that ended in an error.", counts.errors),
        ):
            family = CounterMetricFamily(name, what, labels=["model_name"])
            family.add_metric([self._name], value)
            yield family
        yield self._gauge(
            "draftkit:last_swap_seconds",
            "Rounds waited for the last swap.",
            counts.last_swap_seconds,
        )
        yield self._per_position(drafters)

    def _per_position(self, drafters: list[DrafterCounters]) -> Metric:
        accepted: Tally[int] = Tally()
        for drafter in drafters:
            accepted.update(dict(enumerate(drafter.accepted_per_position)))
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by place in the draft.",
            labels=["model_name", "position"],
        )
        for position in sorted(accepted):
            family.add_metric([self._name, str(position)], accepted[position])
        return family

    def _by_version(self) -> Iterator[Metric]:
        labels = ["model_name", "route", "version"]
        alpha = GaugeMetricFamily(
            "draftkit:alpha", "Mean of sum_x min(p, q) over tested positions.", labels=labels
        )
        families = {
            "requests": CounterMetricFamily("draftkit:requests", "Answers ended.", labels=labels),
            "tested": CounterMetricFamily("draftkit:tested", "Positions tested.", labels=labels),
            "drafted": CounterMetricFamily("draftkit:drafted", "Tokens proposed.", labels=labels),
            "accepted": CounterMetricFamily("draftkit:accepted", "Of them kept.", labels=labels),
        }
        for (route, version), counts in sorted(self._engine.counters().drafters.items()):
            values = [self._name, route, version]
            if counts.tested:
                alpha.add_metric(values, counts.acceptance / counts.tested)
            for name, family in families.items():
                family.add_metric(values, getattr(counts, name))
        yield alpha
        yield from families.values()
        info = InfoMetricFamily(
            "draftkit:drafter_version", "The drafter in force.", labels=["model_name", "route"]
        )
        for route, version in sorted(self._engine.versions().items()):
            info.add_metric([self._name, route], {"version": version})
        yield info

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._name], value)
        return family
