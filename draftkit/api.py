"""What `import draftkit` gives: a pair of models, trained, judged and used without a command.

A prompt is text, a chat (a list of messages), a list of token ids, or a row as data files hold it
(`{"prompt": ..., "completion": ...}`). Defaults are those of `draftkit.config`: every function
takes sections of it by name, as `sampling=SamplingConfig(temperature=0.7)`, for the pair or for one
call. The commands of `pipelines` call what these functions call, and share what they make.
"""

import inspect
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, Literal

import numpy as np

from draftkit.artifacts import fingerprint, first_line, read_json, write_json
from draftkit.config import (
    Config,
    DivergenceConfig,
    DraftConfig,
    HardwareConfig,
    SamplingConfig,
    ShrinkConfig,
    SourceConfig,
    flatten,
    with_sections,
)
from draftkit.config.choices import is_of, require
from draftkit.data.lengths import Room
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.data.splits import Splits
from draftkit.data.store import rank_in_group
from draftkit.decoding.catalogue import proposer_of
from draftkit.decoding.generation import decode, make_requests
from draftkit.distillation.assembly import load_learner
from draftkit.distillation.fit import Fitted, fit
from draftkit.distillation.pretrain import DRAFT, make_draft
from draftkit.distillation.samplers import ROLLOUTS, TEST, VALIDATION, target_answers
from draftkit.distillation.sources import TrainingTexts, reads_rollouts
from draftkit.evaluation.alpha import PromptTotals, estimates, score_contexts
from draftkit.evaluation.intervals import Estimate, acceptance_length
from draftkit.evaluation.measure import Prompts, check_lossless, gather
from draftkit.evaluation.summary import compare
from draftkit.models.adapter import Adapter
from draftkit.models.compatibility import declare_target
from draftkit.models.files import ModelFolder, address_of
from draftkit.models.loading import Target, load_draft, load_target
from draftkit.models.served import served_sampling
from draftkit.prompts import Prompt, check_held_out, examples_of, fit_examples, held_out_of
from draftkit.theory.divergences import Divergence
from draftkit.tracking import Tracker

Note = Callable[[str], None]  # what hears how a job goes on: `print`, or nothing
DEFAULTS = ("__defaults__", "__kwdefaults__")  # of a function's arguments
CALIBRATING = 4  # every so many-th prompt calibrates costs, and times nothing


@dataclass(frozen=True)
class Pair:
    """A target and a draft in memory, with the settings under which they are served."""

    target: Target
    draft: Adapter
    config: Config
    _contexts: dict[str, list[Record]] = field(default_factory=dict, repr=False, compare=False)

    def with_draft(self, draft: str | Path | Fitted) -> "Pair":
        """The same target beside another draft: what `distill` gave, a folder, or a hub name."""
        path = draft
        if isinstance(draft, Fitted):
            path = Path(mkdtemp()) / "draft"
            draft.save(path)
        model = replace(self.config.draft, path=str(path), revision=None)
        config = replace(self.config, draft=model)
        pair = replace(self, draft=load_draft(model, self.target), config=config)
        if isinstance(draft, Fitted):
            weakref.finalize(pair, shutil.rmtree, Path(str(path)).parent)
        return pair

    @property
    def context(self) -> int:
        """Tokens of the longest text that both models take."""
        return min(self.target.adapter.max_positions, self.draft.max_positions)

    def settings(self, sections: Mapping[str, Any]) -> Config:
        """The configuration of a call with `sections` of its own; the models stay the pair's."""
        config, mine = with_sections(self.config, sections), self.config
        draft = replace(config.draft, path=mine.draft.path, revision=mine.draft.revision)
        return replace(config, target=mine.target, draft=draft)


