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
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import Console

from draftkit.artifacts import read_json, remove, write_json
from draftkit.config import DEFAULT_ROUTE, Config
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example, read_splits
from draftkit.data.rollouts import Record, write_parts
from draftkit.distillation.assembly import load_learner, make_trainer
from draftkit.distillation.loop import train
from draftkit.distillation.progress import reporting
from draftkit.distillation.samplers import answered, target_sampler
from draftkit.distillation.sources import Source, shuffled
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target, load_draft, load_target, save_draft, with_path
from draftkit.online.assembly import make_refit
from draftkit.online.buffer import Buffer
from draftkit.online.refit import Refit, Update
from draftkit.online.registry import Registry
from draftkit.online.rows import Anchors, row_of
from draftkit.theory.acceptance import Estimate, Rate, estimate

from ..command import main
from ..plan import PREPARE, ROLLOUTS, TARGET_MODEL, TEXTS
from ..product import SUMMARY, Stage
from ..stage import StageFolder
from .drift_report import BARE, ONLINE, drift_figure, drift_table

REQUESTS = 3000  # of each domain
MAX_NEW_TOKENS = 64
SAMPLED = 512  # answers of a file
POINTS = 20  # of a domain's curve
ORACLE_STEPS = 800
SCORED = 24  # requests of a point of the curve
EARLY = 0.1  # of a domain's stream: where recovery is read off
ENOUGH = 0.7  # of the gap: recovered
CURVE = "curve.json"


def of_known_domain(config: Config) -> list[Config]:
    """The same, where the first domain is all text that there is."""
    return [replace(config, data=replace(config.data, domains=config.data.domains[:1]))]


STAGE = Stage(
    name="drift",
    code="benchmarks.drift",
    reads=(
        *("seed", "data", "sampling", "divergence", "optim", "decode", "online", "draft.lora"),
        *("evaluate.prompts", "evaluate.validation_prompts", "evaluate.batch_size", *ROLLOUTS),
    ),
    inputs=(TEXTS, TARGET_MODEL, PREPARE.under(of_known_domain)),
    version=3,
    product=None,
)

Rows = list[dict[str, Any]]
Texts = dict[str, list[Record]]  # of a domain, by split


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
    early = [test for test in tests if test["share"] < 1]
    shares = [one["mean"] for test in early if (one := test[f"recovered_{ONLINE}"]) is not None]
    return {
        "versions_published": len(published),
        "versions_rejected": len(mine) - len(published),
        "alpha_by_version": {update["version"]: update["alpha_after"] for update in published},
        "records_seen": points[-1]["last"],
        "recovered_fraction": sum(shares) / len(shares) if shares else None,
        "recovered_from": {test["domain"]: recovered_from(points, test) for test in early},
        "anchor_alpha_change": tests[-1][f"first_domain_change_{ONLINE}"],
        "anchor_alpha_change_without_anchors": tests[-1][f"first_domain_change_{BARE}"],
        "update_seconds": sum(update["seconds"] for update in mine),
        "tests": tests,
    }


# What the experiment is made of


class Service:
    """A drafter that is refitted from what it serves. `draft` holds the version in force."""

    def __init__(self, draft: Adapter, buffer: Buffer, refit: Refit) -> None:
        self.draft, self.version = draft, ""
        self._buffer, self._refit = buffer, refit
        self._follow()

    def record(self, records: Sequence[Record]) -> Iterator[Update]:
        """Put what was served into the buffer; yield the updates that follow, each in force."""
        self._buffer.append([(DEFAULT_ROUTE, record) for record in records])
        while self._refit.due():
            update = self._refit.update()
            self._follow()
            yield update

    def _follow(self) -> None:
        """Take the version in force, as a server does."""
        version = self._refit.registry.current()
        if version is not None and version.name != self.version:
            self.draft.load_weights(self._refit.registry.read(version))
            self.version = version.name


