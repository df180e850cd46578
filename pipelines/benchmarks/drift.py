"""`python -m pipelines.benchmarks.drift`: a drafter that knows one domain meets others.

The experiment of Liu et al. (2310.07177, 5.3), simulated. The target knows all domains; they come
in the order of `data.domains`. The static drafter is trained and distilled on the first one alone;
an oracle is the static one distilled on the whole stream of a domain. In between stands the drafter
that is refitted online from what was served so far, with anchors of the first domain and without.
The curve is taken on requests that nobody has seen; what was recovered after a tenth of a domain's
stream, and what is left of the first domain, on held-out text of the test split.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import read_json, write_json
from draftkit.config import Config
from draftkit.evaluation.alpha import PromptTotals
from draftkit.models.adapter import Adapter
from draftkit.models.loading import load_target
from draftkit.models.remembered import RememberedAdapter
from draftkit.online.refit import Anchors, Update
from draftkit.theory.acceptance import Estimate, Rate, estimate

from ..generate import ROLLOUT_SETTINGS
from ..plan import SUMMARY, StageFolder
from ..run import stage
from ..target import text_and_target
from .drift_lab import Lab, Texts
from .drift_report import drift_figure, drift_table
from .drift_stream import Service, stream

ONLINE, BARE = "online", "without_anchors"
POINTS = 20  # of a domain's curve
ORACLE_STEPS = 800
SCORED = 24  # requests of a point of the curve
EARLY = 0.1  # of a domain's stream: where recovery is read off
ENOUGH = 0.7  # of the gap: recovered
CURVE = "curve.json"
LOGGED = ("request", "records", "tokens", "seconds", "loss")  # of an update


@dataclass
class Log:
    """What happened on the way, in order."""

    points: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)


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
    lab: Lab, texts: Mapping[str, Texts], domain: str, drafts: Mapping[str, Adapter], share: float
) -> dict[str, Any]:
    """The drafters on held-out text: of `domain`, and of the first one, which they may forget."""
    scored, first = lab.score(drafts, texts[domain].test), lab.config.data.domains[0]
    others = {name: draft for name, draft in drafts.items() if name != "oracle"}
    kept = lab.score(others, texts[first].test)

    def change(after: str, before: str) -> dict[str, Any]:
        """Of alpha on the first domain."""
        return kept[after].gain(kept[before]).as_dict()

    row: dict[str, Any] = {"domain": domain, "share": share}
    row |= {f"alpha_{name}": totals.alpha.as_dict() for name, totals in scored.items()}
    for name in (ONLINE, BARE):
        come = recovered(scored, name)
        row[f"recovered_{name}"] = None if come is None else come.as_dict()
        row[f"first_domain_change_{name}"] = change(name, "static")
    return row | {"first_domain_kept_by_anchors": change(ONLINE, BARE)}


def run(lab: Lab) -> Log:
    """Make texts and drafters, let the stream pass, and test after a tenth and at each end."""
    config, log = lab.config, Log()
    texts = {domain: lab.texts(domain) for domain in config.data.domains}
    known, *new = config.data.domains
    first = texts[known]
    static = lab.static(first)
    fixed = {
        domain: {
            "static": lab.draft(static),
            "oracle": lab.draft(
                lab.distil(f"oracle-{domain}", static, texts[domain], ORACLE_STEPS)
            ),
        }
        for domain in new
    }
    anchors = Anchors(first.train, first.validation[: config.online.gate.anchors])
    services = [lab.service(ONLINE, static, anchors), lab.service(BARE, static, Anchors())]

    def keep(service: Service, request: int, update: Update) -> None:
        row = {
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
        log.updates.append(row)
        numbers = {key: row[key] for key in LOGGED}
        numbers |= {"alpha_before": update.before.mean, "alpha_after": update.after.mean}
        numbers["published"] = float(update.version is not None)
        lab.folder.tracker.log(f"online_{service.name}", len(log.updates), numbers)

    passed: dict[str, int] = {}
    for point in stream(
        {domain: texts[domain].train for domain in new},
        services,
        others=fixed.__getitem__,
        score=lab.score,
        points=POINTS,
        scored=SCORED,
        step=config.online.min_records,
        tell=keep,
    ):
        log.points.append(point)
        domain = point["domain"]
        alphas = (f"{name} {alpha['mean']:.3f}" for name, alpha in point["alpha"].items())
        lab.folder.note(f"{domain} {point['first']:>6}: {', '.join(alphas)}")
        passed[domain] = passed.get(domain, 0) + 1
        if passed[domain] in (ceil(EARLY * POINTS), POINTS):
            for service in services:
                service.follow()
            drafts = {**fixed[domain], **{one.name: one.draft for one in services}}
            log.tests.append(tested(lab, texts, domain, drafts, passed[domain] / POINTS))
    return log


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
        gained = point["alpha"][name]["mean"] - point["alpha"]["static"]["mean"]
        if gap > 0 and gained >= ENOUGH * gap:
            return (point["first"] - start) / (points[-1]["last"] - start)
    return None


def check(config: Config) -> None:
    """Raise ValueError for domains that cannot follow each other."""
    domains = config.data.domains
    if len(domains) < 2 or len(set(domains)) < len(domains):
        raise ValueError(f"data.domains must name at least two, and none twice, got {domains}")


def show(config: Config, folder: Path) -> None:
    """Print the table of a complete experiment."""
    Console(width=80).print(drift_table(read_json(folder / SUMMARY)))


@stage(
    name="online",
    sections=(
        *("seed", "data", "sampling", "divergence", "optim", "decode", "online"),
        *("draft.pretrain", "draft.shrink", "draft.lora", "draft.freeze_head"),
        *ROLLOUT_SETTINGS,
        *("evaluate.prompts", "evaluate.validation_prompts", "evaluate.batch_size"),
    ),
    version=3,
    needs=text_and_target,
    check=check,
    product=None,
    after=show,
)
def drift(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run the experiment in `folder`; figure and curve lie there, the table is in the summary."""
    target = load_target(folder.model(config, "target"), config.hardware)
    log = run(Lab(config, folder, target, RememberedAdapter(target.adapter)))
    write_json(folder.path / CURVE, {"points": log.points, "updates": log.updates})
    drift_figure(log.points, log.updates, folder.path / "drift.png")
    folder.tracker.figure("online/drift", folder.path / "drift.png")
    _, *domains = config.data.domains
    mine = [update for update in log.updates if update["service"] == ONLINE]
    published = [update for update in mine if update["version"] is not None]
    earliest = [next(test for test in log.tests if test["domain"] == one) for one in domains]
    shares = [test[f"recovered_{ONLINE}"] for test in earliest]
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


if __name__ == "__main__":
    drift.main()
