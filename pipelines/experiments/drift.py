"""The drift experiment: a drafter that knows one domain meets others (Liu et al. 2310.07177, 5.3).

The target knows all domains. The static drafter is trained and distilled on the first one alone; an
oracle is the static one distilled on the whole stream of a domain. In between stands the drafter
that is refitted online from what was served so far, with anchors of the first domain and without.
The curve is taken on requests that nobody has seen; what was recovered after a tenth of a domain's
stream, and what is left of the first domain, on held-out text of the test split.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from draftkit.artifacts import write_json
from draftkit.config import Config
from draftkit.evaluation.alpha import PromptTotals, gains
from draftkit.models.adapter import Adapter
from draftkit.models.loading import load_draft, load_target, with_path
from draftkit.models.remembered import RememberedAdapter
from draftkit.online.refit import Anchors, Update
from draftkit.theory.acceptance import Estimate, Rate, bootstrap
from pipelines.experiments.drift_lab import (
    Lab,
    Texts,
    distil,
    make_service,
    make_static,
    make_texts,
    scores_of,
)
from pipelines.experiments.drift_report import drift_figure
from pipelines.experiments.drift_stream import Point, Service, stream
from pipelines.plan import StageFolder

ONLINE, BARE = "online", "without_anchors"
SCORED = 24  # requests of a point of the curve
EARLY = 0.1  # of a domain's stream: where recovery is read off
ENOUGH = 0.7  # of the gap: recovered
CURVE = "curve.json"


@dataclass
class Log:
    """What happened on the way, in order."""

    points: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)


def recovered(scored: Mapping[str, PromptTotals], name: str) -> Estimate | None:
    """How much of the way from static to oracle `name` has come; None where there is no way."""
    totals = {key: one.totals["alpha"] for key, one in scored.items()}
    counts = scored[name].counts
    way = Rate(totals["oracle"] - totals["static"], counts)
    if not bootstrap(way).excludes(0):
        return None
    come = Rate(totals[name] - totals["static"], counts)
    return bootstrap(come, way, compare=operator.truediv)


def tested(
    lab: Lab, texts: Texts, domain: str, drafts: Mapping[str, Adapter], share: float
) -> dict[str, Any]:
    """The drafters on held-out text: of `domain`, and of the first one, which they may forget."""
    score, first = scores_of(lab), lab.config.online.drift.first
    found = score(drafts, texts.test[domain])
    kept = score({k: v for k, v in drafts.items() if k != "oracle"}, texts.test[first])
    row: dict[str, Any] = {"domain": domain, "share": share}
    for name, scores in found.items():
        row[f"alpha_{name}"] = scores.alpha.as_dict()
    for name in (ONLINE, BARE):
        come = recovered(found, name)
        row[f"recovered_{name}"] = None if come is None else come.as_dict()
        change = gains(after=kept[name], before=kept["static"], seed=0, resamples=2000)["alpha"]
        row[f"first_domain_change_{name}"] = change.as_dict()
    kept_by = gains(after=kept[ONLINE], before=kept[BARE], seed=0, resamples=2000)["alpha"]
    row["first_domain_kept_by_anchors"] = kept_by.as_dict()
    return row


def pointed(point: Point) -> dict[str, Any]:
    """A point of the curve as it is stored."""
    alphas = {name: scored.alpha.as_dict() for name, scored in point.scored.items()}
    return {
        "domain": point.domain,
        "first": point.first,
        "last": point.last,
        "alpha": alphas,
        "versions": point.versions,
    }


def updated(service: Service, request: int, update: Update) -> dict[str, Any]:
    """An update as it is stored."""
    return {
        "service": service.name,
        "request": request,
        "update": update.number,
        "records": update.records,
        "tokens": update.tokens,
        "seconds": round(update.seconds, 3),
        "loss": update.loss,
        "alpha_before": update.before.as_dict(),
        "alpha_after": update.after.as_dict(),
        "version": update.version,
        "reason": update.verdict.reason,
    }


def run(lab: Lab) -> Log:
    """Make texts and drafters, let the stream pass, and test after a tenth and at each end."""
    config, drift, log = lab.config, lab.config.online.drift, Log()
    texts = make_texts(lab)
    static = make_static(lab, texts)
    fixed: dict[str, dict[str, Adapter]] = {}
    for domain in drift.domains:
        name, train = f"oracle-{domain}", texts.train[domain]
        path = distil(lab, name, static, train, texts.validation[domain], drift.oracle_steps)
        paths = {"static": static, "oracle": path}
        fixed[domain] = {
            key: load_draft(with_path(config.draft, one), lab.target) for key, one in paths.items()
        }
    first = drift.first
    anchors = Anchors(texts.train[first], texts.validation[first][: config.online.gate.anchors])
    services = [
        make_service(lab, ONLINE, static, anchors),
        make_service(lab, BARE, static, Anchors()),
    ]

    def tell(service: Service, request: int, update: Update) -> None:
        row = updated(service, request, update)
        log.updates.append(row)
        lab.folder.tracker.log(f"online_{service.name}", len(log.updates), flat(row))

    passed: dict[str, int] = {}
    for point in stream(
        {domain: texts.train[domain] for domain in drift.domains},
        services,
        others=fixed.__getitem__,
        score=scores_of(lab),
        points=drift.points,
        scored=SCORED,
        step=config.online.min_records,
        tell=tell,
    ):
        log.points.append(pointed(point))
        lab.folder.note(said(log.points[-1]))
        passed[point.domain] = passed.get(point.domain, 0) + 1
        share = passed[point.domain] / drift.points
        if passed[point.domain] in (ceil(EARLY * drift.points), drift.points):
            for service in services:
                service.follow()
            drafts = {**fixed[point.domain], **{one.name: one.draft for one in services}}
            log.tests.append(tested(lab, texts, point.domain, drafts, share))
    return log


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an update."""
    numbers = {k: row[k] for k in ("request", "records", "tokens", "seconds", "loss")}
    alphas = {k: row[k]["mean"] for k in ("alpha_before", "alpha_after")}
    return {**numbers, **alphas, "published": float(row["version"] is not None)}


