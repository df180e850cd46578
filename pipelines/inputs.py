"""What several stages read: the models, their checksums, and held-out prompts.

A model that the configuration names is read where it lies; one that it leaves null comes from
`prepare`.
"""

from collections.abc import Sequence

from draftkit.config import Config, ModelConfig
from draftkit.data.prompts import Example
from draftkit.models.loading import load_tokenizer, with_path
from draftkit.models.vocabulary import check_same_tokenizer
from pipelines.checksums import data_sha256, model_sha256
from pipelines.prepare import prepare


def models(config: Config) -> tuple[ModelConfig, ModelConfig]:
    """Target and starting draft, from where they lie or from `prepare`."""
    target, draft = config.target, config.draft
    if target.path is not None and draft.path is not None:
        return target, draft
    made = prepare.ensure(config)
    return (
        target if target.path is not None else with_path(target, made / "target"),
        draft if draft.path is not None else with_path(draft, made / "draft"),
    )


def target_hashes(config: Config) -> dict[str, str]:
    """Checksums of what the target's own text depends on."""
    target, _ = models(config)
    return {"target": model_sha256(target, "target"), "data": data_sha256(config.data)}


def pair_hashes(config: Config) -> dict[str, str]:
    """Checksums of target, starting draft and text.

    Raises ValueError for a draft of another vocabulary, before anything is sampled for it.
    """
    target, draft = models(config)
    check_same_tokenizer(
        target_tokenizer=load_tokenizer(target, "target"),
        draft_tokenizer=load_tokenizer(draft, "draft"),
    )
    return {**target_hashes(config), "draft": model_sha256(draft, "draft")}


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
