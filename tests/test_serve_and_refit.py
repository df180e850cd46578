"""Server and daemon as two processes under load: two routes, each with a drafter of its own."""

from pathlib import Path

import pytest

from draftkit.artifacts import read_json
from pipelines.online import online
from pipelines.serve_and_refit import asked
from pipelines.service import buffer_of, registry_of
from pipelines.texts import splits_of
from tests.test_online import composed, ended, start

ROUTES = ["online.routes=[default,code]", "online.traffic.domains=[prose,cpp]"]
LOAD = ["online.traffic.requests=120", "online.traffic.max_new_tokens=12"]
EAGER = [
    "online.gate.fraction=0.4",
    "online.gate.canary_fraction=0",  # nobody serves when the daemon comes to publish
    "online.steps=30",
    "optim.learning_rate=1e-2",
]


@pytest.mark.timeout(240)
def test_each_route_is_served_recorded_and_refitted_by_itself(tmp_path: Path) -> None:
    """The whole experiment, then a daemon that has time enough for one update of each route."""
    words = ["+experiment=serve_and_refit", *ROUTES, *LOAD, *EAGER]
    config = composed(tmp_path, *words)
    summary = read_json(online.ensure(config) / "summary.json")
    assert summary["alive"] == {"server": True, "daemon": True}
    assert summary["requests"] == 120
    served = {"default": 0, "code": 0}
    for row in summary["served"]:
        served[row["route"]] += row["requests"]
    assert served == {"default": 60, "code": 60}
    buffer = buffer_of(config)
    prompts = {
        domain: {tuple(one.prompt_ids) for one in splits_of(config).train if one.domain == domain}
        for domain in ("prose", "cpp")
    }
    for route, domain in (("default", "prose"), ("code", "cpp")):
        kept = [
            tuple(stored.record.prompt_ids)
            for held_out in (False, True)
            for stored in buffer.newest(route, 1000, held_out=held_out)
        ]
        assert len(kept) == 60
        assert set(kept) <= prompts[domain]
    buffer.close()
    begun = summary.get("versions_published", 0) + summary.get("versions_rejected", 0)
    if begun < 2:  # the load had ended before the daemon was there
        done = start(tmp_path, config.name, *ROUTES, *EAGER, f"online.most_updates={2 - begun}")
        assert "all updates done" in ended(done)
    for route in ("default", "code"):
        registry = registry_of(config, route)
        first, *later = registry.versions()
        assert later, route
        assert registry.current() == later[-1]
        assert later[0].parent == first.name
    weights = [registry_of(config, route).versions()[-1] for route in ("default", "code")]
    assert weights[0].sha256 != weights[1].sha256


def test_domains_that_are_not_there_are_named(tmp_path: Path) -> None:
    words = ["+experiment=serve_and_refit", "online.routes=[default,code]"]
    with pytest.raises(ValueError, match=r"online.traffic.domains names 1 domains for 2"):
        asked(composed(tmp_path, *words))
    with pytest.raises(ValueError, match=r"online.traffic.domains: .* no prompts of 'poems'"):
        asked(composed(tmp_path, *words, "online.traffic.domains=[prose,poems]"))
    requests = asked(composed(tmp_path, *words, *LOAD, "online.traffic.domains=[prose,cpp]"))
    assert [route for route, _ in requests] == ["default", "code"] * 60
