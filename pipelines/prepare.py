"""`python -m pipelines.prepare`: a base drafter where none is given.

It is trained on the text of `data`, by plain next-token prediction; with `draft.shrink.layers` it
is cut out of the target first, and trained for `draft.shrink.steps`. Shared by every experiment
with the same data, target and drafter; a kill at any moment costs the steps since the last
checkpoint.
"""

from typing import Any

from draftkit.config import PLAIN, REFUSE, Config
from draftkit.data.rollouts import read_parts
from draftkit.data.splits import read_splits
from draftkit.distillation.pretrain import draft_ids, make_draft
from draftkit.models.files import ModelFolder
from draftkit.models.head_files import check_head
from draftkit.models.heads import head_class
from draftkit.models.loading import (
    check_kind,
    check_same_shape,
    check_shows_layers,
)
from draftkit.models.shapes import layer_count
from draftkit.models.shrink import check_vocabulary, chosen_layers
from draftkit.models.vocabulary import check_same_tokenizer

from .command import main
from .plan import PREPARE
from .stage import StageFolder


def check(config: Config) -> None:
    """Raise ValueError for a drafter that cannot be made of the target to be trained."""
    options, target = config.draft.shrink, ModelFolder(config.target)
    if config.draft.is_head:
        check_pair(config)
        draft_ids(config.draft.head, len(target.tokenizer))
    if options.layers:
        chosen_layers(options.layers, layer_count(target.config))
        check_vocabulary(options.vocabulary, len(target.tokenizer))


def prepare(config: Config, folder: StageFolder) -> dict[str, Any]:
    """Make the drafter, in `draft` of the folder."""
    tokenizer = ModelFolder(folder.model(config, "target")).tokenizer
    splits = read_splits(folder.inputs["texts"])
    if not (folder.path / "draft").exists():
        make_draft(
            config,
            folder.model(config, "target"),
            splits,
            folder.path,
            tracker=folder.tracker,
            note=folder.note,
            answers=read_parts(folder.inputs["generate"]) if "generate" in folder.inputs else (),
            sha256=folder.digests["target"],
        )
    return {"vocab_size": len(tokenizer), "text_sha256": splits.sha256}


def check_pair(config: Config) -> None:
    """Raise ValueError for a given draft of another vocabulary or kind than the target's, and for
    what no encoder-decoder model can be."""
    target = ModelFolder(config.target)
    shape, _ = target.config, target.start  # which is refused where it is not known
    if shape.is_encoder_decoder:
        for key, value, only in (
            ("draft.kind", config.draft.kind, PLAIN),
            ("draft.shrink.vocabulary", config.draft.shrink.vocabulary, 0),
            ("draft.extra_tokens", config.draft.extra_tokens, REFUSE),
            ("sampling.repetition_penalty", config.sampling.repetition_penalty, 1.0),
        ):
            if value != only:
                raise ValueError(
                    f"{key}={value}: the target is an encoder-decoder model ({shape.model_type}), "
                    f"for which it must be {only}"
                )
    if config.draft.path is None:
        if config.draft.is_head:
            check_shows_layers(config.draft, shape)
        return
    drafter = ModelFolder(config.draft)
    check_kind(config.draft, drafter.config, learns=True)
    if head_class(drafter.config) is not None:  # whose folder may have no tokenizer
        check_head(f"draft.path {config.draft.path}", drafter.config, shape)
    else:
        check_same_shape(shape, drafter.config)
        check_same_tokenizer(
            target_tokenizer=target.tokenizer,
            draft_tokenizer=drafter.tokenizer,
            extra_tokens=config.draft.extra_tokens,
        )


if __name__ == "__main__":
    main(PREPARE)
