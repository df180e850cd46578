"""The plan: the table of stages, with what each reads, what it depends on and where it lies."""

from dataclasses import replace
from typing import Any

from draftkit.config import COUNTING_NAMES, Config
from draftkit.config.text import CORPUS
from draftkit.data.lengths import Lengths, lengths_within
from draftkit.distillation.loop import BEST, CHECKPOINT
from draftkit.distillation.pretrain import CONTEXT
from draftkit.distillation.sources import reads_rollouts
from draftkit.models.files import ModelFolder
from draftkit.models.shapes import context_of

from .product import SUMMARY, Input, Product, Stage, address_of_model, address_of_text, plan


def given_model(key: str, config: Config) -> list[Product]:
    """The model of section `key` where one is named."""
    model = getattr(config, key)
    if model.path is None:
        return []
    return [Product(config, given=address_of_model(model, config.root))]


def carries_scores(config: Config) -> bool:
    """Whether rollouts carry the target's most likely ids, which it has in its hands."""
    options = config.generate
    return bool(options.top_k) and not config.target.urls and config.source.name == "target"


def written_by_engine(config: Config) -> bool | None:
    """Whether engines write the target's texts, if they do."""
    return bool(config.target.urls) or None


def scored_by_engine(config: Config) -> bool | None:
    """Whether they score texts, if they do."""
    return config.scored_by_engine or None


def counts_rollouts(config: Config) -> bool:
    """Whether the ids that a drafter made of the target keeps are counted in rollouts too."""
    learned = config.source.name == "target" or reads_rollouts(config)
    return (config.draft.is_head or bool(config.draft.shrink.vocabulary)) and learned


def head_settings(config: Config) -> dict[str, Any] | None:
    """Of a head its kind and `draft.head`, which nothing else depends on."""
    draft = config.draft
    return {"kind": draft.kind, **vars(draft.head)} if draft.is_head else None


def states_stored(config: Config) -> str | None:
    """For which kind of heads hidden states lie beside the scores, if they do."""
    return config.draft.kind if config.generate.hidden_states else None


def at_temperatures(config: Config) -> list[Config]:
    """One configuration for each temperature that is judged: the served one where none is named."""
    served = config.sampling
    temperatures = dict.fromkeys(config.evaluate.temperatures or [served.temperature])
    return [replace(config, sampling=replace(served, temperature=one)) for one in temperatures]


def reads_anchors(config: Config, teacher: str) -> bool:
    """Whether the daemon mixes answers to prompts of `data` into what was served, by `teacher`."""
    options = config.online
    return options.teacher == teacher and bool(options.anchor_fraction or options.gate.anchors)


def stored_anchors(config: Config) -> list[Config]:
    """Where stored scores teach: the target's texts with as many of them as the buffer has."""
    if not reads_anchors(config, "stored"):
        return []
    generate = replace(config.generate, top_k=config.online.buffer.top_k)
    return [replace(config, source=replace(config.source, name="target"), generate=generate)]


# How long texts and answers may be, by the contexts of the two models, before any is loaded


def shared_context(config: Config) -> int:
    """The context of the target or of the draft, whichever is smaller; nothing is loaded or made.

    An engine scores a text where it has room for one token more. Raises ValueError naming the model
    that is not there.
    """
    target, draft = config.target, config.draft
    whole = context_of(ModelFolder(target).config) - config.scored_by_engine
    if draft.path is not None:
        return min(whole, context_of(ModelFolder(draft).config))
    of_target = draft.is_head or draft.shrink.layers
    return whole if of_target else min(whole, CONTEXT)


def lengths_of(config: Config) -> Lengths:
    """How long rows may be, for both models."""
    return lengths_within(shared_context(config), config.data)


def answer_tokens(config: Config) -> int:
    """`evaluate.max_new_tokens`, or what the context leaves behind the longest prompt."""
    longest = config.data.prompt_tokens
    if config.data.path != CORPUS:  # which has no chats and no prompts
        longest = max(longest, lengths_of(config).prompt)
    return min(config.evaluate.max_new_tokens, shared_context(config) - longest)


# Where an engine answers, and to how many at a time, is no part of what it answers.
ROLLOUTS = ("generate.rollouts", "generate.batch_size")

