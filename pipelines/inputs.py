"""What several stages need: the pair of models, and held-out prompts.

A model that the configuration names is read where it lies; one that it leaves null is made first:
the target by `target`, the draft by `prepare`.
"""

from collections.abc import Sequence

from draftkit.config import Config
from draftkit.data.prompts import Example
from draftkit.models.loading import load_tokenizer
from draftkit.models.vocabulary import check_same_tokenizer
from pipelines.checksums import given_text
from pipelines.plan import Given, Step
from pipelines.prepare import draft_input
from pipelines.target import target_input
from pipelines.texts import texts


def models(config: Config) -> dict[str, Given | Step]:
    """The target, and the starting draft."""
    return {"target": target_input(config), "draft": draft_input(config)}


def text_and_target(config: Config) -> dict[str, Given | Step]:
    """The text, and the target that continues it."""
    return {"texts": texts.step(config), "target": target_input(config)}


def pair_and_text(config: Config) -> dict[str, Given | Step]:
    """The pair, and the text by its source and as it was read."""
    return {
        "data": given_text(config.data, config.root),
        "texts": texts.step(config),
        **models(config),
    }


def check_pair(config: Config) -> None:
    """Raise ValueError for a given draft of another vocabulary than the given target's.

    A model that is made has the tokenizer of the other one, or of the text.
    """
    if config.target.path is not None and config.draft.path is not None:
        check_same_tokenizer(
            target_tokenizer=load_tokenizer(config.target, "target"),
            draft_tokenizer=load_tokenizer(config.draft, "draft"),
        )


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