@dataclass(frozen=True)
class Evaluation:
    """Acceptance on held-out prompts, each mode with its 95 % interval over documents.

    Equal prompts are one document, and so are the answers of a chat and the windows of a text; for
    fewer than 20 there is no interval.

    alpha: of sampled proposals, mean of sum_x min(p, q); alpha_greedy_draft: of the draft's argmax,
    p(argmax q); alpha_exact_match: of engines that compare with a sample of the target, sum_x p q;
    alpha_uncut_draft: of engines that draft without top-k and top-p, where the sampling has them.
    summary: where it was timed, what `evaluate` writes to its summary.json: speedup, verdict, ...
    """

    alpha: Estimate
    alpha_greedy_draft: Estimate
    alpha_exact_match: Estimate
    totals: PromptTotals = field(repr=False)
    alpha_uncut_draft: Estimate | None = None
    summary: dict[str, Any] | None = field(default=None, repr=False)

    def gain(self, before: "Evaluation") -> Estimate:
        """The alpha gained since `before`, paired: both must be of the same prompts."""
        return self.totals.gain(before.totals)

    def acceptance_length(self, gamma: int) -> Estimate:
        """tau, tokens a target pass, with `gamma` sampled proposals a round (at least 1)."""
        require(is_of(gamma, int) and gamma > 0, "gamma", "be a positive whole number", gamma)
        return acceptance_length(self.totals.tokens_a_pass("alpha", gamma), gamma)


@dataclass(frozen=True)
class Generated:
    """What was generated, in `rounds` target passes, which accepted `accepted` proposals."""

    text: str
    ids: list[int]
    ended: bool  # by an end-of-text id; else by the limit
    rounds: int
    accepted: int

    @property
    def acceptance_length(self) -> float:
        """Tokens a target pass, correction or bonus included."""
        return 1 + self.accepted / self.rounds


def load_pair(
    target: str | Path,
    draft: str | Path | DraftConfig,
    *,
    device: str = "auto",
    dtype: str = "auto",
    sampling: SamplingConfig | Literal["model"] | None = None,
    **sections: Any,
) -> Pair:
    """Load two models that share a vocabulary, from `save_pretrained` folders or the hub.

    draft: its path, or its section. One without a path is made of the target and not trained: some
    of its layers (`shrink.layers`), or a head (`kind`) that proposes all ids. dtype: `float32`,
    `bfloat16`, or `auto`: bfloat16 where the device computes in it. sampling: `model` takes that of
    the target's generation_config.json. sections: others of `draftkit.config.Config`, by name.
    Raises ValueError, one line, for models that cannot be loaded or do not fit together.
    """
    hardware = HardwareConfig(device=device, dtype=dtype)
    config = with_sections(Config(hardware=hardware), sections)
    config = replace(
        config,
        target=replace(config.target, path=str(target)),
        draft=draft if isinstance(draft, DraftConfig) else DraftConfig(path=str(draft)),
    )
    if sampling == "model":
        sampling, _ = served_sampling(config.target, {})
    config = replace(config, sampling=sampling or config.sampling)
    with ExitStack() as kept:
        if config.draft.path is None:
            folder = Path(kept.enter_context(TemporaryDirectory()))
            config = replace(config, draft=_untrained_draft(config, folder))
        loaded = load_target(config.target, config.hardware)
        pair = Pair(loaded, load_draft(config.draft, loaded), config)
        weakref.finalize(pair, kept.pop_all().close)
        return pair


def _untrained_draft(config: Config, folder: Path) -> DraftConfig:
    """The drafter of section `draft`, which names no model: made in `folder`, and not trained."""
    draft, cut = config.draft, config.draft.shrink
    rule = "name a model, or how to make one of the target: shrink.layers, or a kind of heads"
    require(draft.is_head or bool(cut.layers), "draft.path", rule, None)
    rule = "be 0: load_pair has no text, unlike `python -m pipelines.prepare`"
    for key, value in (("steps", cut.steps), ("vocabulary", cut.vocabulary)):
        require(value == 0, f"draft.shrink.{key}", rule, value)
    if draft.is_head:
        every, head = len(ModelFolder(config.target).tokenizer), draft.head
        rule = f"be {every:,} or null: load_pair has no answers on which ids could be counted"
        require(head.vocabulary in (None, every), "draft.head.vocabulary", rule, head.vocabulary)
        draft = replace(draft, head=replace(head, vocabulary=every))
    make_draft(
        replace(config, draft=draft),
        config.target,
        Splits([], [], [], "", {}, Room(0, 0)),
        folder,
        tracker=Tracker(folder),
        note=lambda line: None,
        sha256=address_of(config.target),
    )
    return replace(draft, path=str(folder / DRAFT), shrink=ShrinkConfig())


