"""What the steps of a plan take on this machine: a few real steps of each, at their full size.

A probe loads what its step loads and runs a few of its steps by the step's own functions, with its
batch sizes and with texts as long as they get, so that the peak of memory is that of the step. Time
follows from the steps' number. A probe makes up the texts that are not made yet: their lengths
decide what they cost, not their words.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, cycle, islice
from math import ceil, log
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftkit.checking.shapes import lengths_of_splits
from draftkit.config import Config, ModelConfig, PretrainConfig, has_compiler
from draftkit.data.prompts import Example, Splits
from draftkit.data.rollouts import Record, read_records, write_records
from draftkit.decoding.ngrams import PromptLookup
from draftkit.distillation.batch import Batch, TokenSequence, collate, sequence_of_record
from draftkit.distillation.checkpoint import save_checkpoint, save_weights
from draftkit.distillation.trainer import Trainer
from draftkit.evaluation.alpha import score_drafts
from draftkit.evaluation.costs import BURST, SETTLING, WARM_TURNS, meter
from draftkit.evaluation.judge import LOOKUP, Prompts, check_lossless, proposers_of, timing
from draftkit.evaluation.report import speedup_figure
from draftkit.evaluation.walltime import (
    CALIBRATED_GAMMAS,
    FIRST_LOOK,
    PLAIN,
    Method,
    PromptIds,
    decoding,
    shapes,
)
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target, load_draft, load_target
from draftkit.tracking import FILE_NAME, Tracker, read_metrics
from draftkit.workflow.drafting import make_draft
from draftkit.workflow.fitting import (
    TRIAL_SHARE,
    Job,
    load_teaching_target,
    make_trainer,
    validation_alpha,
)
from draftkit.workflow.pretraining import WORTH_COMPILING, pretrain
from draftkit.workflow.sampling import target_sampler
from draftkit.workflow.sources import (
    SCORED_AT_ONCE,
    TrainingTexts,
    make_source,
    reads_rollouts,
    scored_by,
)

STEPS = 6  # of training: more than there are between two that are logged
SHORT, LONG = 4, 16  # tokens of an answer: what the longer one takes more is what tokens take
LOOKED_AT = 1 << 15  # rows among which the longest are sought
MEASURED = {  # what a figure needs of an evaluation
    "gamma": 1,
    "speedup": {"measured": 1.0, "ci95": [1.0, 1.0], "predicted_by_gamma": [1.0, 1.0]},
}


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock, and of processors."""

    wall: float = 0.0
    processor: float = 0.0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall + other.wall, self.processor + other.processor)

    def __mul__(self, times: float) -> "Spent":
        return Spent(self.wall * times, self.processor * times)

    def more_than(self, other: "Spent") -> "Spent":
        """What this took beyond `other`; nothing where it was the quicker one."""
        return Spent(max(0.0, self.wall - other.wall), max(0.0, self.processor - other.processor))


def spent(call: Callable[[], Any]) -> Spent:
    """What a call took."""
    wall, processor = time.perf_counter(), time.process_time()
    call()
    return Spent(time.perf_counter() - wall, time.process_time() - processor)


