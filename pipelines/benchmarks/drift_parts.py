"""What the drift experiment is made of: the target's texts by domain, drafters, services.

Everything that takes long is kept in the stage folder, so that a kill costs a part.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from draftkit.artifacts import remove
from draftkit.config import DEFAULT_ROUTE, Config
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example, read_splits
from draftkit.data.rollouts import Record, write_parts
from draftkit.distillation.assembly import load_learner, make_trainer
from draftkit.distillation.loop import train
from draftkit.distillation.pretrain import make_draft
from draftkit.distillation.progress import reporting
from draftkit.distillation.samplers import answered, target_sampler
from draftkit.distillation.sources import Source, shuffled
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.models.adapter import Adapter, CausalAdapter
from draftkit.models.loading import Target, load_draft, save_draft, with_path
from draftkit.online.assembly import make_refit
from draftkit.online.buffer import Buffer, Entry
from draftkit.online.refit import Refit, Update
from draftkit.online.registry import Registry
from draftkit.online.rows import Anchors, row_of

from ..stage import StageFolder

SAMPLED = 512  # answers of a file
REQUESTS = 3000  # of each domain
MAX_NEW_TOKENS = 64


class Service:
    """A drafter that is refitted from what it serves. `draft` holds the version in force."""

    def __init__(self, draft: CausalAdapter, buffer: Buffer, refit: Refit) -> None:
        self.draft, self.version = draft, ""
        self._buffer, self._refit = buffer, refit
        self._follow()

    def record(self, records: Sequence[Record]) -> Iterator[Update]:
        """Put what was served into the buffer; yield the updates that follow, each in force."""
        self._buffer.append([Entry(record=record, route=DEFAULT_ROUTE) for record in records])
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


@dataclass(frozen=True)
class Texts:
    """Answers of the target to one domain: what streams by, what chooses weights, what tests."""

    train: list[Record]
    validation: list[Record]
    test: list[Record]


class Experiment:
    """The target, and what is made of it in the stage folder, once."""

    def __init__(self, config: Config, folder: StageFolder, target: Target) -> None:
        self.config, self.folder, self.target = config, folder, target
        self.splits = read_splits(folder.input("texts"))

    def texts(self, domain: str) -> Texts:
        """The answers to the prompts of `domain`, sampled where they are not there yet."""
        splits, counts = self.splits, self.config.evaluate
        return Texts(
            self._answers(f"{domain}-train", of_domain(splits.train, domain)[:REQUESTS]),
            self._answers(
                f"{domain}-validation",
                of_domain(splits.validation, domain)[: counts.validation_prompts],
            ),
            self._answers(f"{domain}-test", of_domain(splits.test, domain)[: counts.prompts]),
        )

    def _answers(self, name: str, examples: Sequence[Example]) -> list[Record]:
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

    def draft(self, path: Path) -> CausalAdapter:
        return load_draft(with_path(self.config.draft, path), self.target)

    def static(self, texts: Texts) -> Path:
        """The drafter of the first domain: trained on its text, then distilled."""
        config, path, splits = self.config, self.folder.path / "draft", self.splits
        if not path.exists():
            first = config.data.domains[0]
            make_draft(
                config,
                self.folder.model(config, "target"),
                replace(
                    splits,
                    train=of_domain(splits.train, first),
                    validation=of_domain(splits.validation, first),
                ),
                self.folder.path,
                tracker=self.folder.tracker,
                note=self.folder.note,
            )
        return self.distil("static", path, texts, config.optim.max_steps)

    def distil(self, name: str, start: Path, texts: Texts, steps: int) -> Path:
        """Distil the draft in `start`; the weights that are best on the validation texts stay."""
        config, folder, path = self.config, self.folder, self.folder.path / name
        if path.exists():
            return path
        every = max(1, steps // 4)
        optim = replace(config.optim, max_steps=steps, eval_steps=every, save_steps=every)
        draft = load_learner(with_path(config.draft, start), self.target)
        trainer = make_trainer(config, draft, self.target, optim=optim)
        rows = [row_of(record, prompts=config.online.prompts) for record in texts.train]
        source = Source(
            shuffled(rows, config.seed),
            batch_size=trainer.optim.rows_of_a_process,
            device=trainer.draft.device,
        )

        def evaluate(step: int) -> float:
            alpha = self.score({name: trainer.draft}, texts.validation)[name].alpha.mean
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
