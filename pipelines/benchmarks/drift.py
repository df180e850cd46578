"""`python -m pipelines.benchmarks.drift`: a drafter that knows one domain meets others.

The experiment of Liu et al. (2310.07177, 5.3), simulated. The target knows all domains; they come
in the order of `data.domains`. The static drafter is trained and distilled on the first one alone;
an oracle is the static one distilled on the whole stream of a domain. In between stands the drafter
that is refitted online from what was served so far, with anchors of the first domain and without.

What a server answers has the target's law whatever its drafter, so the stream is sampled once and
shown to all. The curve is taken on requests that nobody has seen; then they are recorded, and
updates happen where they are due, without HTTP and without waiting. What was recovered after a
tenth of a domain's stream, and what is left of the first domain, is alpha on held-out text.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config
from draftkit.data.rollouts import Record
from draftkit.evaluation.alpha import PromptTotals
from draftkit.models.adapter import Adapter
from draftkit.models.loading import load_target
from draftkit.online.refit import Update
from draftkit.online.rows import Anchors
from draftkit.theory.acceptance import Estimate, Rate, estimate

from ..command import main
from ..plan import ROLLOUTS, TARGET_MODEL, TEXTS
from ..product import SUMMARY, Stage
from ..stage import StageFolder
from .drift_parts import Experiment
from .drift_report import drift_figure, drift_table

ONLINE, BARE = "online", "without_anchors"
POINTS = 20  # of a domain's curve
ORACLE_STEPS = 800
SCORED = 24  # requests of a point of the curve
EARLY = 0.1  # of a domain's stream: where recovery is read off
ENOUGH = 0.7  # of the gap: recovered
CURVE = "curve.json"
STAGE = Stage(
    name="drift",
    code="benchmarks.drift",
    reads=(
        *("seed", "data", "sampling", "divergence", "optim", "decode", "online"),
        *("draft.pretrain", "draft.shrink", "draft.lora", *ROLLOUTS),
        *("evaluate.prompts", "evaluate.validation_prompts", "evaluate.batch_size"),
    ),
    inputs=(TEXTS, TARGET_MODEL),
    version=3,
    product=None,
)

Rows = list[dict[str, Any]]


def recovered(scored: Mapping[str, PromptTotals], name: str) -> Estimate | None:
    """How much of the way from static to oracle `name` has come; None where there is no way."""
    totals = {key: of_draft.totals["alpha"] for key, of_draft in scored.items()}
    counts, documents = scored[name].counts, scored[name].documents
    way = Rate(totals["oracle"] - totals["static"], counts, documents)
    if not estimate(way, least=2).excludes(0):
        return None
    come = Rate(totals[name] - totals["static"], counts, documents)
    return estimate(come, way, compare=operator.truediv)


def tested(
    experiment: Experiment,
    drafts: Mapping[str, Adapter],
    *,
    test: Sequence[Record],
    first: Sequence[Record],
) -> dict[str, Any]:
    """The drafters on held-out text: `test` of a domain, and of the `first`, which they forget."""
    scored = experiment.score(drafts, test)
    kept = experiment.score({n: d for n, d in drafts.items() if n != "oracle"}, first)
    row: dict[str, Any] = {f"alpha_{n}": totals.alpha.as_dict() for n, totals in scored.items()}
    for name in (ONLINE, BARE):
        come = recovered(scored, name)
        row[f"recovered_{name}"] = None if come is None else come.as_dict()
        row[f"first_domain_change_{name}"] = kept[name].gain(kept["static"]).as_dict()
    return row | {"first_domain_kept_by_anchors": kept[ONLINE].gain(kept[BARE]).as_dict()}


def noted(service: str, request: int, update: Update) -> dict[str, Any]:
    """An update of a service as the curve stores it, behind how many requests of the stream."""
    return {
        "service": service,
        "request": request,
        "seconds": round(update.seconds, 3),
        "alpha_before": update.before.as_dict(),
        "alpha_after": update.after.as_dict(),
        "version": update.version,
        "reason": update.verdict.reason,
    }


def stream(experiment: Experiment) -> tuple[Rows, Rows, Rows]:
    """Let the domains pass: points of the curve, updates, and tests, early and at each end.

    A point is alpha by drafter on requests `first` .. `last` - 1 of the whole stream, before any
    drafter saw them.
    """
    config, folder = experiment.config, experiment.folder
    known, *new = config.data.domains
    texts = {domain: experiment.texts(domain) for domain in config.data.domains}
    static = experiment.static(texts[known])
    oracles = {
        domain: experiment.distil(f"oracle-{domain}", static, texts[domain], ORACLE_STEPS)
        for domain in new
    }
    anchors = Anchors(texts[known].train, texts[known].validation[: config.online.gate.anchors])
    services = {
        name: experiment.service(name, static, kept)
        for name, kept in ((ONLINE, anchors), (BARE, Anchors()))
    }
    points, updates, tests, before = Rows(), Rows(), Rows(), 0
    for domain, oracle in oracles.items():
        records, drafts = texts[domain].train, {name: one.draft for name, one in services.items()}
        drafts |= {"static": experiment.draft(static), "oracle": experiment.draft(oracle)}
        edges = [len(records) * part // POINTS for part in range(POINTS + 1)]
        for passed, (first, last) in enumerate(pairwise(edges), 1):
            scored = experiment.score(drafts, records[first : min(last, first + SCORED)])
            alphas = {name: totals.alpha.as_dict() for name, totals in scored.items()}
            part = {"domain": domain, "first": before + first, "last": before + last}
            versions = {name: service.version for name, service in services.items()}
            points.append(part | {"alpha": alphas, "versions": versions})
            shown = (f"{name} {alpha['mean']:.3f}" for name, alpha in alphas.items())
            folder.note(f"{domain} {before + first:>6}: {', '.join(shown)}")
            for start in range(first, last, config.online.min_records):
                end = min(last, start + config.online.min_records)
                for name, service in services.items():
                    for update in service.record(records[start:end]):
                        updates.append(noted(name, before + end, update))
            if passed in (ceil(EARLY * POINTS), POINTS):
                row = {"domain": domain, "share": passed / POINTS}
                held_out = {"test": texts[domain].test, "first": texts[known].test}
                tests.append(row | tested(experiment, drafts, **held_out))
        before += len(records)
    return points, updates, tests


def early_enough(points: Rows, gap: float) -> float | None:
    """The first share of a domain's stream, by its `points`, on whose unseen requests the online
    drafter beats the static one by `ENOUGH` of the `gap` on held-out text.

    The oracle has learned the stream's own requests, so on those the gap would be too wide.
    """
    start, end = points[0]["first"], points[-1]["last"]
    for point in points:
        gained = point["alpha"][ONLINE]["mean"] - point["alpha"]["static"]["mean"]
        if gap > 0 and gained >= ENOUGH * gap:
            return (point["first"] - start) / (end - start)
    return None


def check(config: Config) -> None:
    """Raise ValueError for domains that cannot follow each other."""
    domains = config.data.domains
    if len(domains) < 2 or len(set(domains)) < len(domains):
        raise ValueError(f"data.domains must name at least two, and none twice, got {domains}")


def show(config: Config, folder: Path) -> None:
    """Print the table of a complete experiment."""
    Console(width=80).print(drift_table(read_json(folder / SUMMARY)))


def drift(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run the experiment in `folder`; figure and curve lie there, the table is in the summary."""
    target = load_target(folder.model(config, "target"), config.hardware)
    points, updates, tests = stream(Experiment(config, folder, target))
    write_json(folder.path / CURVE, {"points": points, "updates": updates})
    drift_figure(points, updates, folder.path / "drift.png")
    folder.tracker.figure("online/drift", folder.path / "drift.png")
    mine = [update for update in updates if update["service"] == ONLINE]
    published = [update for update in mine if update["version"] is not None]
    early, since = [test for test in tests if test["share"] < 1], {}
    for test in early:
        own = [point for point in points if point["domain"] == test["domain"]]
        gap = test["alpha_oracle"]["mean"] - test["alpha_static"]["mean"]
        since[test["domain"]] = early_enough(own, gap)
    shares = [one["mean"] for test in early if (one := test[f"recovered_{ONLINE}"]) is not None]
    return {
        "versions_published": len(published),
        "versions_rejected": len(mine) - len(published),
        "alpha_by_version": {update["version"]: update["alpha_after"] for update in published},
        "records_seen": points[-1]["last"],
        "recovered_fraction": sum(shares) / len(shares) if shares else None,
        "recovered_from": since,
        "anchor_alpha_change": tests[-1][f"first_domain_change_{ONLINE}"],
        "anchor_alpha_change_without_anchors": tests[-1][f"first_domain_change_{BARE}"],
        "update_seconds": sum(update["seconds"] for update in mine),
        "tests": tests,
    }


if __name__ == "__main__":
    main(STAGE)