class Experiment:
    """The target, and what is made of it in the stage folder: once, so that a kill costs a part."""

    def __init__(self, config: Config, folder: StageFolder, target: Target) -> None:
        self.config, self.folder, self.target = config, folder, target
        self.splits = read_splits(folder.input("texts"))

    def texts(self, domain: str) -> Texts:
        """The target's answers to prompts of `domain`: a stream, validation and test."""
        splits, counts = self.splits, self.config.evaluate
        parts = {
            "train": of_domain(splits.train, domain)[:REQUESTS],
            "validation": of_domain(splits.validation, domain)[: counts.validation_prompts],
            "test": of_domain(splits.test, domain)[: counts.prompts],
        }
        return {name: self.answers(f"{domain}-{name}", prompts) for name, prompts in parts.items()}

    def answers(self, name: str, examples: Sequence[Example]) -> list[Record]:
        """Answers of the target to the prompts of `examples`, in files called `name`."""
        config, folder = self.config, self.folder.path / "text"
        folder.mkdir(exist_ok=True)
        sampler = target_sampler(
            self.target,
            config.sampling,
            Room(MAX_NEW_TOKENS, config.data.max_length),
            seed=config.seed,
            batch_size=config.generate.batch_size,
        )

        def answer(rows: range) -> list[Record]:
            lot = [examples[row] for row in rows]
            return answered(sampler, lot, rows=rows, version="target")

        lots = write_parts(folder, len(examples), size=SAMPLED, make=answer, name=name)
        records = [record for lot in lots for record in lot]
        self.folder.note(f"{name}: {len(records)} answers")
        return records

    def score(
        self, drafts: Mapping[str, Adapter], records: Sequence[Record]
    ) -> dict[str, PromptTotals]:
        """Exact alpha of several drafts on the same records."""
        size, sampling = self.config.evaluate.batch_size, self.config.sampling
        target = self.target.adapter
        return score_drafts(target, drafts, records, sampling=sampling, batch_size=size)

    def draft(self, path: Path) -> Adapter:
        return load_draft(with_path(self.config.draft, path), self.target)

    def distil(self, name: str, start: Path, texts: Texts, steps: int) -> Path:
        """Distil the draft in `start`; the weights that are best on the validation texts stay."""
        config, folder, path = self.config, self.folder, self.folder.path / name
        if path.exists():
            return path
        every = max(1, steps // 4)
        optim = replace(config.optim, max_steps=steps, eval_steps=every, save_steps=every)
        draft = load_learner(with_path(config.draft, start), self.target)
        trainer = make_trainer(config, draft, self.target, optim=optim)
        rows = [row_of(record, prompts=config.online.prompts) for record in texts["train"]]
        source = Source(
            shuffled(rows, config.seed),
            batch_size=trainer.optim.rows_of_a_process,
            device=trainer.draft.device,
        )

        def evaluate(step: int) -> float:
            alpha = self.score({name: trainer.draft}, texts["validation"])[name].alpha.mean
            folder.tracker.log(f"{name}_validation", step, {"alpha": alpha})
            return alpha

        work = folder.path / f"{name}-training"
        work.mkdir(exist_ok=True)
        log = reporting(name, steps, folder.tracker, folder.note)
        train(trainer, source, work, log=log, evaluate=evaluate)
        save_draft(trainer.draft, self.target.tokenizer, path)
        remove(work)
        return path

    def service(self, name: str, static: Path, anchors: Anchors) -> Service:
        """A service with a buffer and a registry of its own; it begins with the static drafter."""
        config, folder = self.config, self.folder.path / name
        remove(folder)  # of an interrupted run: a stream is gone through whole
        folder.mkdir()
        fraction = config.online.gate.fraction
        buffer = Buffer(folder / "buffer.sqlite", config.online.buffer, gate_fraction=fraction)
        registry = Registry(folder / "drafters")
        registry.seed(partial(shutil.copytree, static, dirs_exist_ok=True))
        refit = make_refit(
            config,
            route=DEFAULT_ROUTE,
            start=config.draft,
            target=self.target,
            buffer=buffer,
            registry=registry,
            anchors=anchors,
            folder=folder,
        )
        return Service(self.draft(static), buffer, refit)


def of_domain(examples: Sequence[Example], domain: str) -> list[Example]:
    """Those of one domain, in the order of the split: any first n are a fair sample."""
    return [example for example in examples if example.domain == domain]


# The stream


def stream(experiment: Experiment) -> tuple[Rows, Rows, Rows]:
    """Let the domains pass: points of the curve, updates, and tests, early and at each end.

    A point is alpha by drafter on requests `first` .. `last` - 1 of the whole stream, before any
    drafter saw them. An update is dated by the requests before it.
    """
    config, folder = experiment.config, experiment.folder
    known, *new = config.data.domains
    texts = {domain: experiment.texts(domain) for domain in config.data.domains}
    base = folder.input("prepare")
    static = experiment.distil("static", base, texts[known], config.optim.max_steps)
    oracles = {
        domain: experiment.distil(f"oracle-{domain}", static, texts[domain], ORACLE_STEPS)
        for domain in new
    }
    held_out = texts[known]["validation"][: config.online.gate.anchors]
    services = {
        ONLINE: experiment.service(ONLINE, static, Anchors(texts[known]["train"], held_out)),
        BARE: experiment.service(BARE, static, Anchors()),
    }
    points, updates, tests, before = Rows(), Rows(), Rows(), 0
    for domain, oracle in oracles.items():
        records, drafts = texts[domain]["train"], {n: one.draft for n, one in services.items()}
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
                        dated = {"service": name, "request": before + end}
                        updates.append(dated | outcome(update))
            if passed in (ceil(EARLY * POINTS), POINTS):
                row = {"domain": domain, "share": passed / POINTS}
                test, first_domain = texts[domain]["test"], texts[known]["test"]
                tests.append(row | tested(experiment, drafts, test, first_domain))
        before += len(records)
    return points, updates, tests


def outcome(update: Update) -> dict[str, Any]:
    """An update as the curve stores it."""
    return {
        "seconds": round(update.seconds, 3),
        "alpha_before": update.verdict.before.as_dict(),
        "alpha_after": update.verdict.after.as_dict(),
        "version": update.version,
        "reason": update.verdict.reason,
    }


def tested(
    experiment: Experiment,
    drafts: Mapping[str, Adapter],
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


def recovered(scored: Mapping[str, PromptTotals], name: str) -> Estimate | None:
    """How much of the way from static to oracle `name` has come; None where there is no way."""
    totals = {key: of_draft.totals["alpha"] for key, of_draft in scored.items()}
    counts, documents = scored[name].counts, scored[name].documents
    way = Rate(totals["oracle"] - totals["static"], counts, documents)
    if not estimate(way, least=2).excludes(0):
        return None
    come = Rate(totals[name] - totals["static"], counts, documents)
    return estimate(come, way, compare=operator.truediv)


def recovered_from(points: Rows, test: Mapping[str, Any]) -> float | None:
    """The first share of the stream of a `test`'s domain, on whose unseen requests the online
    drafter beats the static one by `ENOUGH` of the gap on held-out text.

    The oracle has learned the stream's own requests, so on those the gap would be too wide.
    """
    own = [point for point in points if point["domain"] == test["domain"]]
    gap = test["alpha_oracle"]["mean"] - test["alpha_static"]["mean"]
    start, end = own[0]["first"], own[-1]["last"]
    for point in own:
        gained = point["alpha"][ONLINE]["mean"] - point["alpha"]["static"]["mean"]
        if gap > 0 and gained >= ENOUGH * gap:
            return (point["first"] - start) / (end - start)
    return None


if __name__ == "__main__":
    main(STAGE)
