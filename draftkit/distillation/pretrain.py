"""A model that nobody gave: trained by next-token prediction, new or cut out of the target."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
)

from draftkit.artifacts import remove
from draftkit.config import (
    Config,
    DivergenceConfig,
    HeadConfig,
    OptimConfig,
    PretrainConfig,
    TargetConfig,
)
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.data.splits import Splits
from draftkit.data.store import Lazy
from draftkit.distillation.batch import TokenSequence
from draftkit.distillation.loop import train
from draftkit.distillation.losses import Objective
from draftkit.distillation.progress import reporting
from draftkit.distillation.ranks import alone
from draftkit.distillation.sources import Source, shuffled
from draftkit.distillation.trainer import Trainer
from draftkit.models.adapter import Adapter
from draftkit.models.compatibility import declare_target
from draftkit.models.devices import resolve_device, resolve_dtype
from draftkit.models.files import ModelFolder, auto_model, end_of_text_ids
from draftkit.models.heads import EAGLE3, MEDUSA, STEPS, adapted, head_config, left_random, new_head
from draftkit.models.loading import (
    adapter_of,
    load_model,
    save_draft,
)
from draftkit.models.parallel import free_id
from draftkit.models.shapes import layer_count
from draftkit.models.shrink import (
    check_vocabulary,
    chosen_layers,
    frequent_ids,
    share_of_tokens,
    shrink,
)
from draftkit.models.vocabulary import real_vocab_size
from draftkit.tracking import Tracker

DRAFT = "draft"
WARMUP, DECAY = 20, 0.1  # one step in so many; weight decay
WORTH_COMPILING = 1_000  # steps: the passes of a model compile in half a minute
DRAFT_IDS = 32_000  # of a head, where its target has more
UNCOUNTED = 10  # every so many-th answer tells the share of answers instead
CPU = torch.device("cpu")
CONTEXT = 512  # of a new drafter


def make_draft(
    config: Config,
    target: TargetConfig,
    splits: Splits,
    folder: Path,
    *,
    tracker: Tracker,
    note: Callable[[str], None],
    answers: Sequence[Record] = (),
    sha256: str = "",
) -> None:
    """Make the drafter of section `draft` for `target`, trained on the text, in `<folder>/draft`.

    With `draft.shrink.layers` it is cut out of the target, and trained for `draft.shrink.steps`; a
    head begins with the target's weights, names its checksum `sha256`, and is not trained. The ids
    that it may propose are counted on the training text and on the target's own `answers`, where
    there are any (those of a head on these alone); `note` hears which share of the validation text,
    and of answers that are not counted, these are.
    """
    opened, made = ModelFolder(target), folder / DRAFT
    tokenizer = opened.tokenizer
    cut, shape = config.draft.shrink, config.draft.pretrain
    if config.draft.is_head or cut.layers:
        draft = made_of_target(
            config, target, splits, tokenizer=tokenizer, note=note, answers=answers
        )
        shape = replace(shape, max_steps=cut.steps or shape.max_steps)
    else:
        fresh = new_model(
            shape,
            tokenizer,
            opened.config,
            seed=config.seed,
            device=resolve_device(config.hardware),
            start=opened.start,
        )
        draft = adapter_of(fresh, vocab_size=len(tokenizer))
    if draft.reads:
        declare_target(draft.model.config, sha256)
    if draft.reads or (cut.layers and not cut.steps):
        return save_draft(draft, tokenizer, made)
    texts = texts_to_learn(splits, draft)
    log = reporting("prepare_draft", shape.max_steps, tracker, note)
    pretrain(draft, texts, made, tokenizer=tokenizer, shape=shape, config=config, log=log)


def fresh_config(
    pretrain: PretrainConfig, target: PreTrainedConfig, vocab_size: int, **special: Any
) -> PreTrainedConfig:
    """The shapes of `pretrain` over so many ids, of Llama type, or of T5 type beside such a target.

    special: ids of special tokens by name.
    """
    width, layers, heads = pretrain.hidden_size, pretrain.num_hidden_layers, pretrain.heads
    if target.is_encoder_decoder:
        return T5Config(
            vocab_size=vocab_size,
            d_model=width,
            d_kv=width // heads,
            d_ff=2 * width,
            num_layers=layers,
            num_decoder_layers=layers,
            num_heads=heads,
            feed_forward_proj="gated-gelu",
            **special,
        )
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **special,
    )


def new_model(
    pretrain: PretrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    target: PreTrainedConfig,
    *,
    seed: int,
    device: torch.device,
    start: int | None = None,
) -> PreTrainedModel:
    """Return a randomly initialised model of `fresh_config`, the same for the same `seed`.

    start: the id that begins the texts of a decoder with an encoder.
    """
    special: dict[str, Any] = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    if start is not None:
        special["decoder_start_token_id"] = start
    config = fresh_config(pretrain, target, len(tokenizer), **special)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto_model(config).from_config(config, dtype=torch.float32)
    return model.to(device)


def made_of_target(
    config: Config,
    target: TargetConfig,
    splits: Splits,
    *,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], None],
    answers: Sequence[Record],
) -> Adapter:
    """The drafter of layers of the target, or a head with what it can take of the target's weights.

    In float32 where it is trained afterwards, as a head is. It keeps the most frequent ids where it
    is to propose fewer than all.
    """
    kind, cut, options = config.draft.kind, config.draft.shrink, config.draft.head
    is_head, learns = config.draft.is_head, cut.steps > 0
    if not is_head:
        check_vocabulary(cut.vocabulary, len(tokenizer))
    dtype: Any = torch.float32 if learns else "auto"
    whole = load_model(target, dtype=dtype, device=CPU)
    size = real_vocab_size(tokenizer, whole.config, "target")
    rows, kept_ids = whole.config.get_text_config().vocab_size, None
    count = draft_ids(options, size) if is_head else cut.vocabulary or size
    if count < size:
        ends = end_of_text_ids(whole.generation_config, tokenizer)
        texts = {"splits": splits, "answers": answers, "of_text": not is_head}
        kept_ids = counted_ids(count, size, always=ends, note=note, **texts)
    if not is_head:
        layers = chosen_layers(cut.layers, layer_count(whole.config))
        note(f"the drafter has layers {', '.join(map(str, layers))} of the target")
        model: Any = shrink(whole, layers)
        model = model.to(resolve_device(config.hardware) if learns else CPU)
        return adapter_of(model, vocab_size=size, kept_ids=kept_ids)
    if kept_ids is not None and len(kept_ids) == rows:
        kept_ids = None
    traits: dict[str, int] = {STEPS: options.steps} if kind == EAGLE3 else {}
    if kind == MEDUSA:
        traits = {"medusa_heads": options.tokens}
    elif options.parallel:
        own = ([*record.prompt_ids, *record.output_ids] for record in answers)
        read = chain((example.token_ids for example in splits.train), own)
        traits = {"pard_token": free_id(tokenizer, rows, read), "pard_k": options.tokens}
    count = rows if kept_ids is None else len(kept_ids)
    shape = head_config(whole.config, kind, draft_ids=count, **traits)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head = new_head(whole, shape, kept_ids)
    random = ", ".join(left_random(head, whole, kept_ids))
    made = adapted(head, target=adapter_of(whole, vocab_size=size))
    layers = ", ".join(map(str, made.reads))
    begins = "its output rows" if kind == MEDUSA else "its output rows, last layer and norms"
    note(
        f"the head reads the hidden states behind {layers} layers of the target, and begins with "
        f"{begins}{f'; random: {random}' if random else ''}"
    )
    return made


def counted_ids(
    count: int,
    vocab_size: int,
    *,
    always: Sequence[int],
    splits: Splits,
    answers: Sequence[Record],
    note: Callable[[str], None],
    of_text: bool,
) -> Tensor:
    """The `count` most frequent of `vocab_size` ids, and those of `always`: [K].

    of_text: of the training text too where there are answers. `note` hears their share.
    """
    own = [record.output_ids for record in answers]
    groups: list[Iterable[Sequence[int]]] = []
    if of_text or not own:
        groups.append(example.token_ids for example in splits.train)
    groups.append(answer for number, answer in enumerate(own) if number % UNCOUNTED)
    kept_ids = frequent_ids(*groups, count=count, always=always, vocab_size=vocab_size)
    share = share_of_tokens((example.token_ids for example in splits.validation), kept_ids)
    of_answers = f", {share_of_tokens(own[::UNCOUNTED], kept_ids):.1%} of the target's own answers"
    note(
        f"the drafter keeps {len(kept_ids)} ids: {share:.1%} of the validation text"
        f"{of_answers if own else ''}"
    )
    return kept_ids


def draft_ids(head: HeadConfig, vocab_size: int) -> int:
    """How many of `vocab_size` ids a head proposes. ValueError for more than there are."""
    if head.vocabulary is None:
        return min(DRAFT_IDS, vocab_size)
    key = "draft.head.vocabulary"
    check_vocabulary(head.vocabulary, vocab_size, key=key, everything=str(vocab_size))
    return head.vocabulary


@alone()  # in a distributed launch the first process makes the model, the others wait for it
def pretrain(
    model: Adapter,
    texts: Sequence[TokenSequence],
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    shape: PretrainConfig,
    config: Config,
    log: Callable[[int, Mapping[str, float]], None],
) -> None:
    """Train `model`, in float32, to predict the tokens of `texts`, and save it to `folder`.

    What a resumed run needs lies beside the folder until the model is whole.
    """
    device = model.device
    dtype = resolve_dtype(config.hardware, device)
    compiled = config.optim.compiles_for(shape.max_steps, WORTH_COMPILING)
    if compiled and not model.has_encoder:
        model.model.base_model.compile(dynamic=False)  # rows are of one length
    trainer = Trainer(
        model,
        None,
        Objective(DivergenceConfig(name="next_token"), compiled=compiled),
        optim=OptimConfig(
            learning_rate=shape.learning_rate,
            max_steps=shape.max_steps,
            per_device_train_batch_size=shape.per_device_train_batch_size,
            warmup_steps=max(1, shape.max_steps // WARMUP),
            lr_scheduler_type="linear",
            weight_decay=DECAY,
            save_steps=config.optim.save_steps,
            logging_steps=config.optim.logging_steps,
        ),
        autocast=dtype if dtype != torch.float32 else None,
    )
    batch_size = shape.per_device_train_batch_size
    source = Source(shuffled(texts, config.seed), batch_size=batch_size, device=device)
    training = folder.with_name(f"{folder.name}-training")
    train(trainer, source, training, log=log)
    trained: Any = model.model
    trained.to(torch.float32)
    save_draft(model, tokenizer, folder)
    remove(training)  # the model is whole: nothing resumes from here


def texts_to_learn(splits: Splits, model: Adapter) -> Sequence[TokenSequence]:
    """The training text as `model` learns it: full rows, all tokens but ids that it cannot propose;
    of an encoder-decoder model each answer.

    Raises ValueError where no row has an answer to learn.
    """
    if model.has_encoder:
        train = splits.train
        answered = [row for row, text in enumerate(train) if text.has_completion]
        if not answered:
            raise ValueError(
                "data: no row has a `completion`, which a new encoder-decoder model learns"
            )
        return Lazy(lambda row: TokenSequence(train[row].token_ids, train[row].loss_mask), answered)
    rows, kept_ids = full_rows(splits.train, splits.room.total), model.kept_ids
    learned = np.full(rows.max() + 1, kept_ids is None)
    if kept_ids is not None:
        learned[kept_ids[kept_ids < len(learned)].numpy(force=True)] = True
    return Lazy(lambda row: TokenSequence(row.tolist(), [False, *learned[row[1:]].tolist()]), rows)


def full_rows(texts: Sequence[Example], length: int) -> np.ndarray:
    """The token ids of `texts` as rows [N, length], so that nothing is padded.

    A text of that length is a row; shorter ones follow one another, cut where a row ends. What
    fills no row is left out, unless it is all that there is.
    """
    ids = [np.asarray(text.token_ids, np.int32) for text in texts]
    ids.sort(key=lambda text: len(text) < length)
    tokens = np.concatenate(ids)
    width = min(length, len(tokens))
    return tokens[: len(tokens) // width * width].reshape(-1, width)
