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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import ceil, nan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftkit.artifacts import atomic_path, read_json, remove, write_json
from draftkit.config import DEFAULT_ROUTE, Config
from draftkit.data.lengths import Room
from draftkit.data.rollouts import Record
from draftkit.data.splits import read_splits
from draftkit.distillation.assembly import load_learner, make_trainer
from draftkit.distillation.loop import train
from draftkit.distillation.progress import reporting
from draftkit.distillation.samplers import answered, target_sampler
from draftkit.distillation.sources import Source, shuffled
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.evaluation.intervals import Estimate, estimate
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target, load_draft, load_target, save_draft, with_path
from draftkit.online.buffer import Buffer
from draftkit.online.refit import Anchors, Refit, Update, make_refit, row_of
from draftkit.online.registry import Registry, Version
from draftkit.theory.acceptance import Rate

from ..command import main
from ..plan import PREPARE, ROLLOUTS, TARGET_MODEL, TEXTS
from ..product import SUMMARY, Stage
from ..stage import StageFolder

REQUESTS = 3000  # of each domain
MAX_NEW_TOKENS = 64
POINTS = 20  # of a domain's curve
ORACLE_STEPS = 800
SCORED = 24  # requests of a point of the curve
EARLY = 0.1  # of a domain's stream: where recovery is read off
CURVE, FIGURE = "curve.json", "drift.png"
ONLINE, BARE = "online", "without_anchors"
CURVES = {  # colour and label
    "oracle": ("#9a9a9a", "oracle (has learned these very requests)"),
    ONLINE: ("#1f4e79", "online, with anchors"),
    BARE: ("#c06a2b", "online, without anchors"),
    "static": ("#444", "static"),
}


def domains(config: Config) -> list[str]:
    """In their order; the drafter has learned the first one alone. Raises ValueError for a set that
    cannot follow each other."""
    names = config.data.domains or []
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"data.domains must name at least two, and none twice, got {names}")
    return names


# The drafter is made where the first domain is all text that there is.
PREPARED = PREPARE.under(
    lambda config: [replace(config, data=replace(config.data, domains=domains(config)[:1]))]
)
STAGE = Stage(
    name="drift",
    code="benchmarks.drift",
    reads=(
        *("seed", "data", "sampling", "divergence", "optim", "decode", "online", "draft.lora"),
        *("evaluate.prompts", "evaluate.validation_prompts", "evaluate.batch_size", *ROLLOUTS),
    ),
    inputs=(TEXTS, TARGET_MODEL, PREPARED),
    version=3,
    product=None,
)

Rows = list[dict[str, Any]]
Texts = dict[str, list[Record]]  # of a domain, by split


def check(config: Config) -> None:
    """Raise ValueError for domains that cannot follow each other."""
    domains(config)