def said(point: dict[str, Any]) -> str:
    """A point of the curve in one line."""
    alphas = (f"{name} {alpha['mean']:.3f}" for name, alpha in point["alpha"].items())
    return f"{point['domain']} {point['first']:>6}: {', '.join(alphas)}"


def early_enough(log: Log, domain: str, name: str) -> float | None:
    """The first share of a domain's stream on whose unseen requests `name` beats the static drafter
    by `ENOUGH` of the gap on held-out text.

    The oracle has learned the stream's own requests, so on those the gap would be too wide.
    """
    points = [point for point in log.points if point["domain"] == domain]
    test = next(test for test in log.tests if test["domain"] == domain)
    gap = test["alpha_oracle"]["mean"] - test["alpha_static"]["mean"]
    start = points[0]["first"]
    for point in points:
        alpha = {key: found["mean"] for key, found in point["alpha"].items()}
        if gap > 0 and alpha[name] - alpha["static"] >= ENOUGH * gap:
            return (point["first"] - start) / (points[-1]["last"] - start)
    return None


def summary_of(log: Log, domains: list[str]) -> dict[str, Any]:
    """The keys of `online`'s summary, and what the table shows."""
    mine = [update for update in log.updates if update["service"] == ONLINE]
    published = [update for update in mine if update["version"] is not None]
    tests = {domain: [row for row in log.tests if row["domain"] == domain] for domain in domains}
    shares = [rows[0][f"recovered_{ONLINE}"] for rows in tests.values()]
    known = [share["mean"] for share in shares if share is not None]
    last = log.tests[-1]
    return {
        "versions_published": len(published),
        "versions_rejected": len(mine) - len(published),
        "alpha_by_version": {update["version"]: update["alpha_after"] for update in published},
        "records_seen": log.points[-1]["last"],
        "recovered_fraction": sum(known) / len(known) if known else None,
        "recovered_from": {domain: early_enough(log, domain, ONLINE) for domain in domains},
        "anchor_alpha_change": last[f"first_domain_change_{ONLINE}"],
        "anchor_alpha_change_without_anchors": last[f"first_domain_change_{BARE}"],
        "update_seconds": sum(update["seconds"] for update in mine),
        "update_tokens": sum(update["tokens"] for update in mine),
        "tests": log.tests,
    }


def drift(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run the experiment in `folder`; figure and curve lie there, the table is in the summary."""
    target = load_target(folder.model(config, "target"), config.hardware)
    lab = Lab(config, folder, target, RememberedAdapter(target.adapter))
    log = run(lab)
    write_json(folder.path / CURVE, {"points": log.points, "updates": log.updates})
    drift_figure(log.points, log.updates, folder.path / "drift.png")
    folder.tracker.figure("online/drift", folder.path / "drift.png")
    return summary_of(log, config.online.drift.domains)