def distill(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    divergence: str | DivergenceConfig | Divergence | None = None,
    source: str | SourceConfig | None = None,
    steps: int | None = None,
    max_length: int | None = None,
    validation: Sequence[Prompt] | None = None,
    folder: str | Path | None = None,
    note: Note = lambda line: None,
    **sections: Any,
) -> Fitted:
    """Train the draft of `pair` towards its target; the weights that are best on validation stay.

    divergence: a name, its settings, or a function of one's own (docs/extending.md). source: whose
    texts the loss is taken on; `fixed` needs prompts that have answers. max_length: tokens of
    prompt and answer together, instead of `data.max_prompt_tokens` and
    `data.max_completion_tokens`. validation: prompts that choose the weights; by default the last
    `data.validation_fraction` of `prompts`, which are not trained on then; a chat is not split.
    folder: of metrics and checkpoints, so that the same call (models by their content, prompts,
    settings and loss) goes on after a kill; without one nothing is kept.

    The pair stays as it is, and its target is the only copy in memory. Raises ValueError, one line,
    for prompts and settings that cannot be used, and where training fails.
    """
    if isinstance(divergence, str):
        divergence = DivergenceConfig(name=divergence)
    if isinstance(divergence, DivergenceConfig):
        sections["divergence"] = divergence
    if source is not None:
        sections["source"] = SourceConfig(name=source) if isinstance(source, str) else source
    config, target, context = pair.settings(sections), pair.target, pair.context
    if steps is not None:
        config = replace(config, optim=replace(config.optim, max_steps=steps))
    # The target is in memory: nothing is gained by storing its scores.
    config = replace(config, generate=replace(config.generate, top_k=0))
    read = partial(examples_of, target=target, data=config.data, context=context, note=note)
    examples, room = fit_examples(
        read(prompts), config.data, context=context, max_length=max_length
    )
    loss = divergence if callable(divergence) else None
    if validation is None:
        examples, held_out = held_out_of(examples, config)
    else:
        held_out = read(validation)
        check_held_out(held_out, examples)
    with TemporaryDirectory() if folder is None else nullcontext(folder) as kept:
        work = Path(kept)
        if folder is not None:
            texts = {"prompts": examples, "validation": held_out}
            _claim(work, config, texts, loss, max_length)
        rollouts = None
        if reads_rollouts(config):
            count = config.generate.rollouts
            note(f"sampling {count} answers of the target")
            again = [examples[row % len(examples)] for row in range(count)]
            rollouts = target_answers(target, again, config, ROLLOUTS, room)
        draft = load_learner(config.draft, target)  # what is served may be rounded
        if draft.reads:
            declare_target(draft.model.config, address_of(config.target))
        return fit(
            config,
            target=target,
            draft=draft,
            texts=TrainingTexts(examples, room, rollouts),
            validation=_contexts(pair, held_out, config, VALIDATION),
            folder=work,
            tracker=Tracker(work),
            note=note,
            loss=loss,
        )


def _claim(
    folder: Path,
    config: Config,
    texts: Mapping[str, Sequence[Example]],
    loss: Divergence | None,
    max_length: int | None,
) -> None:
    """Raise ValueError, naming what differs, where `folder` holds the run of another call.

    Models count by their content, wherever they lie; a loss by its source and the values that it
    was made with. ValueError for one of which that is not known.
    """
    settings = flatten(asdict(replace(config, hardware=HardwareConfig())))
    for key, examples in texts.items():
        settings[key] = fingerprint([[one.token_ids, one.loss_mask] for one in examples])
    settings["max_length"] = max_length
    if loss is not None:
        try:
            made = [inspect.getclosurevars(loss).nonlocals, *map(loss.__getattribute__, DEFAULTS)]
            settings["divergence"] = [inspect.getsource(loss), *map(repr, made)]
        except (OSError, TypeError, AttributeError) as error:
            raise ValueError(
                f"divergence: {loss!r} cannot be told from another loss ({first_line(error)}): "
                "define it in a file, or leave folder out"
            ) from error
    for key in ("target", "draft"):
        model = getattr(config, key)
        settings |= {f"{key}.path": address_of(model), f"{key}.revision": None}
    path = folder / "settings.json"
    stored = read_json(path) if path.exists() else settings
    if others := [key for key in {**settings, **stored} if stored.get(key) != settings.get(key)]:
        raise ValueError(
            f"{folder} holds a run of other prompts or settings ({', '.join(others)}): "
            "give another folder"
        )
    write_json(path, settings)


