"""`python -m pipelines.prepare`: a base drafter where none is given, for the target of `target.py`.

It is trained on the same text, by plain next-token prediction; with `draft.shrink.layers` it is cut
out of the target first, and trained for `draft.shrink.steps`. Shared by every experiment with the
same data, target and drafter; a kill at any moment costs the steps since the last checkpoint.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftkit.config import Config
from draftkit.data.prompts import Splits, read_splits
from draftkit.models.loading import end_of_text_ids, load_model, load_tokenizer, save_model
from draftkit.models.shrink import (
    check_layers,
    check_vocabulary,
    frequent_ids,
    kept_share,
    shrink,
)
from draftkit.models.vocabulary import check_same_tokenizer, real_vocab_size
from draftkit.workflow.pretraining import pretrain
from pipelines.checksums import given_model, given_text
from pipelines.plan import Given, StageFolder, Step
from pipelines.run import stage
from pipelines.target import target_input
from pipelines.texts import texts

CPU = torch.device("cpu")


def check(config: Config) -> None:
    """Raise ValueError for a drafter that cannot be cut out of the target to be trained."""
    options, given = config.draft.shrink, config.target.path is not None
    if options.layers and not given:
        check_layers(options.layers, config.target.pretrain.num_hidden_layers)
        check_vocabulary(options.vocabulary, config.data.vocab_size)


def text_and_target(config: Config) -> dict[str, Given | Step]:
    """The text, and the target that continues it."""
    return {"texts": texts.step(config), "target": target_input(config)}


def cut(
    config: Config, folder: StageFolder, tokenizer: PreTrainedTokenizerBase, splits: Splits
) -> tuple[PreTrainedModel, Tensor | None]:
    """The drafter of layers of the target, as `draft.shrink` says, and the ids [K] that it keeps.

    In float32 where it is trained afterwards.
    """
    options, kept_ids = config.draft.shrink, None
    check_vocabulary(options.vocabulary, len(tokenizer))
    dtype: Any = torch.float32 if options.steps else "auto"
    whole = load_model(folder.model(config, "target"), "target", dtype=dtype, device=CPU)
    if options.vocabulary:
        kept_ids = frequent_ids(
            (example.token_ids for example in splits.train),
            count=options.vocabulary,
            always=end_of_text_ids(whole.generation_config, tokenizer),
            vocab_size=real_vocab_size(tokenizer, whole.config, "target"),
        )
        share = kept_share((example.token_ids for example in splits.validation), kept_ids)
        folder.note(f"the drafter keeps {len(kept_ids)} ids: {share:.1%} of the validation text")
    return shrink(whole, options.layers), kept_ids


@stage(
    sections=("seed", "data", "draft.pretrain", "draft.shrink"),
    shared=True,
    product="draft",
    needs=text_and_target,
    check=check,
)
def prepare(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Make the drafter, in `draft` of the folder."""
    tokenizer = load_tokenizer(folder.model(config, "target"), "target")
    splits = read_splits(folder.input("texts"))
    if not (folder.path / "draft").exists():
        options, shape = config.draft.shrink, config.draft.pretrain
        start, kept_ids = None, None
        if options.layers:
            start, kept_ids = cut(config, folder, tokenizer, splits)
            shape = replace(shape, max_steps=options.steps)
        if start is None or options.steps:
            pretrain(
                "draft",
                replace(config, draft=replace(config.draft, pretrain=shape)),
                tokenizer=tokenizer,
                texts=splits.train,
                folder=folder.path,
                tracker=folder.tracker,
                note=folder.note,
                start=start,
                kept_ids=kept_ids,
            )
        else:
            save_model(start, tokenizer, folder.path / "draft", kept_ids=kept_ids)
    return {"vocab_size": len(tokenizer), "text_sha256": splits.sha256}


# The pair, as other stages need it: a model that the configuration names is read where it lies


def models(config: Config) -> dict[str, Given | Step]:
    """The target, and the starting draft: the one that is given, or the step that makes it."""
    is_given, target = config.draft.path is not None, target_input(config)
    draft = given_model(config.draft, "draft", config.root) if is_given else prepare.step(config)
    return {"target": target, "draft": draft}


def pair_and_text(config: Config) -> dict[str, Given | Step]:
    """The pair, and the text by its source and as it was read."""
    data = given_text(config.data, config.root)
    return {"data": data, "texts": texts.step(config), **models(config)}


def check_pair(config: Config) -> None:
    """Raise ValueError for a given draft of another vocabulary than the given target's.

    A model that is made has the tokenizer of the other one, or of the text.
    """
    if config.target.path is not None and config.draft.path is not None:
        check_same_tokenizer(
            target_tokenizer=load_tokenizer(config.target, "target"),
            draft_tokenizer=load_tokenizer(config.draft, "draft"),
        )


if __name__ == "__main__":
    prepare.main()
