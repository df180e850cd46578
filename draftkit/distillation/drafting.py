"""The drafter that distillation begins with, where none is given: new, or cut out of the target."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.config import Config, ModelConfig
from draftkit.data.prompts import Example
from draftkit.data.rollouts import Record
from draftkit.distillation.pretraining import pretrain
from draftkit.models.loading import end_of_text_ids, load_model, save_model
from draftkit.models.shrink import (
    check_vocabulary,
    chosen_layers,
    frequent_ids,
    kept_share,
    shrink,
)
from draftkit.models.vocabulary import real_vocab_size
from draftkit.tracking import Tracker

DRAFT = "draft"
UNCOUNTED = 10  # every so many-th answer tells the share of answers instead
CPU = torch.device("cpu")


def make_draft(
    config: Config,
    target: ModelConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Example],
    held_out: Sequence[Example],
    length: int,
    folder: Path,
    tracker: Tracker,
    note: Callable[[str], None],
    answers: Sequence[Record] = (),
) -> None:
    """Make the drafter of section `draft` for `target`, trained on `texts`, in `<folder>/draft`.

    length: tokens of a row that it is trained on. With `draft.shrink.layers` it is cut out of the
    target, and trained for `draft.shrink.steps`. The ids that it may propose are counted on `texts`
    and on the target's own `answers`, where there are any; `note` hears which share of the tokens
    of `held_out`, and of answers that are not counted, these are.
    """
    options, shape = config.draft.shrink, config.draft.pretrain
    start, kept_ids = None, None
    if options.layers:
        start, kept_ids = _cut(config, target, tokenizer, texts, held_out, note, answers)
        shape = replace(shape, max_steps=options.steps)
        if not options.steps:
            save_model(start, tokenizer, folder / DRAFT, kept_ids=kept_ids)
            return
    pretrain(
        DRAFT,
        replace(config, draft=replace(config.draft, pretrain=shape)),
        tokenizer=tokenizer,
        texts=texts,
        length=length,
        folder=folder,
        tracker=tracker,
        note=note,
        start=start,
        kept_ids=kept_ids,
    )


def _cut(
    config: Config,
    target: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Example],
    held_out: Sequence[Example],
    note: Callable[[str], None],
    answers: Sequence[Record],
) -> tuple[PreTrainedModel, Tensor | None]:
    """The drafter of layers of the target, and the ids [K] that it keeps, None for all.

    In float32 where it is trained afterwards.
    """
    options, kept_ids = config.draft.shrink, None
    check_vocabulary(options.vocabulary, len(tokenizer))
    dtype: Any = torch.float32 if options.steps else "auto"
    whole = load_model(target, "target", dtype=dtype, device=CPU)
    size = real_vocab_size(tokenizer, whole.config, "target")
    if 0 < options.vocabulary < size:
        own = [record.output_ids for record in answers]
        kept_ids = frequent_ids(
            (example.token_ids for example in texts),
            (answer for number, answer in enumerate(own) if number % UNCOUNTED),
            count=options.vocabulary,
            always=end_of_text_ids(whole.generation_config, tokenizer),
            vocab_size=size,
        )
        share = kept_share((example.token_ids for example in held_out), kept_ids)
        of_answers = f", {kept_share(own[::UNCOUNTED], kept_ids):.1%} of the target's own answers"
        note(
            f"the drafter keeps {len(kept_ids)} ids: {share:.1%} of the validation text"
            f"{of_answers if own else ''}"
        )
    layers = chosen_layers(options.layers, whole.config.get_text_config().num_hidden_layers)
    note(f"the drafter has layers {', '.join(map(str, layers))} of the target")
    return shrink(whole, layers), kept_ids
