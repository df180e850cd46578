"""The table tells the truth in 80 columns; the curve is drawn."""

from pathlib import Path
from typing import Any

from rich.console import Console

from pipelines.benchmarks.drift_report import CURVES, drift_figure, drift_table, short


def estimate(mean: float, half: float = 0.01) -> dict[str, Any]:
    return {"mean": mean, "ci95": [mean - half, mean + half], "n": 100, "prompts": 10}


def row(domain: str, share: float, recovered: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "domain": domain,
        "share": share,
        **{f"alpha_{name}": estimate(0.8123) for name in CURVES},
        "recovered_online": recovered,
        "recovered_without_anchors": recovered,
        "first_domain_change_online": estimate(-0.0123),
        "first_domain_change_without_anchors": estimate(-0.0456),
        "first_domain_kept_by_anchors": estimate(0.0333),
    }


SUMMARY = {
    "tests": [row("prose", 0.1, estimate(0.71)), row("cpp", 1.0, None)],
    "versions_published": 12,
    "versions_rejected": 3,
    "update_seconds": 101.4,
    "records_seen": 3200,
    "recovered_from": {"prose": 0.3, "cpp": None},
}


def shown(summary: dict[str, Any]) -> str:
    console = Console(width=80, record=True, quiet=False)
    console.print(drift_table(summary))
    return console.export_text()


def test_estimates_are_means_with_half_their_interval() -> None:
    assert short(estimate(0.81234, 0.0056)) == "0.812 ±0.006"
    assert short(estimate(-0.01, 0.002), signed=True) == "-0.010 ±0.002"
    assert short(None) == "no gap"
    assert short(estimate(0.5) | {"ci95": None}) == "0.500"


def test_the_table_holds_every_figure_in_80_columns() -> None:
    text = shown(SUMMARY)
    assert max(map(len, text.splitlines())) <= 80
    whole = " ".join(text.split())
    cells = ("0.812 ±0.010", "0.71 ±0.01", "no gap", "-0.012", "-0.046", "+0.033")
    for part in ("prose 10%", "cpp 100%", *cells):
        assert part in whole
    assert "12 versions published, 3 refused; 101 s of updates for 3200 requests" in whole
    assert "prose 30%, cpp never" in whole
    assert "…" not in text


def test_the_curve_is_drawn_with_its_updates(tmp_path: Path) -> None:
    points = [
        {
            "domain": domain,
            "first": first,
            "last": first + 10,
            "alpha": {name: estimate(0.8 + place / 100) for place, name in enumerate(CURVES)},
        }
        for first, domain in ((0, "prose"), (10, "prose"), (20, "cpp"), (30, "cpp"))
    ]
    updates = [
        {"service": "online", "request": 10, "version": "v000002"},
        {"service": "online", "request": 20, "version": None},
        {"service": "without_anchors", "request": 10, "version": "v000002"},
    ]
    with_updates, without = tmp_path / "a.png", tmp_path / "b.png"
    drift_figure(points, updates, with_updates)
    drift_figure(points, [], without)
    assert with_updates.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert with_updates.read_bytes() != without.read_bytes()
    points[0]["alpha"]["static"] |= {"ci95": None}  # of too few documents
    drift_figure(points, updates, without)
