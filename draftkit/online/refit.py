"""The refit of one route's drafter: what was served and what came before, k steps, the gate.

An update takes rows of three kinds: recent traffic, a sample of older traffic, and anchors, text
of before the drift, against forgetting (Liu et al. 2310.07177 train on recent traffic alone). Its
rows are a function of (seed, update, step) and of what lies in the buffer. Weights that the gate
lets through become a version in the registry; others go on being trained, unless they have
forgotten too much: then training starts again from the version in force. A version that serves is
looked at again on what is served since, and taken back where the one before it is surely better.

The state (weights, moments, counters) is saved after each update; a kill in between costs the
steps of one. This module knows no server, no clock to wait by and no configuration file.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from draftkit.config import OnlineConfig
from draftkit.config.service import LEAST_PROMPTS
from draftkit.data.rollouts import Record, document_of
from draftkit.distillation.batch import Batch, collate
from draftkit.distillation.checkpoint import load_checkpoint, save_checkpoint
from draftkit.distillation.trainer import Trainer
from draftkit.evaluation.alpha import PromptTotals, is_chained
from draftkit.models.lora import merged_weights
from draftkit.online.buffer import Buffer
from draftkit.online.gate import Judge, Verdict, judge, judge_served
from draftkit.online.registry import Registry, Version
from draftkit.online.rows import Anchors, drawn, with_scores
from draftkit.theory.speedup import expected_tokens

STATE = "state.safetensors"
BACKOFF, BACKOFF_MOST = 2.0, 16.0  # by which the next update waits longer, and at most
NEWEST = 32  # records by which a drift shows, and after which it is looked for again


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
    gamma: int
    seed: int
    # With stored scores the temperature of the loss, at which records must have been served to be
    # trained on. None: every record will do.
    stored_at: float | None = None

    def __post_init__(self) -> None:
        self.state: dict[str, Any] = {
            "update": 0,
            "last_id": 0,  # of the records that updates have seen
            "wait": 1.0,  # times `min_records`, until the next update
            "base": "",  # the version that the weights come from
            "alpha_low": None,  # of that version, on the traffic of the last update
            "seconds": 0.0,  # that updates have taken
            "tokens": 0,  # that they have trained on
            "gates": {},  # version -> how often other weights were tested against it
            "chosen": {},  # version -> the newest record when it was published
            "growth": {},  # version -> its tau over that of the one before, both after its gate
            "alphas": {},  # version -> its alpha on held-out traffic after its gate
            "anchor_change": None,  # of the weights of the last update, since the first version
            "records": 0,  # that updates have seen, of the training side
            "looks": {},  # version -> the number of the last look at it while it was in force
        }
        self._path = self.folder / STATE
        self._trainer: Trainer | None = None
        self._drift_looked_at = 0  # new records at the last look for a drift

    # When

    def due(self) -> bool:
        """Whether enough was recorded since the last update."""
        _, base = self._restore()
        news = self.new_records()
        if news < self.settings.min_records:
            return False
        most = self.settings.gate.records
        if self.buffer.conversations(self.route, held_out=True, newest=most) < LEAST_PROMPTS:
            return False
        return news >= self.wanted or self._has_drifted(base, news)

    def _has_drifted(self, base: Version, news: int) -> bool:
        """Whether alpha on the newest records lies below what the last update left.

        Then the wait of updates that did not pay is over: the traffic is another. Models run only
        where `NEWEST` records have come since the last look. A false alarm costs an early update,
        which the gate judges like any other.
        """
        known = self.state["alpha_low"]
        if known is None or news < self._drift_looked_at + NEWEST:
            return False
        self._drift_looked_at = news
        after = self.state["last_id"]
        records, conversations = self._scorable(NEWEST, held_out=False, after=after)
        if conversations < LEAST_PROMPTS:
            return False
        scored = self.judge.score(self.registry.read(base), records)
        return scored.alpha.high < known

    @property
    def wanted(self) -> int:
        """New records that the next update waits for."""
        return int(self.settings.min_records * self.state["wait"])

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
        losses, tokens = [], trainer.tokens
        pools = self._pools(number)
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
            losses.append(trainer.step(self._batch(pools, number, step)).loss)
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
        state, verdict, published = self.state, update.verdict, update.version is not None
        change, known = verdict.anchor_change, verdict.after if published else verdict.before
        pays = published and verdict.gain.mean >= self.settings.worth
        state["gates"][base.name] = state["gates"].get(base.name, 0) + 1
        self._drift_looked_at = 0
        if pays:
            state["wait"] = 1.0
        else:
            self.back_off()
        if update.version is not None:
            state["chosen"][update.version] = self.buffer.last_id(self.route)
        if change is not None:
            state["anchor_change"] = change.as_dict()
        state |= {
            "update": update.number + 1,
            "last_id": last_id,
            "base": update.version or base.name,
            "alpha_low": known.low,
            "seconds": state["seconds"] + update.seconds,
            "tokens": state["tokens"] + update.tokens,
            "records": state["records"] + update.records,
        }
        forgotten = change is not None and change.low < -self.settings.gate.anchor_tolerance
        if forgotten and not published:
            self._restart(base)

    def records_seen(self) -> int:
        """Records of the training side that updates have seen, or will."""
        return self.state["records"] + self.new_records()

    def seconds_saved(self) -> float:
        """Seconds of decoding that published versions have saved: of each, what it has served times
        the growth of tau over the version before it, by the theory at paired alphas. A version
        whose growth is not known yet has saved nothing.
        """
        growth = self.state["growth"]
        served = self.buffer.served(self.route)
        return sum(one.seconds * (growth.get(one.version, 1.0) - 1) for one in served)

    def back_off(self) -> None:
        """Wait longer for the next update: the last ones have not paid."""
        self.state["wait"] = min(self.state["wait"] * BACKOFF, BACKOFF_MOST)

    def _working(self) -> Trainer:
        assert self._trainer
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

    def _pools(self, number: int) -> tuple[list[Record], list[Record]]:
        """Recent and older records that an update draws from."""
        settings, seed = self.settings, self.seed * 1_000_003 + number
        recent = self.buffer.newest(self.route, settings.recent, held_out=False)
        older = self.buffer.older(
            self.route, settings.recent, held_out=False, seed=seed, recent=settings.recent
        )
        return self._learnable(recent), self._learnable(older)

    def _learnable(self, records: list[Record]) -> list[Record]:
        """The records that the teacher can use."""
        if self.stored_at is None:
            return records
        others = self._working().draft.vocab_size - 1
        width = min(self.settings.buffer.top_k, others)
        return with_scores(records, temperature=self.stored_at, width=width)

    def _batch(self, pools: tuple[list[Record], list[Record]], number: int, step: int) -> Batch:
        """The rows of a step."""
        trainer, generator = self._working(), torch.Generator()
        generator.manual_seed(((self.seed * 1_000_003 + number) * 100_003 + step) % 2**63)
        size = trainer.optim.rows_of_a_process
        rows = drawn((*pools, self.anchors.train), size, self.settings, generator)
        return collate(rows, device=trainer.draft.device)

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
        traffic, _ = self._scorable(gate.records, held_out=True)
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
        what they say of its alpha and growth goes into the state.

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
        before = self.judge.score(earlier, fresh)
        now = self.judge.score(self.registry.read(base), fresh)
        lengths = [before.alpha.mean, now.alpha.mean]
        if not is_chained(self.judge.draft):
            lengths = [expected_tokens(alpha, self.gamma) for alpha in lengths]
        self.state["growth"][base.name] = lengths[1] / lengths[0]
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
        self.state["looks"][base.name] = look
        reason = None
        if (scored := self._measure(base, held_out=False)) is not None:
            before, now = scored
            reason = judge_served(now=now, before=before, look=look, measure=self.judge.measure)
        if reason is not None:
            self.registry.rollback(base.parent, reason=reason, current=base.name)
            self.back_off()
        save_checkpoint(self._path, self._working(), self.state)  # a restart looks no second time
        return reason
