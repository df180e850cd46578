"""How long texts and answers may be, by the contexts of the two models, before any is loaded."""

from draftkit.config import Config
from draftkit.config.text import CORPUS
from draftkit.data.lengths import Lengths, lengths_within
from draftkit.distillation.pretrain import CONTEXT
from draftkit.models.context import context_of
from draftkit.models.loading import model_config


def shared_context(config: Config) -> int:
    """The context of the target or of the draft, whichever is smaller; nothing is loaded or made.

    Raises ValueError naming the model that is not there.
    """
    target, draft = config.target, config.draft
    whole = context_of(model_config(target))
    if draft.path is not None:
        return min(whole, context_of(model_config(draft)))
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
