"""The refit of one route's drafter: what was served and what came before, k steps, the gate.

An update takes rows of three kinds: recent traffic, a reservoir of older traffic, and anchors, text
of before the drift, against forgetting (Liu et al. 2310.07177 train on recent traffic alone). Its
rows are a function of (seed, update, step) and of what lies in the buffer. Weights that the gate
lets through become a version in the registry; others go on being trained, unless they have
forgotten too much: then training starts again from the version in force.

The state (weights, moments, counters) is saved after each update; a kill in between costs the
steps of one. This module knows no server, no clock to wait by and no configuration file.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from draftkit.config import OnlineConfig
from draftkit.data.rollouts import Record
from draftkit.distillation.batch import Batch, TokenSequence, collate
from draftkit.distillation.checkpoint import load_checkpoint, save_checkpoint
from draftkit.distillation.sources import all_learned, sequence_of_record
from draftkit.distillation.trainer import Trainer
from draftkit.models.lora import merged_weights
from draftkit.online.buffer import Buffer, Stored
from draftkit.online.gate import Judge, Verdict, judge
from draftkit.online.registry import Registry, Version
from draftkit.theory.acceptance import Estimate, estimate_ratio, expected_accepted

STATE = "state.safetensors"
NEWEST = 32  # records by which a drift shows
LEAST_HELD_OUT = 8  # records, below which no gate is asked: the bootstrap of fewer is too narrow


@dataclass(frozen=True)
class Anchors:
    """Text of before: rows to mix in, and held-out ones for the gate. Either may be empty."""

    train: Sequence[Record] = ()
    held_out: Sequence[Record] = ()


@dataclass(frozen=True)
class Update:
    """What one update did. Losses and `trained_alpha` are means over its steps."""

    number: int
    records: int  # new ones since the update before
    tokens: int  # generated tokens trained on
    seconds: float
    loss: float
    before: Estimate  # alpha on held-out recent traffic, of the version in force
    after: Estimate  # and of the new weights
    verdict: Verdict
    version: str | None  # what was published


class Refit:
    """One route: its buffer, its registry, and the trainer whose weights become versions.

    make_trainer(folder): a trainer whose draft starts from a version's folder. The schedule of its
    rate begins anew with each update: what the gate sees, and users get, has come to rest.
    save(trainer, folder): write the draft as a folder that serving can load.
    stored_at: where the target is known by stored scores, the temperature of their tails; records
    that were served at another, or have none, are left out. None: every record will do.
    """

    def __init__(
        self,
        *,
        route: str,
        buffer: Buffer,
        registry: Registry,
        make_trainer: Callable[[Path], Trainer],
        save: Callable[[Trainer, Path], None],
        judge: Judge,
        anchors: Anchors,
        settings: OnlineConfig,
        folder: Path,
        gamma: int,
        seed: int,
        stored_at: float | None = None,
    ) -> None:
        self.route = route
        self.registry = registry
        self.settings = settings
        self.state: dict[str, Any] = {
            "update": 0,
            "last_id": 0,  # of the records that updates have seen
            "wait": 1.0,  # times `min_records`, until the next update
            "base": "",  # the version that the weights come from
            "alpha_low": None,  # of that version, on the traffic of the last update
            "seconds": 0.0,  # that updates have taken
            "tokens": 0,  # that they have trained on
            "growth": {},  # version -> its acceptance length over that of the one before
            "alphas": {},  # version -> its alpha on the held-out traffic that let it through
            "anchor_change": None,  # of the weights of the last update, since the first version
            "records": 0,  # that updates have seen, of the training side
        }
        self._buffer = buffer
        self._make_trainer = make_trainer
        self._save = save
        self._judge = judge
        self._anchors = anchors
        self._path = folder / STATE
        self._gamma = gamma
        self._seed = seed
        self._stored_at = stored_at
        self._trainer: Trainer | None = None
        self._first_on_anchors: Any = None

    # When

    def due(self) -> bool:
        """Whether enough was recorded since the last update, and no canary is being judged."""
        self._restore()
        held_out = self._buffer.count(self.route, held_out=True)
        if held_out < min(LEAST_HELD_OUT, self.settings.gate.records):
            return False
        news = self.new_records()
        if news < self.settings.min_records or self.registry.candidate() is not None:
            return False
        return news >= self.wanted or self.has_drifted()

    def has_drifted(self) -> bool:
        """Whether alpha on the newest records lies below what the last update left.

        Then the wait of updates that did not pay is over: the traffic is another.
        """
        known = self.state["alpha_low"]
        base = self.registry.current()
        if known is None or base is None:
            return False
        after = self.state["last_id"]
        newest = self._buffer.newest(self.route, NEWEST, held_out=False, after=after)
        usable = self._usable(newest)
        if len(usable) < 2:
            return False
        scored = self._judge.score(self.registry.read(base), usable)
        return estimate_ratio(scored.totals["alpha"], scored.counts).high < known

    @property
    def wanted(self) -> int:
        """New records that the next update waits for."""
        return int(self.settings.min_records * self.state["wait"])

    def new_records(self) -> int:
        """Records that no update has seen."""
        return self._buffer.count(self.route, held_out=False, after=self.state["last_id"])

    # What

    def update(self, hold: Callable[[], None] = lambda: None) -> Update:
        """Train `online.steps` steps, ask the gate, publish what it lets through.

        `hold` is called before every step: it may wait, or raise to give the update up. Raises
        ValueError where the records cannot be used. Then the next one starts where this one did.
        """
        try:
            return self._update(hold)
        except BaseException:
            self._trainer = None  # half trained; the state of the last update is on the disk
            raise

    def _update(self, hold: Callable[[], None]) -> Update:
        started = time.perf_counter()
        trainer, base = self._restore()
        number, news = self.state["update"], self.new_records()
        last_id = self._buffer.last_id(self.route)
        losses, tokens = [], trainer.tokens
        pools = self._pools(number)
        if not pools[0]:
            raise ValueError(
                "no recent record has scores at the temperature of the loss: use "
                "online.teacher=target, or divergence.temperature as it is served"
            )
        trainer.begin()
        for step in range(self.settings.steps):
            hold()
            losses.append(trainer.step(self._batch(pools, number, step)).loss)
        hold()
        verdict, before, after = self._ask(trainer, base)
        version = self._publish(trainer, base, verdict) if verdict.publish else None
        update = Update(
            number=number,
            records=news,
            tokens=trainer.tokens - tokens,
            seconds=time.perf_counter() - started,
            loss=sum(losses) / len(losses),
            before=before,
            after=after,
            verdict=verdict,
            version=None if version is None else version.name,
        )
        self._note(update, base, last_id)
        save_checkpoint(self._path, self._working(), self.state)
        return update

    def _note(self, update: Update, base: Version, last_id: int) -> None:
        """Count `update` in the state, and let training begin anew where it has forgotten."""
        state, published = self.state, update.version is not None
        pays = published and update.verdict.gain.mean >= self.settings.worth
        wait = 1.0 if pays else state["wait"] * self.settings.backoff
        if update.version is not None:
            lengths = [
                1 + expected_accepted(alpha.mean, self._gamma)
                for alpha in (update.before, update.after)
            ]
            state["growth"][update.version] = lengths[1] / lengths[0]
            state["alphas"][update.version] = update.after.as_dict()
        if update.verdict.anchor_change is not None:
            state["anchor_change"] = update.verdict.anchor_change.as_dict()
        state |= {
            "update": update.number + 1,
            "last_id": last_id,
            "wait": min(wait, self.settings.backoff_most),
            "base": update.version or base.name,
            "alpha_low": (update.after if published else update.before).low,
            "seconds": state["seconds"] + update.seconds,
            "tokens": state["tokens"] + update.tokens,
            "records": state["records"] + update.records,
        }
        if not published and has_forgotten(update.verdict, self.settings.gate.anchor_tolerance):
            self._restart(base)

    def records_seen(self) -> int:
        """Records of the training side that updates have seen, or will."""
        return self.state["records"] + self.new_records()

    def seconds_saved(self) -> float:
        """Seconds of decoding that published versions have saved: of each, what it has served times
        the growth of tau over the version before it, by the theory at the gate's paired alphas.
        """
        growth = self.state["growth"]
        served = self._buffer.served(self.route)
        return sum(one.seconds * (growth.get(one.version, 1.0) - 1) for one in served)

    def back_off(self) -> None:
        """Wait longer for the next update: the last ones have not paid."""
        wait = self.state["wait"] * self.settings.backoff
        self.state["wait"] = min(wait, self.settings.backoff_most)

    def _working(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def _restore(self) -> tuple[Trainer, Version]:
        """The trainer as the last update left it, or anew from the version in force.

        Weights whose version was withdrawn or rolled back are not gone on with.
        """
        base = self.registry.candidate() or self.registry.current()
        if base is None:
            raise ValueError(f"{self.route}: no drafter is published; start the server, or seed it")
        if self._trainer is None:
            self._trainer = self._make_trainer(base.path)
            if self._path.exists():
                self.state |= load_checkpoint(self._path, self._trainer)
        if self.state["base"] != base.name:
            if self.state["base"]:
                self._restart(base)
            self.state["base"] = base.name
        return self._trainer, base

    def _restart(self, base: Version) -> None:
        """Train from `base`; AdamW's moments were those of other weights."""
        steps, tokens = self._working().steps, self._working().tokens
        self._trainer = self._make_trainer(base.path)
        self._trainer.steps, self._trainer.tokens = steps, tokens

    # Rows

    def _pools(self, number: int) -> tuple[list[Record], list[Record]]:
        """Recent and older records that an update draws from."""
        settings, seed = self.settings, self._seed * 1_000_003 + number
        recent = self._buffer.newest(self.route, settings.recent, held_out=False)
        older = self._buffer.sample(
            self.route,
            settings.recent,
            held_out=False,
            seed=seed,
            recent=settings.recent,
            reservoir=True,
        )
        return self._usable(recent), self._usable(older)

    def _usable(self, stored: Sequence[Stored]) -> list[Record]:
        """The records that the teacher and the judge can use."""
        records = [one.record for one in stored]
        if self._stored_at is None:
            return records
        return [
            replace(record, loss_tail_mass=record.loss_tail_mass or record.tail_mass)
            for record in records
            if record.topk_ids is not None and served_at(record) == self._stored_at
        ]

    def _batch(self, pools: tuple[list[Record], list[Record]], number: int, step: int) -> Batch:
        """The rows of a step. A kind of which there is nothing leaves its room to recent ones."""
        settings, trainer = self.settings, self._working()
        recent, older = pools
        size = trainer.optim.rows_of_a_process
        anchors = round(size * settings.anchor_fraction) if self._anchors.train else 0
        fresh = round(size * settings.recent_fraction)
        reservoir = size - anchors - fresh if older else 0
        generator = torch.Generator()
        generator.manual_seed((self._seed * 1_000_003 + number) * 100_003 + step)
        kinds = (
            (recent, size - anchors - reservoir),
            (older, reservoir),
            (self._anchors.train, anchors),
        )
        rows = [
            row_of(kind[place], prompts=settings.prompts)
            for kind, count in kinds
            for place in chosen(len(kind), count, generator)
        ]
        return collate(rows, device=trainer.draft.device, sampler_version="served")

    # The gate

    def _ask(self, trainer: Trainer, base: Version) -> tuple[Verdict, Estimate, Estimate]:
        """The verdict on the weights as they are; alpha of the version in force, and theirs."""
        gate, weights = self.settings.gate, merged_weights(trainer.draft.model)
        stored = self._buffer.newest(self.route, gate.records, held_out=True)
        traffic = self._usable(stored)
        after = self._judge.score(weights, traffic)
        before = self._judge.score(self.registry.read(base), traffic)
        anchors = self._anchors.held_out
        if anchors and self._first_on_anchors is None:
            first = self.registry.versions()[0]
            self._first_on_anchors = self._judge.score(self.registry.read(first), anchors)
        verdict = judge(
            after=after,
            before=before,
            anchor_after=self._judge.score(weights, anchors) if anchors else None,
            anchor_first=self._first_on_anchors,
            tolerance=gate.anchor_tolerance,
            seed=self._seed,
        )
        served, new = (estimate_ratio(s.totals["alpha"], s.counts) for s in (before, after))
        return verdict, served, new

    def _publish(self, trainer: Trainer, base: Version, verdict: Verdict) -> Version:
        return self.registry.publish(
            lambda folder: self._save(trainer, folder),
            metrics=verdict.as_dict() | {"steps": trainer.steps, "tokens": trainer.tokens},
            window={"last_id": self._buffer.last_id(self.route), "update": self.state["update"]},
            parent=base.name,
            canary=self.settings.gate.canary_fraction > 0,
        )


def has_forgotten(verdict: Verdict, tolerance: float) -> bool:
    """Whether the anchors have lost more than is allowed."""
    change = verdict.anchor_change
    return change is not None and change.low < -tolerance


def served_at(record: Record) -> float:
    """The temperature of a record's stored tails: the served one, 1 where that is 0."""
    return record.sampling["temperature"] or 1.0


def row_of(record: Record, *, prompts: bool) -> TokenSequence:
    """A record's text; where nobody knows what was refused, all of it counts as if it had been.

    With `prompts` the prompt is learned from too, though nobody proposed it.
    """
    text = sequence_of_record(record)
    if text.rejected is None:
        text = replace(text, rejected=list(text.generated))
    return all_learned(text) if prompts else text


def chosen(count: int, wanted: int, generator: torch.Generator) -> list[int]:
    """`wanted` places of `count`, none twice while there are enough."""
    if wanted == 0:
        return []
    rounds = -(-wanted // count)
    order = [torch.randperm(count, generator=generator) for _ in range(rounds)]
    return torch.cat(order)[:wanted].tolist()