@dataclass(kw_only=True)
class Probe:
    """An experiment whose steps are probed.

    target, start: the pair, where it is given or made already; else the probes of the steps that
    make it leave one of as many weights. tokenizer: of the target. answer: tokens of an answer to a
    held-out prompt, at most. folder: of files that are needed no more afterwards. rollouts: the
    target's, where they are made already.
    """

    config: Config
    target: ModelConfig | None
    start: ModelConfig | None
    tokenizer: PreTrainedTokenizerBase
    splits: Splits
    answer: int
    folder: Path
    rollouts: Sequence[Record] | None = None

    # What is made up

    @cached_property
    def mean_answer(self) -> float:
        """Tokens of the data's own answers, which stand for those of the target."""
        return lengths_of_splits(self.splits).mean_answer

    def prompts(self, split: str, count: int) -> list[list[int]]:
        """The first prompts of a split, again from the first where it has fewer."""
        examples: Sequence[Example] = getattr(self.splits, split)
        first = [one.prompt_ids for one in islice(examples, count)]
        return list(islice(cycle(first), count))

    def longest_prompts(self, count: int) -> list[list[int]]:
        """The longest of the training split."""
        some = (one.prompt_ids for one in islice(self.splits.train, LOOKED_AT))
        return list(islice(cycle(sorted(some, key=len, reverse=True)[:count]), count))

    def words(self, count: int) -> list[int]:
        """So many tokens of the training text."""
        return list(
            islice(cycle(chain.from_iterable(e.token_ids for e in self.splits.train)), count)
        )

    def records(self, prompts: Sequence[list[int]], new: int) -> list[Record]:
        """Prompts with answers of so many tokens."""
        sampling, output = dict(vars(self.config.sampling)), self.words(new)
        return [
            Record(
                prompt_ids=prompt,
                output_ids=output,
                sampler="target",
                sampler_version="",
                sampling=sampling,
                seed=self.config.seed,
                row=row,
            )
            for row, prompt in enumerate(prompts)
        ]

    def held_out(self, split: str, count: int) -> list[Record]:
        """Contexts of a split as they will be."""
        return self.records(self.prompts(split, count), self.answer)

    def stored(self, records: Sequence[Record]) -> list[Record]:
        """`records` out of a file, as one step leaves them to the next."""
        write_records(self.folder / "records.parquet", records)
        return read_records(self.folder / "records.parquet")

    def lengthened(self, prompts: PromptIds, more: int) -> list[list[int]]:
        """Prompts as they are when the last few tokens of their answers are decoded."""
        return [[*prompt, *self.words(max(0, more))] for prompt in prompts]

    # Steps, by name

    def train_target(self) -> Spent:
        """Of training a target from nothing."""
        whole = self._pretraining("target", self.config.target.pretrain, self._pretrain_target)
        self.target = ModelConfig(path=str(self.folder / "target"))
        return whole

    def prepare(self) -> Spent:
        """Of making a drafter; one that is cut and not trained is made whole."""
        cut = self.config.draft.shrink
        shape = self.config.draft.pretrain
        if cut.layers:
            shape = replace(shape, max_steps=cut.steps)
        whole = self._pretraining("draft", shape, self._make_draft)
        self.start = ModelConfig(path=str(self.folder / "draft"))
        return whole

    def _pretraining(
        self, key: str, shape: PretrainConfig, make: Callable[[Config, Tracker], None]
    ) -> Spent:
        """Of `make`, which trains the model of `key` as `shape` says, from a few of its steps."""
        config, steps = self.config, min(STEPS, shape.max_steps)
        compiled = config.optim.compile == "auto" and shape.max_steps >= WORTH_COMPILING
        optim = replace(config.optim, logging_steps=1)
        if config.optim.compile == "auto":
            optim.compile = str(compiled and has_compiler()).lower()
        model = getattr(config, key)
        few = replace(model, pretrain=replace(shape, max_steps=max(1, steps)))
        if key == "draft" and model.shrink.layers:
            few = replace(few, shrink=replace(model.shrink, steps=steps))
        tracker = Tracker(self.folder)
        some = spent(lambda: make(replace(config, optim=optim, **{key: few}), tracker))
        tracker.finish(0)
        if steps == shape.max_steps:
            return some
        times = [line["time"] for line in read_metrics(self.folder / FILE_NAME)]
        a_step = (times[-1] - times[1]) / max(1, len(times) - 2)
        rest = Spent(a_step, a_step * some.processor / some.wall)
        return some + rest * (shape.max_steps - steps)

    def _pretrain_target(self, config: Config, tracker: Tracker) -> None:
        splits = self.splits
        pretrain(
            "target",
            config,
            tokenizer=self.tokenizer,
            texts=splits.train,
            length=splits.room.total,
            folder=self.folder,
            tracker=tracker,
            note=_unheard,
        )

    def _make_draft(self, config: Config, tracker: Tracker) -> None:
        assert self.target is not None
        make_draft(
            config,
            self.target,
            tokenizer=self.tokenizer,
            texts=self.splits.train,
            held_out=self.splits.validation,
            length=self.splits.room.total,
            folder=self.folder,
            tracker=tracker,
            note=_unheard,
        )

    def generate(self) -> Spent:
        """Of the target's answers to training prompts; an engine that gives them is not probed."""
        options, room = self.config.generate, self.splits.room
        if options.engine != "decoder":
            return Spent()
        prompts = self.longest_prompts(min(options.batch_size, options.rollouts))
        loading, target = self._loaded_target()
        answers = self._answers(target, prompts, room.new, room.total)
        return loading + answers * (options.rollouts / len(prompts))

    def contexts(self) -> Spent:
        """Of the target's answers to held-out prompts."""
        options = self.config.evaluate
        loading, target = self._loaded_target()
        whole = loading
        for split, count in (("validation", options.validation_prompts), ("test", options.prompts)):
            rows = min(count, len(getattr(self.splits, split)))
            prompts = self.prompts(split, min(options.batch_size, rows))
            answers = self._answers(target, prompts, self.answer, None)
            whole += answers * (rows / len(prompts))
        return whole

    def _loaded_target(self) -> tuple[Spent, Target]:
        """The target, which no end of text stops, and what loading it took."""
        assert self.target is not None
        loaded: list[Target] = []
        hardware = self.config.hardware
        loading = spent(lambda: loaded.append(load_target(self.target, hardware)))
        return loading, replace(loaded[0], eos_token_ids=())

    def _answers(
        self, target: Target, prompts: list[list[int]], new: int, length: int | None
    ) -> Spent:
        """Of answers of the mean length to one batch of prompts, at most `new` tokens each.

        Their last tokens are decoded, once a few and once more of them: the cache is as large as it
        gets, and the difference is what tokens take.
        """
        long = min(LONG, new)
        short = min(SHORT, long - 1)
        texts = self.lengthened(prompts, new - long)

        def decode(tokens: int) -> None:
            sampler = target_sampler(
                target,
                sampling=self.config.sampling,
                seed=self.config.seed,
                max_new_tokens=tokens,
                batch_size=len(texts),
                max_length=length,
            )
            sampler.sample(texts, rows=range(len(texts)), version="")

        decode(1)  # the first call makes what later ones use
        return self._extended(spent(partial(decode, short)), spent(partial(decode, long)), new)

    def _extended(self, short: Spent, long: Spent, new: int) -> Spent:
        """From answers of a few and of more tokens to those of the mean length, at most `new`."""
        most = min(LONG, new)
        least = min(SHORT, most - 1)
        a_token = long.more_than(short) * (1 / (most - least))
        return short + a_token * (min(new, self.mean_answer) - least)

    def scores(self) -> Spent:
        """Of the target's most likely ids at every token."""
        config = self.config
        loading, target = self._loaded_target()
        records = self.records(self.longest_prompts(SCORED_AT_ONCE), self.splits.room.new)
        count = len(self.splits.train) + config.evaluate.validation_prompts
        if config.source.name == "target":
            count = config.generate.rollouts + config.evaluate.validation_prompts

        def score() -> None:
            options = {"top_k": config.generate.top_k, "temperature": config.training_temperature}
            [*scored_by(target.adapter, records, **options)]

        score()
        share = min(1.0, self.mean_answer / self.splits.room.new)
        return loading + spent(score) * (share * count / len(records))

    def train(self) -> Spent:
        """Of fitting the drafter: loading, steps, validation, checkpoints, trials of the rate."""
        assert self.target is not None
        assert self.start is not None
        config, compiled = self.config, self.config.optim.compiles
        optim = replace(config.optim, compile=str(compiled).lower())
        config = replace(config, optim=optim)
        stored = config.generate.top_k > 0
        begun = Spent(time.perf_counter(), time.process_time())
        target = load_teaching_target(self.target, config.hardware, stored=stored)
        trainer = make_trainer(config, self.start, target, optim)
        known = target if isinstance(target, Target) else None
        texts = self._training_texts(stored=stored)
        source = make_source(config, known, trainer.draft, texts, self.folder)
        trainer.step(source.batch(0), measure=True)
        loading = Spent(time.perf_counter(), time.process_time()).more_than(begun)
        every = config.source.refresh_steps if source_samples(config) else 1
        steps, sampling, batches = Spent(), Spent(), list[Batch]()
        for number in range(1, STEPS):
            sampling += spent(lambda at=number * every: batches.append(source.batch(at)))
            steps += spent(lambda: trainer.step(batches.pop(), measure=True))
        a_step = (steps + sampling * (1 / every)) * (1 / (STEPS - 1))
        held_out = self.held_out(
            "validation", min(config.evaluate.batch_size, config.evaluate.validation_prompts)
        )
        job = Job(
            config=config,
            target=target,
            start=self.start,
            texts=texts,
            validation=[self.scored(one) for one in held_out],
            folder=self.folder,
            tracker=Tracker(None),
            note=_unheard,
        )
        check = spent(lambda: validation_alpha(job, trainer.draft, "validation", 0))
        check *= config.evaluate.validation_prompts / len(held_out)
        weights = spent(lambda: save_weights(self.folder / "weights.safetensors", trainer))
        state = spent(lambda: save_checkpoint(self.folder / "state.safetensors", trainer, {}))
        self._longest_step(trainer)
        checks, saves = optim.max_steps // optim.eval_steps + 1, optim.max_steps / optim.save_steps
        whole = loading + a_step * optim.max_steps + (check + weights) * checks
        whole += state * ceil(saves)
        trial = loading + a_step * (optim.max_steps / TRIAL_SHARE) + (check + weights + state) * 2
        return whole + trial * len(optim.rate_factors)

    def _training_texts(self, *, stored: bool) -> TrainingTexts:
        """What the drafter learns on, as long as it will be; with made-up scores where `stored`."""
        config, splits, room = self.config, self.splits, self.splits.room
        count = STEPS * config.optim.rows_of_a_process
        if stored and config.source.name == "fixed":
            examples = [one for one in islice(splits.train, LOOKED_AT) if one.has_completion][
                :count
            ]
            answers = [one.token_ids[len(one.prompt_ids) :] for one in examples]
            records = self.records([one.prompt_ids for one in examples], 1)
            pairs = zip(records, answers, strict=True)
            scored = [self.scored(replace(one, output_ids=answer)) for one, answer in pairs]
            return TrainingTexts(examples, room, None, scored)
        rollouts = self.rollouts
        if rollouts is None and (stored or reads_rollouts(config)):
            rollouts = self.records(self.prompts("train", count), max(1, round(self.mean_answer)))
        if stored:
            assert rollouts is not None
            scored = [self.scored(one) for one in islice(rollouts, count)]
            return TrainingTexts(splits.train, room, None, scored)
        return TrainingTexts(splits.train, room, rollouts)

    def scored(self, record: Record) -> Record:
        """`record` with scores of the target, where `generate.top_k` stores some."""
        k, tokens = self.config.generate.top_k, len(record.output_ids)
        if k == 0:
            return record
        return replace(
            record,
            topk_ids=[[*range(k)]] * tokens,
            topk_log_probs=[[-log(k + 1)] * k] * tokens,
            tail_mass=[1 / (k + 1)] * tokens,
            loss_tail_mass=[1 / (k + 1)] * tokens,
        )

    def _longest_step(self, trainer: Trainer) -> None:
        """A step on a batch of texts that are as long as they get."""
        rows = self.config.optim.rows_of_a_process
        if self.config.source.name == "fixed" and self.config.generate.top_k == 0:
            examples = islice(self.splits.train, LOOKED_AT)
            longest = sorted(examples, key=lambda one: len(one.token_ids), reverse=True)[:rows]
            texts = [TokenSequence(one.token_ids, one.loss_mask) for one in longest]
        else:
            records = self.records(self.longest_prompts(rows), self.splits.room.new)
            texts = [sequence_of_record(self.scored(one)) for one in records]
        packed = self.splits.room.total if self.config.data.packing else None
        trainer.step(collate(texts, device=trainer.draft.device, packed_length=packed))

    def evaluate(self) -> Spent:
        """Of judging: the identity check, scoring, and decoding beside its baselines."""
        assert self.start is not None
        config, options = self.config, self.config.evaluate
        names = ["given"] if options.draft == "given" else ["before", "after"]
        models = dict.fromkeys(names, self.start)
        whole, target = self._loaded_target()
        prompts = self.prompts("test", options.prompts)
        calibration = self.prompts("validation", options.validation_prompts)
        whole += self._identity(target, models, prompts)
        gc.collect()
        drafts: dict[str, Adapter] = {}
        whole += spent(
            lambda: drafts.update({n: load_draft(one, target) for n, one in models.items()})
        )
        a_batch = self.stored(self.held_out("test", options.prompts))[: options.batch_size]

        def score() -> None:
            size = options.batch_size
            score_drafts(target.adapter, drafts, a_batch, sampling=config.sampling, batch_size=size)

        score()
        share = min(1.0, self.mean_answer / self.answer)
        of_each = spent(score) * (share * options.prompts / len(a_batch))
        once, turns = self._timing(target, drafts, Prompts(prompts, calibration, self._texts))
        whole += spent(lambda: speedup_figure(MEASURED, self.folder / "figure.png"))
        return whole + once + (of_each + turns) * len(options.temperatures or [0])

    def _texts(self) -> Iterator[list[int]]:
        return (example.token_ids for example in self.splits.train)

    def _identity(
        self, target: Target, models: Mapping[str, ModelConfig], prompts: list[list[int]]
    ) -> Spent:
        """Of the check that nothing is lost, on the last tokens of answers."""
        config, options = self.config, self.config.evaluate
        if options.lossless == "off":
            return Spent()
        chosen = prompts[: min(options.lossless_prompts, options.batch_size)]
        long = min(LONG, self.answer)
        texts = Prompts(self.lengthened(chosen, self.answer - long), [])

        def check(tokens: int) -> None:
            short = replace(options, max_new_tokens=tokens)
            check_lossless(target, models, texts, replace(config, evaluate=short), _unheard)

        check(1)
        taken = [spent(partial(check, tokens)) for tokens in (min(SHORT, long - 1), long)]
        whole = self._extended(taken[0], taken[1], self.answer)
        return whole * ceil(min(options.lossless_prompts, len(prompts)) / len(chosen))

    def _timing(
        self, target: Target, drafts: dict[str, Adapter], prompts: Prompts
    ) -> tuple[Spent, Spent]:
        """Of decoding in turns: what is made once, and what every temperature takes."""
        config, options = self.config, self.config.evaluate
        long, size = min(LONG, self.answer), options.timing_batch_size
        looked_at = min(options.timing_prompts, FIRST_LOOK)  # more of them only where it varies
        timed, calibration = prompts.test[:looked_at], prompts.calibration
        setting = timing([*timed, *calibration], config.sampling, (), config)
        setting = replace(setting, max_new_tokens=self.answer)
        texts = self.lengthened(timed[:size], self.answer - long)
        ended = replace(setting, max_new_tokens=long)

        def proposers() -> dict[str, Any]:
            return proposers_of(target.adapter, drafts, prompts, config)

        lookup = {} if config.decode.proposer == LOOKUP else {LOOKUP: PromptLookup()}
        methods: dict[str, Method] = {PLAIN: decoding(target.adapter, None, ended)}
        methods |= {
            n: decoding(target.adapter, p, ended) for n, p in (lookup | proposers()).items()
        }
        once, turns = Spent(), Spent()
        chunks = ceil(len(timed) / size)
        for name, method in methods.items():
            made = spent(lambda run=method: run(texts, 0))
            again = spent(lambda run=method: run(texts, 0))
            once += made.more_than(again)
            whole = again * (min(self.answer, self.mean_answer) / long)
            warm = 1 if name == PLAIN else len(shapes(setting))
            turns += whole * (chunks + warm)
        for name in proposers():
            make, gammas = (lambda name=name: proposers()[name]), CALIBRATED_GAMMAS
            one = meter(target.adapter, make, calibration, setting, gammas=gammas)
            made = spent(lambda of=one: of.take(1, BURST, SETTLING))
            again = spent(lambda of=one: of.take(1, BURST, SETTLING))
            once += made.more_than(again)
            turns += again * (options.calibration_turns + WARM_TURNS)
        return once, turns


def _unheard(text: str) -> None:
    """Take the notes of a step, which are for the person who started it, and print nothing."""


def source_samples(config: Config) -> bool:
    """Whether texts are sampled while the drafter learns."""
    return config.source.name not in ("fixed", "target")


PROBES: Mapping[str, Callable[[Probe], Spent]] = {
    "target": Probe.train_target,
    "prepare": Probe.prepare,
    "generate": Probe.generate,
    "contexts": Probe.contexts,
    "scores": Probe.scores,
    "train": Probe.train,
    "evaluate": Probe.evaluate,
}
