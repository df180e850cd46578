"""What Prometheus reads."""

from collections import Counter
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from draftkit.online.buffer import Served
from draftkit.serving.answers import Counters
from draftkit.serving.metrics import Metrics
from tests.serving.fakes import FakeEngine

FIRST: Any = {"requests": 3, "tokens": 40, "drafted": 40, "accepted": 20, "tested": 24}
SECOND: Any = {"requests": 2, "tokens": 30, "drafted": 20, "accepted": 15, "tested": 16}
COUNTS = Counters(
    drafters={
        (one.route, one.version): one
        for one in (
            Served(route="default", version="v000001", acceptance=18.0, **FIRST),
            Served(route="default", version="v000002", acceptance=14.4, **SECOND),
            Served(route="code", version="v000001"),
        )
    },
    drafts=15,
    accepted_per_position=Counter(dict(enumerate((14, 10, 7, 4)))),
    prompt_tokens=77,
    swaps=1,
    refused_versions=2,
    last_swap_seconds=0.25,
    records_dropped=3,
    errors=4,
)

Sample = tuple[str, frozenset[tuple[str, str]]]


def samples(metrics: Metrics) -> dict[Sample, float]:
    """Every sample by name and labels, the model's name left out."""
    families = text_string_to_metric_families(metrics.render().decode())
    found = [sample for family in families for sample in family.samples]
    assert all(sample.labels["model_name"] == "tiny" for sample in found)
    return {
        (s.name, frozenset((k, v) for k, v in s.labels.items() if k != "model_name")): s.value
        for s in found
    }


def value(found: dict[Sample, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_counters_have_vllms_names_and_sum_over_routes_and_versions() -> None:
    found = samples(Metrics(FakeEngine(counts=COUNTS), "tiny"))
    spec = "vllm:spec_decode_num_"
    assert value(found, f"{spec}drafts_total") == 15
    assert value(found, f"{spec}draft_tokens_total") == 60
    assert value(found, f"{spec}accepted_tokens_total") == 35
    per_position = [
        value(found, f"{spec}accepted_tokens_per_pos_total", position=str(i)) for i in range(4)
    ]
    assert per_position == [14, 10, 7, 4]
    assert value(found, "vllm:prompt_tokens_total") == 77
    assert value(found, "vllm:generation_tokens_total") == 70
    assert value(found, "vllm:num_requests_running") == 0
    assert value(found, "vllm:num_requests_waiting") == 1


def test_versions_and_what_became_of_them() -> None:
    found = samples(Metrics(FakeEngine(counts=COUNTS), "tiny"))
    assert value(found, "draftkit:alpha", route="default", version="v000001") == 0.75
    assert value(found, "draftkit:alpha", route="default", version="v000002") == 0.9
    untested = ("draftkit:alpha", frozenset({("route", "code"), ("version", "v000001")}))
    assert untested not in found
    assert value(found, "draftkit:tested_total", route="code", version="v000001") == 0
    assert value(found, "draftkit:drafter_version_info", route="default", version="v000002") == 1
    assert value(found, "draftkit:swaps_total") == 1
    assert value(found, "draftkit:refused_versions_total") == 2
    assert value(found, "draftkit:records_dropped_total") == 3
    assert value(found, "draftkit:failed_rounds_total") == 4
    assert value(found, "draftkit:last_swap_seconds") == 0.25


def test_two_servers_in_one_process_share_nothing() -> None:
    one, other = Metrics(FakeEngine(), "tiny"), Metrics(FakeEngine(), "tiny")
    one.whole.observe(1)
    assert value(samples(other), "vllm:e2e_request_latency_seconds_count") == 0
    names = {metric.name for metric in REGISTRY.collect()}
    assert not any(name.startswith(("vllm", "draftkit")) for name in names)
