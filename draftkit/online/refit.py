"""The refit of one route's drafter: what was served and what came before, k steps, the gate.

An update takes rows of three kinds: recent traffic, a sample of older traffic, and anchors, text
of before the drift, against forgetting (Liu et al. 2310.07177 train on recent traffic alone). Its
rows are a function of (seed, update, step) and of what lies in the buffer. Weights that the gate
lets through become a version in the registry; others go on being trained, unless they have
forgotten too much: then training starts again from the version in force. A version that serves is
looked at again on what is served since, and taken back where the one before it is surely better.

The state (weights, moments, counters) is saved after each update; a kill in between costs the
steps of one. This module knows no server and no clock to wait by.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftkit.config import Config, DraftConfig, OnlineConfig, OptimConfig
from draftkit.config.service import LEAST_PROMPTS
from draftkit.data.rollouts import Record, document_of
from draftkit.decoding.catalogue import served_mode
from draftkit.distillation.assembly import load_learner, make_trainer
from draftkit.distillation.batch import TokenSequence, collate, sequence_of_record
from draftkit.distillation.loop import load_checkpoint, save_checkpoint
from draftkit.distillation.remote import RemoteTarget
from draftkit.distillation.trainer import Trainer
from draftkit.evaluation.alpha import PromptTotals
from draftkit.models.loading import Outline, Target, load_draft, save_draft, with_path
from draftkit.models.lora import merged_weights
from draftkit.online.buffer import Buffer
from draftkit.online.gate import Judge, Verdict, judge, judge_served
from draftkit.online.registry import Registry, Version

STATE = "state.safetensors"
DECISIONS = 200  # of the gate, that are remembered
DOUBLINGS = 4  # of the wait for the next update, at most
RECENT_FRACTION = 0.5  # of the rows of a step

Pools = tuple[Sequence[Record], Sequence[Record], Sequence[Record]]  # recent, older and anchors


@dataclass(frozen=True)
class Anchors:
    """Text of before: rows to mix in, and held-out ones for the gate. Either may be empty."""

    train: Sequence[Record] = ()
    held_out: Sequence[Record] = ()


def row_of(record: Record, *, prompts: bool) -> TokenSequence:
    """A record's text; where nobody knows what was refused, all of it counts as if it had been.

    With `prompts` the prompt is learned from too, though nobody proposed it.
    """
    text = sequence_of_record(record)
    if text.rejected is None:
        text = replace(text, rejected=list(text.generated))
    if prompts:  # of which no scores are stored: ask the target
        text = replace(text, generated=[False] + [True] * (len(text.token_ids) - 1))
    return text


def drawn(pools: Pools, size: int, settings: OnlineConfig, seed: int) -> list[TokenSequence]:
    """`size` rows, each kind in its share; recent ones take the room of a kind that is empty."""
    _, older, anchors = pools
    anchored = round(size * settings.anchor_fraction) if anchors else 0
    fresh = min(round(size * RECENT_FRACTION), size - anchored)
    aged = size - anchored - fresh if older else 0
    generator, rows = torch.Generator().manual_seed(seed), list[TokenSequence]()
    for records, count in zip(pools, (size - anchored - aged, aged, anchored), strict=True):
        order: list[int] = []  # no record twice before all have come
        while len(order) < count:
            order += torch.randperm(len(records), generator=generator).tolist()
        rows += [row_of(records[index], prompts=settings.prompts) for index in order[:count]]
    return rows


@dataclass(frozen=True)
class Update:
    """What one update did; `loss` is the mean over its steps."""

    number: int
    records: int  # new ones since the update before
    tokens: int  # generated tokens trained on
    seconds: float
    loss: float
    verdict: Verdict
    version: str | None  # what was published


@dataclass(kw_only=True)
class Refit:
    """One route: its buffer, its registry, and the trainer whose weights become versions."""

    route: str
    buffer: Buffer
    registry: Registry
    # A trainer whose draft starts from a version's folder. The schedule of its rate begins anew
    # with each update: what the gate sees, and users get, has come to rest.
    make_trainer: Callable[[Path], Trainer]
    save: Callable[[Trainer, Path], None]  # writes the draft as a folder that serving can load
    judge: Judge
    anchors: Anchors
    settings: OnlineConfig
    folder: Path
    seed: int
    # With stored scores the temperature of the loss, at which records must have been served to be
    # trained on. None: every record will do.
    stored_at: float | None = None

    def __post_init__(self) -> None:
        self.state: dict[str, Any] = {
            "update": 0,
            "last_id": 0,  # of the records that updates have seen
            "refused": 0,  # updates in a row, by the gate or taken back
            "base": "",  # the version that the weights come from
            "gates": {},  # version -> how often other weights were tested against it
            "chosen": {},  # version -> the newest record when it was published
            "alphas": {},  # version -> its alpha on held-out traffic after its gate
            "anchor_change": None,  # of the weights of the last update, since the first version
            "records": 0,  # that updates have seen, of the training side
            "looks": {},  # version -> the number of the last look at it while it was in force
            "decisions": [],  # the newest `DECISIONS` of the gate, the oldest first
        }
        self._path = self.folder / STATE
        self._trainer: Trainer | None = None

    # When

    def due(self) -> bool:
        """Whether enough was recorded since the last update, and for a gate."""
        self._restore()
        if self.new_records() < self.wanted:
            return False
        most = self.settings.gate.records
        held_out = self.buffer.conversations(self.route, held_out=True, newest=most)
        return held_out >= LEAST_PROMPTS

    @property
    def wanted(self) -> int:
        """New records that the next update waits for: twice as many after each that was refused."""
        return self.settings.min_records * 2 ** min(self.state["refused"], DOUBLINGS)

    def new_records(self) -> int:
        """Records that no update has seen."""
        return self.buffer.count(self.route, held_out=False, after=self.state["last_id"])

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
        last_id = self.buffer.last_id(self.route)
        losses, tokens, room = [], trainer.tokens, self.settings.recent
        seed = self.seed * 1_000_003 + number
        recent = self.buffer.newest(self.route, room, held_out=False)
        older = self.buffer.older(self.route, room, held_out=False, seed=seed, recent=room)
        pools = self._learnable(recent), self._learnable(older), self.anchors.train
        if not pools[0]:
            raise ValueError(
                "no recent record has scores at the temperature of the loss: use "
                "online.teacher=target, or divergence.temperature as it is served"
            )
        _, conversations = self._scorable(self.settings.gate.records, held_out=True)
        if conversations < LEAST_PROMPTS:
            raise ValueError(
                f"the gate can score {conversations} held-out conversations and needs "
                f"{LEAST_PROMPTS}: use online.teacher=target, or wait for more traffic without a "
                "repetition penalty"
            )
        trainer.begin()
        for step in range(self.settings.steps):
            hold()
            size, own = trainer.optim.rows_of_a_process, (seed * 100_003 + step) % 2**63
            rows = drawn(pools, size, self.settings, own)
            losses.append(trainer.step(collate(rows, device=trainer.draft.device)).loss)
        hold()
        verdict = self._test(trainer, base)
        version = None
        if verdict.publish:
            version = self.registry.publish(
                partial(self.save, trainer),
                metrics=verdict.as_dict() | {"steps": trainer.steps, "tokens": trainer.tokens},
                parent=base.name,
            )
        update = Update(
            number=number,
            records=news,
            tokens=trainer.tokens - tokens,
            seconds=time.perf_counter() - started,
            loss=sum(losses) / len(losses),
            verdict=verdict,
            version=None if version is None else version.name,
        )
        self._note(update, base, last_id=last_id)
        save_checkpoint(self._path, self._working(), self.state)
        return update

    def _note(self, update: Update, base: Version, *, last_id: int) -> None:
        """Count `update` in the state, and let training begin anew where it has forgotten.

        last_id: of the records that it has seen.
        """
        state, change = self.state, update.verdict.anchor_change
        state["gates"][base.name] = state["gates"].get(base.name, 0) + 1
        state["refused"] = 0 if update.version else state["refused"] + 1
        decision = {"time": time.time(), "update": update.number, "base": base.name}
        decision |= {"version": update.version, **update.verdict.as_dict()}
        state["decisions"] = [*state["decisions"], decision][-DECISIONS:]
        if update.version:
            state["chosen"][update.version] = self.buffer.last_id(self.route)
        if change is not None:
            state["anchor_change"] = change.as_dict()
        state |= {
            "update": update.number + 1,
            "last_id": last_id,
            "base": update.version or base.name,
            "records": state["records"] + update.records,
        }
        forgotten = change is not None and change.low < -self.settings.gate.anchor_tolerance
        if forgotten and not update.version:
            self._restart(base)

    def _working(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def _restore(self) -> tuple[Trainer, Version]:
        """The trainer as the last update left it, or anew from the version in force.

        Weights whose version was rolled back are not gone on with.
        """
        base = self.registry.current()
        if base is None:
            raise ValueError(f"{self.route}: no drafter is published; start the server, or seed it")
        if self._trainer is None:
            self._trainer = self.make_trainer(base.path)
            if self._path.exists():
                self.state |= load_checkpoint(self._path, self._trainer)
        if self.state["base"] != base.name:
            if self.state["base"]:
                self._restart(base)
            self.state["base"] = base.name
        return self._trainer, base

    def _restart(self, base: Version) -> None:
        """Train from `base`; AdamW's moments were those of other weights."""
        before, self._trainer = self._working(), self.make_trainer(base.path)
        self._trainer.steps, self._trainer.tokens = before.steps, before.tokens

    # Rows

    def _learnable(self, records: Sequence[Record]) -> Sequence[Record]:
        """Those that the teacher can use, with the tail that the loss reads.

        Stored scores take the mass outside the stored ids at the very temperature of the loss, so
        that a record was served at it, and as many ids a token, so that rows fit into one batch.
        """
        if self.stored_at is None:  # engines score what leaves them room
            return (
                records if self.judge.engines is None else [*filter(self.judge.can_score, records)]
            )
        width = min(self.settings.buffer.top_k, self._working().draft.vocab_size - 1)
        return [
            replace(record, loss_tail_mass=record.loss_tail_mass or record.tail_mass)
            for record in records
            if record.topk_ids is not None
            and (record.sampling["temperature"] or 1.0) == self.stored_at  # tails are at 1 for 0
            and all(len(ids) == width for ids in record.topk_ids)
        ]

    # The gate

    def _scorable(self, count: int, *, held_out: bool, after: int = 0) -> tuple[list[Record], int]:
        """Those of the `count` newest records that the judge can score, the newest first, and how
        many conversations they are of.
        """
        newest = self.buffer.newest(self.route, count, held_out=held_out, after=after)
        records = list(filter(self.judge.can_score, newest))
        return records, len(set(map(document_of, records)))

    def _test(self, trainer: Trainer, base: Version) -> Verdict:
        """The verdict on the weights as they are."""
        gate, weights = self.settings.gate, merged_weights(trainer.draft.model)
        traffic = self.judge.completed(self._scorable(gate.records, held_out=True)[0])
        after = self.judge.score(weights, traffic)
        before = self.judge.score(self.registry.read(base), traffic)
        anchor_after = anchor_first = None
        if self.anchors.held_out:
            first = self.registry.version((base.name, *base.ancestors)[-1])
            anchor_first = self.judge.score(self.registry.read(first), self.anchors.held_out)
            anchor_after = self.judge.score(weights, self.anchors.held_out)
        verdict = judge(
            after=after,
            before=before,
            anchor_after=anchor_after,
            anchor_first=anchor_first,
            tolerance=gate.anchor_tolerance,
            gate=self.state["gates"].get(base.name, 0) + 1,
            measure=self.judge.measure,
        )
        self._measure(base, held_out=True)
        return verdict

    # What serves

    def _measure(
        self, base: Version, *, held_out: bool
    ) -> tuple[PromptTotals, PromptTotals] | None:
        """The version before `base`, and `base`, scored on those records that came after its gate;
        what they say of its alpha goes into the state.

        Those of the gate chose it, so what they say of it is too high. None where they are too few,
        or there is nothing to compare with.
        """
        since = self.state["chosen"].get(base.name)
        if since is None or base.parent is None:
            return None
        newest = self.settings.gate.records
        fresh, conversations = self._scorable(newest, held_out=held_out, after=since)
        if conversations < LEAST_PROMPTS:
            return None
        try:
            earlier = self.registry.read(self.registry.version(base.parent))
        except ValueError:
            return None  # deleted or damaged
        fresh = self.judge.completed(fresh)
        before = self.judge.score(earlier, fresh)
        now = self.judge.score(self.registry.read(base), fresh)
        self.state["alphas"][base.name] = now.alpha.as_dict()
        return before, now

    def review(self) -> str | None:
        """Take the version in force back where it is surely worse than the one before it.

        Returns the reason, if so. Both are scored on the newest records served since it was
        published (of the training side: no update that made it saw them); the law of an answer is
        the target's, whichever of them drafted. A look is due after `min_records` of them, and
        whenever there are twice as many.
        """
        _, base = self._restore()
        if base.parent is None:
            return None
        # One that a killed process or a person has published is looked at from now on.
        since = self.state["chosen"].setdefault(base.name, self.buffer.last_id(self.route))
        count = self.buffer.count(self.route, held_out=False, after=since)
        look = (count // self.settings.min_records).bit_length()
        if look <= self.state["looks"].get(base.name, 0):
            return None
        reason = None
        if (scored := self._measure(base, held_out=False)) is not None:
            before, now = scored
            reason = judge_served(now=now, before=before, look=look, measure=self.judge.measure)
        self.state["looks"][base.name] = look
        if reason is not None:
            self.registry.rollback(base.parent, reason=reason, current=base.name)
            self.state["refused"] += 1
        save_checkpoint(self._path, self._working(), self.state)  # a restart looks no second time
        return reason


def make_refit(
    config: Config,
    *,
    route: str,
    start: DraftConfig,
    target: Outline,
    buffer: Buffer,
    registry: Registry,
    anchors: Anchors,
    folder: Path,
) -> Refit:
    """The refit of `route`, as its last update left it in `folder`.

    start: how the drafter of a version is loaded. target: its outline alone where the buffer's
    stored scores stand for it. The registry has a version.
    """
    current = registry.current()
    assert current is not None
    optim = optim_of_update(config)
    # Of the hybrid's proposals, those that the drafter makes are sampled.
    proposer = "sampled" if config.decode.proposer == "hybrid" else config.decode.proposer
    mode = served_mode(replace(config.decode, proposer=proposer)) or "alpha"
    knows = target.adapter if isinstance(target, Target) else None
    engines = target if isinstance(target, RemoteTarget) else None

    def trainer_of(path: Path) -> Trainer:
        draft = load_learner(with_path(start, path), target)
        return make_trainer(config, draft, target, optim=optim)

    return Refit(
        route=route,
        buffer=buffer,
        registry=registry,
        make_trainer=trainer_of,
        save=lambda trainer, path: save_draft(trainer.draft, target.tokenizer, path),
        judge=Judge(
            load_draft(with_path(start, current.path), target),
            knows,
            batch_size=config.evaluate.batch_size,
            acceptance=mode,
            engines=engines,
        ),
        anchors=anchors,
        settings=config.online,
        folder=folder,
        seed=config.seed,
        stored_at=None if knows or engines else config.training_temperature,
    )


def optim_of_update(config: Config) -> OptimConfig:
    """`optim` for updates: the rate falls to 0 in each of them, without a warm-up.

    At a constant rate what is served would be as far from its optimum as the last step was long.
    """
    steps = config.online.steps
    return replace(config.optim, lr_scheduler_type="linear", max_steps=steps, warmup_steps=0)