DATA = Input(
    "data", lambda config: [Product(config, given=address_of_text(config.data, config.root))]
)
TARGET_MODEL = Input("target", lambda config: given_model("target", config))
TEXTS = Stage(
    name="texts",
    reads=("data",),
    derived={"lengths": lambda config: vars(lengths_of(config))},
    inputs=(DATA, TARGET_MODEL),
    version=3,
    shared=True,
)
GENERATE = Stage(
    name="generate",
    reads=("seed", "data", "sampling", *ROLLOUTS),
    derived={
        "by_engine": written_by_engine,
        "top_k": lambda config: config.generate.top_k if carries_scores(config) else None,
        "compiled": lambda config: config.compiles_texts or None,  # which rounds otherwise
    },
    inputs=(TEXTS, TARGET_MODEL),
    version=2,
    shared=True,
)
PREPARE = Stage(
    name="prepare",
    reads=("seed", "data", "draft.pretrain", "draft.shrink"),
    derived={"draft.head": head_settings},
    inputs=(TEXTS, TARGET_MODEL, GENERATE.where(counts_rollouts)),
    product="draft",
    shared=True,
)
DRAFT_MODEL = Input(
    "draft", lambda config: given_model("draft", config) or PREPARE.products(config)
)
PAIR_AND_TEXT = (DATA, TEXTS, TARGET_MODEL, DRAFT_MODEL)
CONTEXTS = Stage(
    name="contexts",
    reads=(
        *("seed", "data", "sampling", "evaluate.prompts", "evaluate.validation_prompts"),
        "evaluate.max_new_tokens",
    ),
    derived={"answer_tokens": answer_tokens, "by_engine": written_by_engine},
    inputs=(TEXTS, TARGET_MODEL),
    version=2,
    shared=True,
)
SCORES = Stage(
    name="scores",
    reads=(
        *("seed", "data", "sampling", "generate.top_k", "divergence.temperature"),
        *("source.name", "evaluate.validation_prompts", "evaluate.max_new_tokens"),
        *ROLLOUTS,
    ),
    derived={
        "generate.hidden_states": states_stored,
        "limit": lambda config: config.limit,
        "by_engine": scored_by_engine,
    },
    inputs=(
        *(TEXTS, TARGET_MODEL, CONTEXTS),
        GENERATE.where(lambda config: config.source.name == "target"),
    ),
    version=2,
    shared=True,
)
TRAIN = Stage(
    name="train",
    reads=(
        *("seed", "data", "sampling", "divergence", "source", "optim", "generate.top_k"),
        *("draft.kind", "draft.pard", "draft.lora"),
        *("evaluate.validation_prompts", "evaluate.max_new_tokens"),
        *ROLLOUTS,
    ),
    derived={
        "draft.head": head_settings,
        "generate.hidden_states": states_stored,
        "by_engine": scored_by_engine,
        # settings of decoding, where a source's texts depend on them
        "decode.gamma": lambda config: (
            config.proposals if config.source.name in ("block", "replay") else None
        ),
        "decode.verification": lambda config: (
            config.decode.verification if config.source.name == "replay" else None
        ),
    },
    inputs=(
        *PAIR_AND_TEXT,
        GENERATE.where(reads_rollouts),
        SCORES.where(lambda config: config.stores_scores),
        CONTEXTS.where(lambda config: not config.stores_scores),
    ),
    product="draft",
    version=2,
    everywhere=True,
    command="distill",
    scratch=(CHECKPOINT, BEST),
)
TRAINED = TRAIN.where(lambda config: config.evaluate.draft == "trained")
JUDGED = (*PAIR_AND_TEXT, TRAINED)
EVALUATE = Stage(
    name="evaluate",
    reads=("seed", "data", "sampling", "decode", "evaluate"),
    derived={"by_engine": lambda c: c.teacher_top_k if c.scored_by_engine else None},
    inputs=(*JUDGED, CONTEXTS.under(at_temperatures)),
    version=5,
)
DISTILL = Stage(
    name="distill",
    inputs=(
        *(*PAIR_AND_TEXT, TRAIN),
        EVALUATE.under(lambda c: [replace(c, evaluate=replace(c.evaluate, draft="trained"))]),
    ),
    product=None,
    version=3,
)
EXPORT = Stage(
    name="export",
    reads=("export", "sampling", "decode.gamma"),
    inputs=(
        *(TARGET_MODEL, DRAFT_MODEL),
        TRAINED,
        EVALUATE.where(lambda config: (plan(EVALUATE, config).folder / SUMMARY).is_file()),
    ),
    version=3,
)
MEASURE_ENGINE = Stage(
    name="measure_engine",
    reads=(
        *("seed", "data", "sampling", "evaluate.draft", "evaluate.prompts"),
        *("evaluate.max_new_tokens", "engine"),
    ),
    inputs=(*JUDGED, CONTEXTS),
    product=None,
)
CERTIFY = Stage(
    name="certify",
    reads=(
        *("seed", "data", "sampling", "certify", "evaluate.prompts"),
        "evaluate.max_new_tokens",
    ),
    derived={"gamma": lambda config: config.proposals},
    inputs=(DATA, TARGET_MODEL, TEXTS),
    version=2,
    product=None,
    command="evaluate",
)
# Services: what they read is made first, they themselves make nothing.
SERVE = Stage(
    name="serve",
    inputs=(
        TARGET_MODEL,
        DRAFT_MODEL,
        TEXTS.where(lambda config: config.decode.proposer in COUNTING_NAMES),
    ),
)
CAPTURE = Stage(name="capture", inputs=(TARGET_MODEL, DRAFT_MODEL))
ANCHORS = (
    GENERATE.where(lambda config: reads_anchors(config, "target")),
    CONTEXTS.where(lambda config: reads_anchors(config, "target")),
    SCORES.under(stored_anchors),
)
ONLINE = Stage(name="online", inputs=(TARGET_MODEL, DRAFT_MODEL, *ANCHORS))
