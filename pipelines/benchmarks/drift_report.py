"""What the drift experiment shows people: a table of 80 columns and the curve of the stream.

Renders what `pipelines.benchmarks.drift` stores; computes nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from draftkit.artifacts import atomic_path

COLOURS = {"oracle": "#9a9a9a", "online": "#1f4e79", "without_anchors": "#c06a2b", "static": "#444"}
LABELS = {
    "oracle": "oracle (has learned these very requests)",
    "online": "online, with anchors",
    "without_anchors": "online, without anchors",
    "static": "static",
}


def short(estimate: dict[str, Any] | None, digits: int = 3, *, signed: bool = False) -> str:
    """`0.812 ±0.011`, half the width of the interval behind the mean."""
    if estimate is None:
        return "no gap"
    mean = f"{estimate['mean']:{'+' if signed else ''}.{digits}f}"
    if estimate["ci95"] is None:
        return mean
    low, high = estimate["ci95"]
    return f"{mean} ±{(high - low) / 2:.{digits}f}"


def drift_table(summary: dict[str, Any]) -> Table:
    """A column a test: early in a domain's stream, and at its end."""
    since = ", ".join(
        f"{domain} {'never' if share is None else f'{share:.0%}'}"
        for domain, share in summary["recovered_from"].items()
    )
    caption = (
        "recovered: (online - static) / (oracle - static); first domain: alpha gained there since "
        "the static drafter, without anchors, and the difference. "
        f"{summary['versions_published']} versions published, {summary['versions_rejected']} "
        f"refused; {summary['update_seconds']:.0f} s of updates for "
        f"{summary['records_seen']} requests. 70 % of the gap won on unseen requests from: {since}."
    )
    title = "alpha on held-out text, with half the width of its 95 % interval"
    table = Table(title=title, caption=caption, show_edge=False, pad_edge=False)
    table.add_column("after this much of the stream")
    tests = summary["tests"]
    for test in tests:
        table.add_column(f"{test['domain']} {test['share']:.0%}", justify="right", no_wrap=True)
    for name in ("static", "online", "without_anchors", "oracle"):
        table.add_row(name.replace("_", " "), *(short(test[f"alpha_{name}"]) for test in tests))
    table.add_row("recovered", *(short(test["recovered_online"], 2) for test in tests))
    for key, label in (
        ("first_domain_change_online", "first domain"),
        ("first_domain_change_without_anchors", "- no anchors"),
        ("first_domain_kept_by_anchors", "- anchors kept"),
    ):
        table.add_row(label, *(short(test[key], signed=True) for test in tests))
    return table


def drift_figure(
    points: Sequence[dict[str, Any]], updates: Sequence[dict[str, Any]], path: Path
) -> None:
    """Draw alpha along the stream and what was published when, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots()
    domains = list(dict.fromkeys(point["domain"] for point in points))
    for name, colour in COLOURS.items():
        for domain in domains:
            mine = [point for point in points if point["domain"] == domain]
            requests = [point["first"] for point in mine]
            alphas = [point["alpha"][name] for point in mine]
            label = LABELS[name] if domain == domains[0] else None
            axes.plot(requests, [alpha["mean"] for alpha in alphas], color=colour, label=label)
            unknown = (float("nan"), float("nan"))
            low, high = zip(*(alpha["ci95"] or unknown for alpha in alphas), strict=True)
            axes.fill_between(requests, low, high, color=colour, alpha=0.15, linewidth=0)
    bottom, top = axes.get_ylim()
    for domain in domains:
        start = next(point["first"] for point in points if point["domain"] == domain)
        axes.axvline(start, color="#cccccc", linewidth=1, zorder=0)
        axes.text(start, top, f" {domain}", va="top", color="#666666")
    for update in updates:
        if update["service"] == "online":
            height = 0.03 if update["version"] else 0.015
            colour = COLOURS["online"] if update["version"] else "#bbbbbb"
            axes.axvline(update["request"], ymax=height, color=colour, linewidth=1)
    axes.set(xlabel="requests (ticks below: updates, long ones published)", ylabel="alpha")
    axes.set_ylim(bottom, top)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
