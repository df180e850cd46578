"""What Prometheus reads: vLLM's names where vLLM has one, `draftkit:` for the rest.

Counts come from the engine when they are asked for, so serving never waits for them; latencies
are observed as answers are sent. Everything lives in a registry of its own.
"""

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


class Metrics(Collector):
    """The metrics of one server, labelled with the name that clients call its model by."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine, self._model_name = engine, model_name
        self._registry = CollectorRegistry()
        self._registry.register(self)

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

    def ended(self, reason: str) -> None:
        self._ended.labels(self._model_name, reason).inc()

    def render(self) -> bytes:
        """The exposition, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """The engine's counts, read when Prometheus asks."""
        counts = self._engine.counters()
        drafters = dict(sorted(counts.drafters.items()))
        drafted = sum(one.drafted for one in drafters.values())
        accepted = sum(one.accepted for one in drafters.values())
        spec = "vllm:spec_decode_num_"
        for kind, name, what, value in (
            (GAUGE, "vllm:num_requests_running", "Answers being decoded.", counts.running),
            (GAUGE, "vllm:num_requests_waiting", "Answers that wait.", counts.queued),
            (GAUGE, "draftkit:slots", "Answers that can be decoded at once.", self._engine.slots),
            (GAUGE, "draftkit:last_swap_seconds", "The last wait.", counts.last_swap_seconds),
            (COUNTER, "vllm:prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            (COUNTER, "vllm:generation_tokens", "Tokens of answers.", counts.generated_tokens),
            (COUNTER, f"{spec}drafts", "Rounds with proposals.", counts.drafts),
            (COUNTER, f"{spec}draft_tokens", "Tokens proposed.", drafted),
            (COUNTER, f"{spec}accepted_tokens", "Of them accepted.", accepted),
            (COUNTER, "draftkit:swaps", "Versions taken into service.", counts.swaps),
            (COUNTER, "draftkit:refused_versions", "Not fit to serve.", counts.refused_versions),
            (COUNTER, "draftkit:records_dropped", "Records lost.", counts.records_dropped),
            (COUNTER, "draftkit:failed_rounds", "Ended in an error.", counts.errors),
        ):
            yield self._family(kind, name, what, {(): value})
        by_position = {(str(i),): n for i, n in sorted(counts.accepted_per_position.items())}
        yield self._family(
            COUNTER, f"{spec}accepted_tokens_per_pos", "By place.", by_position, "position"
        )
        for name, what in (
            ("requests", "Answers ended."),
            ("tested", "Positions tested."),
            ("drafted", "Tokens proposed."),
            ("accepted", "Of them kept."),
        ):
            values = {key: getattr(one, name) for key, one in drafters.items()}
            yield self._family(COUNTER, f"draftkit:{name}", what, values, "route", "version")
        alphas = {key: one.alpha for key, one in drafters.items() if one.tested}
        what = "Mean of sum_x min(p, q), if tested."
        yield self._family(GAUGE, "draftkit:alpha", what, alphas, "route", "version")
        in_force = sorted(self._engine.drafters.versions().items())
        versions = {(route,): {"version": version} for route, version in in_force}
        name = "draftkit:drafter_version"
        yield self._family(InfoMetricFamily, name, "In force.", versions, "route")

    def _family(
        self, kind: Any, name: str, what: str, values: Mapping[Any, Any], *labels: str
    ) -> Metric:
        """A metric with `values` by tuples of what their `labels` are."""
        family = kind(name, what, labels=["model_name", *labels])
        for label_values, value in values.items():
            family.add_metric([self._model_name, *label_values], value)
        return family
