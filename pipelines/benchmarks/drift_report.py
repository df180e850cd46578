"""What the drift experiment shows people: a table of 80 columns and the curve of the stream.

Renders what `pipelines.benchmarks.drift` stores; computes nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from draftkit.artifacts import atomic_path

ONLINE, BARE = "online", "without_anchors"
CURVES = {  # colour and label
    "oracle": ("#9a9a9a", "oracle (has learned these very requests)"),
    ONLINE: ("#1f4e79", "online, with anchors"),
    BARE: ("#c06a2b", "online, without anchors"),
    "static": ("#444", "static"),
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
    for name in ("static", ONLINE, BARE, "oracle"):
        table.add_row(name.replace("_", " "), *(short(test[f"alpha_{name}"]) for test in tests))
    table.add_row("recovered", *(short(test[f"recovered_{ONLINE}"], 2) for test in tests))
    for key, label in (
        (f"first_domain_change_{ONLINE}", "first domain"),
        (f"first_domain_change_{BARE}", "- no anchors"),
        ("first_domain_kept_by_anchors", "- anchors kept"),
    ):
        table.add_row(label, *(short(test[key], signed=True) for test in tests))
    return table


def drift_figure(
    points: Sequence[dict[str, Any]], updates: Sequence[dict[str, Any]], path: Path
) -> None:
    """Draw alpha along the stream and what was published when, as PNG.

    A domain begins at a dotted line. Ticks below are updates, the long ones published.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="requests (ticks below: updates, long ones published)", ylabel="alpha")
    requests, unknown = [point["first"] for point in points], (float("nan"), float("nan"))
    for name, (colour, label) in CURVES.items():
        alphas = [point["alpha"][name] for point in points]
        axes.plot(requests, [alpha["mean"] for alpha in alphas], color=colour, label=label)
        low, high = zip(*(alpha["ci95"] or unknown for alpha in alphas), strict=True)
        axes.fill_between(requests, low, high, color=colour, alpha=0.15, linewidth=0)
    begun = {point["domain"]: point["first"] for point in reversed(points)}
    for domain, request in begun.items():
        axes.axvline(request, color="#cccccc", linestyle=":", zorder=0)
        axes.text(request, axes.get_ylim()[1], f" {domain}", va="bottom", color="#666666")
    for update in updates:
        if update["service"] == ONLINE:
            height = 0.03 if update["version"] else 0.015
            axes.axvline(update["request"], ymax=height, color=CURVES[ONLINE][0], linewidth=1)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
