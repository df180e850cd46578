"""What Prometheus reads: vLLM's names where vLLM has one, `draftkit:` for the rest.

Counts come from the engine when they are asked for, so serving never waits for them; latencies
are observed as answers are sent. Everything lives in a registry of its own.
"""

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily as COUNTER
from prometheus_client.core import GaugeMetricFamily as GAUGE
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from draftkit.serving.engine import Engine

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
        load, counts = self._engine.load(), self._engine.counters()
        drafters = dict(sorted(counts.drafters.items()))
        versions = sorted(self._engine.versions().items())
        accepted: Tally[int] = Tally()
        for drafter in drafters.values():
            accepted.update(drafter.accepted_per_position)

        def total(name: str) -> int:
            return sum(getattr(drafter, name) for drafter in drafters.values())

        for name, what, value in (
            ("vllm:num_requests_running", "Answers being decoded.", load.running),
            ("vllm:num_requests_waiting", "Answers that wait.", load.queued),
            ("draftkit:slots", "Answers that can be decoded at once.", load.slots),
            (
                "draftkit:last_swap_seconds",
                "Rounds waited for the last swap.",
                counts.last_swap_seconds,
            ),
        ):
            yield self._family(GAUGE, name, what, {(): value})
        spec = "vllm:spec_decode_num_"
        for name, what, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("vllm:generation_tokens", "Tokens of answers.", counts.generated_tokens),
            (f"{spec}drafts", "Rounds with proposals.", total("drafts")),
            (f"{spec}draft_tokens", "Tokens proposed.", total("drafted")),
            (f"{spec}accepted_tokens", "Of them accepted.", total("accepted")),
            ("draftkit:swaps", "Drafter versions taken into service.", counts.swaps),
            ("draftkit:refused_versions", "Versions not fit to serve.", counts.refused_versions),
            ("draftkit:records_dropped", "Records lost to a full queue.", counts.records_dropped),
            ("draftkit:failed_rounds", "Rounds that ended in an error.", counts.errors),
        ):
            yield self._family(COUNTER, name, what, {(): value})
        yield self._family(
            COUNTER,
            f"{spec}accepted_tokens_per_pos",
            "Accepted tokens by place in the draft.",
            {(str(position),): accepted[position] for position in sorted(accepted)},
            "position",
        )
        yield self._family(
            GAUGE,
            "draftkit:alpha",
            "Mean of sum_x min(p, q) over tested positions.",
            {key: one.acceptance / one.tested for key, one in drafters.items() if one.tested},
            "route",
            "version",
        )
        for name, what in (
            ("requests", "Answers ended."),
            ("tested", "Positions tested."),
            ("drafted", "Tokens proposed."),
            ("accepted", "Of them kept."),
        ):
            values = {key: getattr(drafter, name) for key, drafter in drafters.items()}
            yield self._family(COUNTER, f"draftkit:{name}", what, values, "route", "version")
        yield self._family(
            InfoMetricFamily,
            "draftkit:drafter_version",
            "The drafter in force.",
            {(route,): {"version": version} for route, version in versions},
            "route",
        )

    def _family(
        self, kind: Any, name: str, what: str, values: Mapping[Any, Any], *labels: str
    ) -> Metric:
        """`values`: by the tuple of their `labels`."""
        family = kind(name, what, labels=["model_name", *labels])
        for label_values, value in values.items():
            family.add_metric([self._name, *label_values], value)
        return family
