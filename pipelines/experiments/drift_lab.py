"""What the drift experiment is made of: texts by domain, drafters, services.

Everything that takes long is kept in the stage folder, so that a kill costs a part.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from draftkit.artifacts import remove
from draftkit.config import Config
from draftkit.data.prompts import Example, read_splits
from draftkit.data.rollouts import Record, write_parts
from draftkit.distillation.batch_sources import Source, shuffled
from draftkit.distillation.loop import Progress, train
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.models.loading import Target, load_draft, save_draft, with_path
from draftkit.models.remembered import RememberedAdapter
from draftkit.online.assembly import make_refit
from draftkit.online.buffer import Buffer
from draftkit.online.refit import Anchors, row_of
from draftkit.online.registry import Registry
from draftkit.workflow.fitting import make_trainer
from draftkit.workflow.pretraining import pretrain
from draftkit.workflow.progress import progress
from draftkit.workflow.sampling import target_sampler
from pipelines.experiments.drift_stream import Service
from pipelines.plan import StageFolder

SAMPLED = 512  # answers of a file


@dataclass(frozen=True)
class Lab:
    """What the whole experiment shares."""

    config: Config
    folder: StageFolder
    target: Target
    reader: RememberedAdapter  # the target, which reads each text once

    @property
    def path(self) -> Path:
        return self.folder.path


def sample(lab: Lab, name: str, examples: Sequence[Example], count: int) -> list[Record]:
    """Answers of the target to `count` prompts, in files called `name`."""
    config = lab.config
    folder = lab.path / "text"
    folder.mkdir(exist_ok=True)
    sampler = target_sampler(
        lab.target,
        sampling=config.sampling,
        seed=config.seed,
        max_new_tokens=config.online.drift.max_new_tokens,
        batch_size=config.generate.batch_size,
        max_length=config.data.max_length,
    )

    def answer(rows: range) -> list[Record]:
        prompts = [examples[row].prompt_ids for row in rows]
        return sampler.sample(prompts, rows=rows, version="target")

    lots = write_parts(folder, min(count, len(examples)), size=SAMPLED, make=answer, name=name)
    records = [record for lot in lots for record in lot]
    lab.folder.note(f"{name}: {len(records)} answers")
    return records


def distil(
    lab: Lab,
    name: str,
    start: Path,
    records: Sequence[Record],
    held_out: Sequence[Record],
    steps: int,
) -> Path:
    """Distil the draft in `start` on `records`; the weights that are best on `held_out` stay."""
    path = lab.path / name
    if path.exists():
        return path
    config = lab.config
    every = max(1, steps // 4)
    optim = replace(config.optim, max_steps=steps, eval_steps=every, save_steps=every)
    trainer = make_trainer(
        config, with_path(config.draft, start), lab.target, optim, reader=lab.reader
    )
    texts = [row_of(record, prompts=config.online.prompts) for record in records]
    source = Source(
        shuffled(texts, config.seed),
        batch_size=trainer.optim.rows_of_a_process,
        device=trainer.draft.device,
    )

    def evaluate(step: int) -> float:
        sums = scores_of(lab)({name: trainer.draft}, held_out)[name]
        alpha = sums.alpha.mean
        lab.folder.tracker.log(f"{name}_validation", step, {"alpha": alpha})
        return alpha

    work = lab.path / f"{name}-training"
    work.mkdir(exist_ok=True)
    with progress(f"distilling {name}", steps, lab.folder.note) as show:

        def log(step: Progress) -> None:
            show(step)
            lab.folder.tracker.log(name, step.steps, {"loss": step.metrics.loss})

        train(trainer, source, work, evaluate=evaluate, log=log)
    save_draft(trainer.draft, lab.target.tokenizer, path)
    remove(work)
    return path


def of_domain(examples: Sequence[Example], domain: str) -> list[Example]:
    """Those of one domain, in the order of the split: any first n are a fair sample."""
    return [example for example in examples if example.domain == domain]


def make_service(lab: Lab, name: str, static: Path, anchors: Anchors) -> Service:
    """A service with a buffer and a registry of its own, which begins with the static drafter."""
    config, folder = lab.config, lab.path / name
    remove(folder)  # of an interrupted run: a stream is gone through whole
    folder.mkdir()
    buffer = Buffer(
        folder / "buffer.sqlite", config.online.buffer, gate_fraction=config.online.gate.fraction
    )
    registry = Registry(folder / "drafters")
    registry.seed(partial(copy_folder, static))
    refit = make_refit(
        config,
        route="default",
        start=config.draft,
        target=lab.target,
        buffer=buffer,
        registry=registry,
        anchors=anchors,
        folder=folder,
        reader=lab.reader,
    )
    return Service(name, load_draft(with_path(config.draft, static), lab.target), buffer, refit)


def copy_folder(source: Path, folder: Path) -> None:
    """Put what lies in `source` into `folder`."""
    shutil.copytree(source, folder, dirs_exist_ok=True)


@dataclass(frozen=True)
class Texts:
    """Answers of the target by domain: what streams by, what chooses weights, what tests."""

    train: dict[str, list[Record]]
    validation: dict[str, list[Record]]
    test: dict[str, list[Record]]


def make_texts(lab: Lab) -> Texts:
    """Sample all of them; of the first domain, too, what the static drafter learns from."""
    drift, evaluate = lab.config.online.drift, lab.config.evaluate
    splits = read_splits(lab.folder.input("texts"))
    found = Texts({}, {}, {})
    for domain in (drift.first, *drift.domains):
        for name, examples, count, kept in (
            ("train", splits.train, drift.requests, found.train),
            ("validation", splits.validation, evaluate.validation_prompts, found.validation),
            ("test", splits.test, evaluate.prompts, found.test),
        ):
            kept[domain] = sample(lab, f"{domain}-{name}", of_domain(examples, domain), count)
    return found


def make_static(lab: Lab, texts: Texts) -> Path:
    """The drafter of the first domain: trained on its text, then distilled."""
    config, first = lab.config, lab.config.online.drift.first
    if not (lab.path / "draft").exists():
        splits = read_splits(lab.folder.input("texts"))
        pretrain(
            "draft",
            config,
            tokenizer=lab.target.tokenizer,
            texts=of_domain(splits.train, first),
            folder=lab.path,
            tracker=lab.folder.tracker,
            note=lab.folder.note,
        )
    return distil(
        lab,
        "static",
        lab.path / "draft",
        texts.train[first],
        texts.validation[first],
        config.optim.max_steps,
    )


def scores_of(lab: Lab) -> Callable[..., dict[str, PromptTotals]]:
    """Exact alpha of several drafts on the same records."""
    return partial(
        score_drafts,
        lab.reader,
        sampling=lab.config.sampling,
        batch_size=lab.config.evaluate.batch_size,
    )
