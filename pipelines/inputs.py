"""What several stages read: the pair, its checksums, and held-out prompts.

A model that the configuration names is read where it lies; one that it leaves null is made first:
the target by `target`, the draft by `prepare`.
"""

from collections.abc import Sequence

from draftkit.config import Config, ModelConfig
from draftkit.data.prompts import Example
from draftkit.models.loading import load_tokenizer, with_path
from draftkit.models.vocabulary import check_same_tokenizer
from pipelines.checksums import data_sha256, model_sha256
from pipelines.prepare import prepare
from pipelines.target import target_of


def draft_of(config: Config) -> ModelConfig:
    """The starting draft, from where it lies or from `prepare`."""
    if config.draft.path is not None:
        return config.draft
    return with_path(config.draft, prepare.ensure(config) / "draft")


def models(config: Config) -> tuple[ModelConfig, ModelConfig]:
    """Target and starting draft.

    The draft first: one that cannot be cut is refused before a target is trained for it.
    """
    draft = draft_of(config)
    return target_of(config), draft


def model_hashes(config: Config) -> dict[str, str]:
    """Checksums of target and starting draft, tokenizer and kept ids included.

    Raises ValueError for a draft of another vocabulary, before anything is sampled for it.
    """
    target, draft = models(config)
    check_same_tokenizer(
        target_tokenizer=load_tokenizer(target, "target"),
        draft_tokenizer=load_tokenizer(draft, "draft"),
    )
    return {"target": model_sha256(target, "target"), "draft": model_sha256(draft, "draft")}


def pair_hashes(config: Config) -> dict[str, str]:
    """Checksums of target, starting draft and text. Raises ValueError as `model_hashes` does."""
    return {**model_hashes(config), "data": data_sha256(config.data)}


def prompts_of(examples: Sequence[Example], count: int) -> list[list[int]]:
    """The first `count` prompts of a held-out split, fewer where there are fewer.

    Raises ValueError for under 2: no interval could be given.
    """
    if len(examples) < 2:
        raise ValueError(
            f"data: {len(examples)} held-out prompts are too few for an interval: give more rows, "
            "or raise data.test_fraction and data.validation_fraction"
        )
    return [example.prompt_ids for example in examples[:count]]
