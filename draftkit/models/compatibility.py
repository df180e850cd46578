"""Whether a pair fits together: what both models and tokenizers must have in common.

Reads tokenizers and configurations, no weights. What loads a pair refuses what is wrong with it one
by one; here all of it is listed at once, with what is harmless and worth knowing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from draftkit.config import Config, DraftConfig, flatten
from draftkit.models.files import ModelFolder, check_weights
from draftkit.models.head_files import check_head, kind_of_head
from draftkit.models.heads import STEPS, head_class, layers_read
from draftkit.models.loading import check_same_shape
from draftkit.models.served import FILE, unserved
from draftkit.models.shapes import LONGROPE, UNBOUNDED, context_of, layer_count, rope_types
from draftkit.models.vocabulary import check_same_tokenizer, real_vocab_size

Shapes = Mapping[str, PreTrainedConfig]  # by section: `target`, and `draft` where one is given
Tokenizers = Mapping[str, PreTrainedTokenizerBase]
GOOD, NOTE, WRONG = "ok", "note", "wrong"
TARGET_SHA256 = "draftkit_target_sha256"
# Of a configuration, what logits do not depend on: what every model has, and ids of the tokenizer.
# A drafter proposes other numbers of tokens than it was trained for.
NOT_OF_SHAPE = {*PreTrainedConfig().to_dict()} - {"model_type", "is_encoder_decoder"}
NOT_OF_SHAPE |= {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "pard_k", STEPS}
NOT_OF_SHAPE |= {TARGET_SHA256}


@dataclass(frozen=True)
class Finding:
    """Of a subject: good, worth knowing, or wrong with the way out."""

    level: str
    subject: str
    text: str


def findings(config: Config) -> Iterator[Finding]:
    """What there is to say of the pair, as far as it is there.

    Raises ValueError naming `target.path` or `draft.path` for what cannot be read at all.
    """
    target = ModelFolder(config.target)
    shapes, tokenizers = {"target": target.config}, {"target": target.tokenizer}
    own = None if config.draft.path is None else ModelFolder(config.draft)
    drafter: Any = own and own.config
    if own is None:
        yield Finding(GOOD, "drafter", "made here, with the target's tokenizer")
    elif head_class(drafter) is not None:
        try:
            check_head(config.draft.named, drafter, shapes["target"])
            read = layers_read(kind_of_head(drafter), layer_count(shapes["target"]))
            ids = f"{drafter.draft_vocab_size:,} of {drafter.vocab_size:,} ids"
            text = f"reads the layers {', '.join(map(str, read))} of the target, and proposes {ids}"
            yield Finding(GOOD, "head", text)
        except ValueError as error:
            yield Finding(WRONG, "head", str(error))
    else:
        shapes["draft"] = drafter
        tokenizers["draft"] = own.tokenizer
    try:
        check_same_shape(shapes["target"], shapes.get("draft", shapes["target"]))
    except ValueError as error:
        yield Finding(WRONG, "kind", str(error))
    for model in (config.target, config.draft):
        try:
            if model.path is not None:
                check_weights(model)
        except ValueError as error:
            yield Finding(WRONG, "weights", str(error))
    yield from _vocabulary(shapes, tokenizers, config.draft.extra_tokens)
    yield from _special_tokens(target.ends, tokenizers)
    level, text = GOOD, "chats and prompts are put into the target's chat template"
    if target.tokenizer.chat_template is None:
        level, text = NOTE, "the target's tokenizer has no chat template: no chats"
    elif config.data.chat_template == "never":
        level, text = NOTE, "not used (data.chat_template=never)"
    elif len({one.chat_template for one in tokenizers.values()}) > 1:
        level, text = NOTE, "draft and target differ: the target's is used for both"
    yield Finding(level, "template", text)
    sizes = {key: context_of(shape) for key, shape in shapes.items()}
    words = (
        f"{key} {size:,}" if size < UNBOUNDED else f"{key} any number of"
        for key, size in sizes.items()
    )
    level = NOTE if len({*sizes.values()}) > 1 else GOOD
    more = ": the smaller one limits both" if level == NOTE else ""
    if any(LONGROPE in rope_types(shape) for shape in shapes.values()):
        more += "; of longrope the short factors are served, up to the original context"
    yield Finding(level, "context", f"{', '.join(words)} tokens{more}")
    if names := unserved(vars(target.generation)):
        text = f"{FILE} has {', '.join(names)}, which `generate` obeys: not served"
        yield Finding(NOTE, "sampling", text)


def _vocabulary(shapes: Shapes, tokenizers: Tokenizers, extra_tokens: str) -> Iterator[Finding]:
    size = len(tokenizers["target"])
    if "draft" in tokenizers:
        try:
            unshared = check_same_tokenizer(
                target_tokenizer=tokenizers["target"],
                draft_tokenizer=tokenizers["draft"],
                extra_tokens=extra_tokens,
            )
            text = f"{size:,}, of the same strings in both"
            if unshared:
                text += f", but for {len(unshared)} of added tokens, which are never proposed"
            yield Finding(NOTE if unshared else GOOD, "ids", text)
        except ValueError as error:
            yield Finding(WRONG, "ids", str(error))
    rows = {key: shape.get_text_config().vocab_size for key, shape in shapes.items()}
    for key, shape in shapes.items():
        try:
            real_vocab_size(tokenizers[key], shape, key)
        except ValueError as error:
            yield Finding(WRONG, "padding", str(error))
            return
    padded = ", ".join(f"{key} {count:,}" for key, count in rows.items())
    text = f"rows of embeddings: {padded}; logits are cut to the ids that text can use"
    if len({*rows.values()}) > 1:
        yield Finding(NOTE, "padding", f"{text}, though other engines may refuse the pair")
    else:
        yield Finding(GOOD, "padding", text)


def _special_tokens(ends: tuple[int, ...], tokenizers: Tokenizers) -> Iterator[Finding]:
    target = tokenizers["target"]
    if not ends:
        yield Finding(
            WRONG, "end", "target.path: no end of text: add eos_token_id to its generation_config"
        )
    else:
        names = ", ".join(str(target.convert_ids_to_tokens(one)) for one in ends)
        yield Finding(GOOD, "end", f"a text ends with {names}")
    for name in ("bos_token", "eos_token", "pad_token"):
        values = {key: getattr(one, name) for key, one in tokenizers.items()}
        if len({*values.values()}) > 1:
            text = f"{name} is {values['target']!r} in the target, {values['draft']!r} in the draft"
            yield Finding(NOTE, "special", f"{text}: the target's counts")


def declare_target(draft: PreTrainedConfig, sha256: str) -> None:
    """Write into the configuration of a head the checksum of its target; of others nothing."""
    if head_class(draft) is not None:
        setattr(draft, TARGET_SHA256, sha256)


def unknown_target(draft: DraftConfig, shape: PreTrainedConfig, sha256: str) -> str:
    """What there is to say of a head of `shape` that was not made for the target of `sha256`; empty
    for others.
    """
    known = getattr(shape, TARGET_SHA256, None)
    if head_class(shape) is None or known == sha256:
        return ""
    made = "was made for another target" if known else "names no target that it was made for"
    return (
        f"{draft.named}: the head {made} ({TARGET_SHA256} of its config.json), and may "
        "agree with this one on little: give a head of this target, or draft.accept_target=true"
    )


def check_same_architecture(own: PreTrainedConfig, given: PreTrainedConfig) -> None:
    """Raise ValueError naming the first key by which a model of `given` computes otherwise, though
    its weights may have the names and shapes of one of `own`.
    """
    left, right = (  # what shapes a model, with the keys of nested parts as paths
        {
            key: value
            for key, value in flatten(config.to_dict()).items()
            if not NOT_OF_SHAPE & {*key.split(".")}
        }
        for config in (own, given)
    )
    for key in sorted(left.keys() | right.keys()):
        if left.get(key) != right.get(key):
            raise ValueError(
                f"{key} of its config.json is {right.get(key)}, the drafter's {left.get(key)}"
            )