def evaluate(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    timed: bool = False,
    note: Note = lambda line: None,
    **sections: Any,
) -> Evaluation:
    """Judge the draft on held-out prompts, all of them, as it would be served.

    The target continues them once, and all drafts beside it are judged on those positions. timed:
    also decode with the draft and without, in turns, after a check of losslessness, for which the
    target is held in float32; `summary` then has speed-up and verdict. Raises ValueError, one line,
    for no prompt, or one too few to calibrate costs on.
    """
    config, target = pair.settings(sections), pair.target
    examples = examples_of(prompts, target, config.data, context=pair.context, note=note)
    longest = max((len(example.prompt_ids) for example in examples), default=0)
    new = min(config.evaluate.max_new_tokens, pair.context - longest)
    config = replace(config, evaluate=replace(config.evaluate, max_new_tokens=new))
    if len(examples) < (least := CALIBRATING if timed else 1):
        raise ValueError(f"prompts: {len(examples)} are too few to measure: give {least}")
    contexts = _contexts(pair, examples, config, TEST)
    if timed:
        # One of each document, then the second ones, ...: what is timed first is most diverse.
        others = [one for row, one in enumerate(examples, 1) if row % CALIBRATING]
        ranks = rank_in_group([example.document for example in others])
        others = [others[row] for row in np.argsort(ranks, kind="stable")]
        last = slice(CALIBRATING - 1, None, CALIBRATING)
        parts = Prompts(
            test=[example.prompt_ids for example in others],
            calibration=[example.prompt_ids for example in examples[last]],
            documents=[example.document for example in others],
        )
        measured = gather(
            target,
            {"given": pair.draft},
            contexts=contexts,
            others=contexts[last],
            prompts=parts,
            sampling=config.sampling,
            lossless=check_lossless(target, {"given": config.draft}, parts, config, note),
            config=config,
            note=note,
        )
        scored = measured.scored["given"]
        summary = compare(measured, "given", config.sampling, config)
    else:
        size, summary = config.evaluate.batch_size, None
        scored = score_contexts(
            target.adapter, pair.draft, contexts, sampling=config.sampling, batch_size=size
        )
    return Evaluation(**estimates(scored), totals=scored, summary=summary)


def generate(
    pair: Pair,
    prompt: Prompt,
    *,
    max_new_tokens: int = 64,
    seed: int | None = None,
    **sections: Any,
) -> Generated:
    """Continue `prompt` by speculative decoding: the law of the answer is the target's, exactly.

    The same seed gives the same answer; by default it is that of the configuration. Raises
    ValueError, one line, for arguments that cannot be used.
    """
    whole = is_of(seed, int | None) and -(2**63) <= (seed or 0) < 2**63
    require(whole, "seed", "be an integer of at most 64 bits", seed)
    whole = is_of(max_new_tokens, int) and max_new_tokens > 0
    require(whole, "max_new_tokens", "be a positive whole number", max_new_tokens)
    config, target = pair.settings(sections), pair.target
    (*_, example) = examples_of([prompt], target, config.data, context=pair.context)
    ids = example.prompt_ids
    requests = make_requests(
        [ids],
        max_new_tokens=max_new_tokens,
        sampling=config.sampling,
        gamma=config.proposals,
        seed=config.seed if seed is None else seed,
        max_length=pair.context,
    )
    (done,) = decode(
        target.adapter,
        list(requests),
        eos_token_ids=target.eos_token_ids,
        batch_size=1,
        proposer=proposer_of(config, lambda: pair.draft, lambda: [ids], target.adapter),
        verification=config.decode.verification,
        epsilon=config.decode.epsilon,
    )
    text = target.tokenizer.decode(
        done.output_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return Generated(str(text), done.output_ids, done.ended, done.rounds, done.accepted)


def _contexts(pair: Pair, examples: Sequence[Example], config: Config, use: str) -> list[Record]:
    """What the target says after held-out prompts, sampled once for all drafts beside it."""
    room = Room(config.evaluate.max_new_tokens, pair.context)
    prompts = [[example.document, example.prompt_ids] for example in examples]
    key = fingerprint([prompts, vars(config.sampling), config.seed, vars(room), use])
    if key not in pair._contexts:
        pair._contexts[key] = target_answers(pair.target, examples, config, use, room)
    return pair._contexts[key]
