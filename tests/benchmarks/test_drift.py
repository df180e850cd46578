"""A drafter that meets other domains: the service, the stream, what was recovered."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from draftkit.artifacts import read_json
from pipelines.benchmarks import drift as module
from pipelines.benchmarks.drift import EARLY, STAGE, drift_table, recovered, served
from pipelines.command import launch
from pipelines.stage import ensure
from tests.online import making
from tests.test_online import composed


@pytest.fixture(scope="module")
def drifted(root: Path) -> Iterator[Path]:
    """The experiment on a short stream, which stays short as long as this folder is looked at."""
    patch = pytest.MonkeyPatch()
    short = {"REQUESTS": 120, "MAX_NEW_TOKENS": 12, "POINTS": 4, "ORACLE_STEPS": 6}
    for name, value in short.items():
        patch.setattr(module, name, value)
    yield ensure(STAGE, composed(root, "+experiment=drift"))
    patch.undo()


def test_the_summary_has_the_keys_that_others_read(drifted: Path) -> None:
    summary = read_json(drifted / "summary.json")
    for key in ("versions_published", "versions_rejected", "records_seen"):
        assert isinstance(summary[key], int)
    assert summary["records_seen"] == 240
    assert summary["anchor_alpha_change"]["prompts"] == 12
    assert summary["recovered_fraction"] is None or isinstance(summary["recovered_fraction"], float)
    assert len(summary["alpha_by_version"]) == summary["versions_published"]
    shares = [(test["domain"], test["share"]) for test in summary["tests"]]
    assert shares == [("prose", 0.25), ("prose", 1), ("cpp", 0.25), ("cpp", 1)]
    assert EARLY <= 0.25  # the first point at or behind it


def test_the_curve_covers_the_stream_and_its_updates_are_dated(drifted: Path) -> None:
    curve = read_json(drifted / "curve.json")
    assert [point["first"] for point in curve["points"]] == list(range(0, 240, 30))
    assert {"static", "oracle", "online", "without_anchors"} == set(curve["points"][0]["alpha"])
    updates = [update for update in curve["updates"] if update["service"] == "online"]
    assert updates
    assert all(update["seconds"] > 0 for update in updates)
    for point in curve["points"]:  # scored before its requests are recorded
        taken = [u["version"] for u in updates if u["version"] and u["request"] <= point["first"]]
        assert point["versions"]["online"] == ["v000001", *taken][-1]
    assert (drifted / "drift.png").stat().st_size > 10_000


def test_an_interrupted_run_goes_on_and_finds_the_same(drifted: Path, root: Path) -> None:
    """Texts and drafters stay, the stream is gone through again."""
    curve = read_json(drifted / "curve.json")
    made = (drifted / "static" / "model.safetensors").stat().st_mtime_ns
    (drifted / "summary.json").unlink()
    (drifted / "curve.json").unlink()
    ensure(STAGE, composed(root, "+experiment=drift"))
    assert (drifted / "static" / "model.safetensors").stat().st_mtime_ns == made
    again = read_json(drifted / "curve.json")
    assert again["points"] == curve["points"]
    timeless = [
        [{k: v for k, v in update.items() if k != "seconds"} for update in found["updates"]]
        for found in (curve, again)
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("domains", ["[prose]", "[prose,cpp,prose]"])
def test_domains_that_cannot_follow_each_other_are_refused(root: Path, domains: str) -> None:
    with pytest.raises(ValueError, match=r"^data\.domains must name at least two, and none twice"):
        launch(STAGE, composed(root, "+experiment=drift", "name=other", f"data.domains={domains}"))


def test_recovery_is_the_share_of_the_way_that_was_come() -> None:
    names = {"static": 0.5, "oracle": 0.7, "online": 0.65}
    noise = [0.0, 0.05, -0.05, 0.02]
    scored = {name: making.totals([a + n for n in noise]) for name, a in names.items()}
    found = recovered(scored, "online")
    assert found is not None
    assert found.mean == pytest.approx(0.75)
    level = {name: making.totals([0.5 + n for n in noise]) for name in names}
    level["oracle"] = making.totals([0.5 - n for n in noise])
    assert recovered(level, "online") is None


def test_the_table_holds_every_figure_in_80_columns(drifted: Path) -> None:
    summary, console = read_json(drifted / "summary.json"), Console(width=80)
    half = {"mean": 0.8123, "ci95": [0.8067, 0.8179]}
    for test in summary["tests"]:
        test |= {"alpha_oracle": half, "first_domain_change_online": half, "recovered_online": None}
    with console.capture() as capture:
        console.print(drift_table(summary))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for part in ("prose 25%", "cpp 100%", "without anchors", " 0.812 ±0.006", "+0.812", "no gap"):
        assert part in text
    assert "for 240 requests." in " ".join(text.split())


def test_all_that_is_served_is_recorded_and_each_version_is_taken_before_the_next() -> None:
    """A version for every ten records."""
    entries, loaded, done = list[Any](), list[str](), [0]

    def update() -> int:
        done[0] += 1
        return done[0]

    refit: Any = SimpleNamespace(
        buffer=SimpleNamespace(append=entries.extend),
        due=lambda: len(entries) >= 10 * (done[0] + 1),
        update=update,
        registry=SimpleNamespace(current=lambda: f"v{done[0]}", read=lambda version: version),
    )
    draft: Any = SimpleNamespace(load_weights=loaded.append)
    record = making.traffic(1)[0]
    updates = [[*served(refit, draft, [record] * count)] for count in (5, 5, 3, 17)]
    assert updates == [[], [1], [], [2, 3]]
    assert loaded == ["v1", "v2", "v3"]
    assert entries == [("default", record)] * 30