def drift(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Run the experiment in `folder`; figure and curve lie there, the table is in the summary."""
    target = load_target(folder.model(config, "target"), config.hardware)
    points, updates, tests = stream(Experiment(config, folder, target))
    write_json(folder.path / CURVE, {"points": points, "updates": updates})
    draw(points, updates, folder.path / FIGURE)
    folder.tracker.figure("online/drift", folder.path / FIGURE)
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
        "anchor_alpha_change": tests[-1][f"first_domain_change_{ONLINE}"],
        "update_seconds": sum(update["seconds"] for update in mine),
        "tests": tests,
    }


# What the experiment is made of


def served(refit: Refit, draft: Adapter, records: Sequence[Record]) -> Iterator[Update]:
    """Put what `draft` served into the buffer; yield the updates that follow.

    The version in force behind each of them is read into `draft`, as a server does.
    """
    refit.buffer.append([(DEFAULT_ROUTE, record) for record in records])
    while refit.due():
        update = refit.update()
        draft.load_weights(refit.registry.read(in_force(refit)))
        yield update


def in_force(refit: Refit) -> Version:
    version = refit.registry.current()
    assert version is not None
    return version


@dataclass
class Experiment:
    """The target, and what is made of it in the stage folder: drafters once, so that they stay."""

    config: Config
    folder: StageFolder
    target: Target

    def texts(self, domain: str) -> Texts:
        """The target's answers to the first prompts of `domain`: a stream, validation and test.

        In the order of each split, of which any first ones are a fair sample.
        """
        config, splits = self.config, read_splits(self.folder.inputs["texts"])
        sampler = target_sampler(
            self.target,
            config.sampling,
            Room(MAX_NEW_TOKENS, config.data.max_length),
            seed=config.seed,
            batch_size=config.generate.batch_size,
        )
        texts: Texts = {}
        for split, examples, count in (
            ("train", splits.train, REQUESTS),
            ("validation", splits.validation, config.evaluate.validation_prompts),
            ("test", splits.test, config.evaluate.prompts),
        ):
            some = [one for one in examples if one.domain == domain][:count]
            self.folder.note(f"{len(some)} answers to prompts of {domain}")
            texts[split] = answered(sampler, some, rows=range(len(some)), version="target")
        return texts

    @property
    def score(self) -> Callable[..., dict[str, PromptTotals]]:
        """A function of drafts by name and records: exact alpha of all of them on the same ones."""
        size, sampling = self.config.evaluate.batch_size, self.config.sampling
        return partial(score_drafts, self.target.adapter, sampling=sampling, batch_size=size)

    def draft(self, path: Path) -> Adapter:
        return load_draft(with_path(self.config.draft, path), self.target)

    def distil(self, name: str, start: Path, texts: Texts, steps: int) -> Path:
        """Distil the draft in `start`; the weights that are best on the validation texts stay."""
        config, folder, path = self.config, self.folder, self.folder.path / name
        if path.exists():  # from before a kill
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
        log = reporting(name, steps, folder.tracker, folder.note)
        train(trainer, source, work, log=log, evaluate=evaluate)
        save_draft(trainer.draft, self.target.tokenizer, path)
        remove(work)
        return path

    def refit(self, name: str, static: Path, anchors: Anchors) -> Refit:
        """One with a buffer and a registry of its own, which begins with the static drafter."""
        config, folder = self.config, self.folder.path / name
        remove(folder)  # of an interrupted run: a stream is gone through whole
        folder.mkdir()
        fraction = config.online.gate.fraction
        buffer = Buffer(folder / "buffer.sqlite", config.online.buffer, gate_fraction=fraction)
        registry = Registry(folder / "drafters")
        registry.seed(partial(shutil.copytree, static, dirs_exist_ok=True))
        return make_refit(
            config,
            route=DEFAULT_ROUTE,
            start=config.draft,
            target=self.target,
            buffer=buffer,
            registry=registry,
            anchors=anchors,
            folder=folder,
        )


# The stream


def stream(experiment: Experiment) -> tuple[Rows, Rows, Rows]:
    """Let the domains pass: points of the curve, updates, and tests, early and at each end.

    A point is alpha by drafter on requests `first` .. `last` - 1 of the whole stream, before any
    drafter saw them. An update is dated by the requests before it.
    """
    config, folder = experiment.config, experiment.folder
    known, *new = domains(config)
    texts = {domain: experiment.texts(domain) for domain in domains(config)}
    base = folder.inputs["prepare"]
    static = experiment.distil("static", base, texts[known], config.optim.max_steps)
    oracles = {
        domain: experiment.distil(f"oracle-{domain}", static, texts[domain], ORACLE_STEPS)
        for domain in new
    }
    held_out = texts[known]["validation"][: config.online.gate.anchors]
    refits = {
        ONLINE: experiment.refit(ONLINE, static, Anchors(texts[known]["train"], held_out)),
        BARE: experiment.refit(BARE, static, Anchors()),
    }
    online = {name: experiment.draft(static) for name in refits}
    points, updates, tests, before = Rows(), Rows(), Rows(), 0
    for domain, oracle in oracles.items():
        records = texts[domain]["train"]
        drafts = {"static": experiment.draft(static), "oracle": experiment.draft(oracle), **online}
        edges = [len(records) * part // POINTS for part in range(POINTS + 1)]
        for passed, (first, last) in enumerate(pairwise(edges), 1):
            scored = experiment.score(drafts, records[first : min(last, first + SCORED)])
            alphas = {name: totals.alpha.as_dict() for name, totals in scored.items()}
            part = {"domain": domain, "first": before + first, "last": before + last}
            versions = {name: in_force(refit).name for name, refit in refits.items()}
            points.append(part | {"alpha": alphas, "versions": versions})
            shown = (f"{name} {alpha['mean']:.3f}" for name, alpha in alphas.items())
            folder.note(f"{domain} {before + first:>6}: {', '.join(shown)}")
            for start in range(first, last, config.online.min_records):
                end = min(last, start + config.online.min_records)
                for name, refit in refits.items():
                    for update in served(refit, online[name], records[start:end]):
                        row = {
                            "service": name,
                            "request": before + end,
                            "seconds": round(update.seconds, 3),
                            "alpha_before": update.verdict.before.as_dict(),
                            "alpha_after": update.verdict.after.as_dict(),
                            "version": update.version,
                            "reason": update.verdict.reason,
                        }
                        updates.append(row)
            if passed in (ceil(EARLY * POINTS), POINTS):
                row = {"domain": domain, "share": passed / POINTS}
                test, first_domain = texts[domain]["test"], texts[known]["test"]
                tests.append(row | tested(experiment, drafts, test, first_domain))
        before += len(records)
    return points, updates, tests


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
        row[f"recovered_{name}"] = come and come.as_dict()
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


# What is shown


def show(config: Config, folder: Path) -> None:
    """Print the table of a complete experiment."""
    Console(width=80).print(drift_table(read_json(folder / SUMMARY)))


def short(estimate: dict[str, Any] | None, digits: int = 3, sign: str = "") -> str:
    """`0.812 ±0.011`, half the width of the interval behind the mean."""
    if estimate is None:
        return "no gap"
    low, high = estimate["ci95"] or (nan, nan)
    return f"{estimate['mean']:{sign}.{digits}f} ±{(high - low) / 2:.{digits}f}"


def drift_table(summary: dict[str, Any]) -> Table:
    """A column a test: early in a domain's stream, and at its end."""
    caption = (
        "recovered: (online - static) / (oracle - static); first domain: alpha gained there since "
        "the static drafter, without anchors, and the difference. "
        f"{summary['versions_published']} versions published, {summary['versions_rejected']} "
        f"refused; {summary['update_seconds']:.0f} s of updates for "
        f"{summary['records_seen']} requests."
    )
    title = "alpha on held-out text, with half the width of its 95 % interval"
    table = Table(title=title, caption=caption, show_edge=False, pad_edge=False)
    table.add_column("after this much of the stream")
    for test in (tests := summary["tests"]):
        table.add_column(f"{test['domain']} {test['share']:.0%}", justify="right", no_wrap=True)
    for name in ("static", ONLINE, BARE, "oracle"):
        table.add_row(name.replace("_", " "), *(short(test[f"alpha_{name}"]) for test in tests))
    table.add_row("recovered", *(short(test[f"recovered_{ONLINE}"], 2) for test in tests))
    for key, label in (
        (f"first_domain_change_{ONLINE}", "first domain"),
        (f"first_domain_change_{BARE}", "- no anchors"),
        ("first_domain_kept_by_anchors", "- anchors kept"),
    ):
        table.add_row(label, *(short(test[key], sign="+") for test in tests))
    return table


def draw(points: Rows, updates: Rows, path: Path) -> None:
    """Draw alpha along the stream and what was published when, as PNG.

    A domain begins at a dotted line. Ticks below are updates, the long ones published.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="requests (ticks below: updates, long ones published)", ylabel="alpha")
    requests = [point["first"] for point in points]
    for name, (colour, label) in CURVES.items():
        alphas = [point["alpha"][name] for point in points]
        axes.plot(requests, [alpha["mean"] for alpha in alphas], color=colour, label=label)
        low, high = zip(*(alpha["ci95"] or (nan, nan) for alpha in alphas), strict=True)
        axes.fill_between(requests, low, high, color=colour, alpha=0.15, linewidth=0)
    for domain, request in {one["domain"]: one["first"] for one in reversed(points)}.items():
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


if __name__ == "__main__":
    main(STAGE)
