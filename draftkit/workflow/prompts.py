"""Prompts as a caller of the library has them: text, chats, ids or rows of data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftkit.config import DataConfig
from draftkit.data.corpora import Document, row_form
from draftkit.data.prompts import Example, to_examples
from draftkit.models.loading import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


def examples_of(prompts: Sequence[Prompt], target: Target) -> list[Example]:
    """Prompts, and answers where they have some, as the target reads them.

    Raises ValueError naming the first that cannot be used.
    """
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of prompts, and is one text")
    size = target.adapter.vocab_size
    data = DataConfig(name="local", path="prompts", max_length=target.adapter.max_positions)
    examples: list[Example] = []
    for number, prompt in enumerate(prompts):
        name, row = f"prompt {number}", prompt
        if isinstance(row, str):
            row = {"prompt": row}
        elif not isinstance(row, Mapping):
            ids: Any = [*row]
            if ids and isinstance(ids[0], Mapping):
                row = {"messages": ids}
            elif ids and all(isinstance(one, int) and 0 <= one < size for one in ids):
                examples.append(Example(ids, [False] * len(ids), name, ""))
                continue
            else:
                raise ValueError(f"{name} must be text, messages, or ids from 0 to {size - 1}")
        document = Document(name, "", row_form(dict(row), data, name))
        made = to_examples(document, target.tokenizer, data)
        if not made:
            raise ValueError(f"{name} holds no text to continue")
        examples += made
    return examples


def cut_examples(examples: Sequence[Example], length: int) -> list[Example]:
    """`examples` cut to `length` tokens. Raises ValueError for a prompt that leaves no room."""
    for example in examples:
        if len(example.prompt_ids) >= length:
            raise ValueError(
                f"{example.document} has {len(example.prompt_ids)} tokens, and prompt and answer "
                f"together get max_length={length}: raise it, or leave the prompt out"
            )
    return [
        replace(e, token_ids=e.token_ids[:length], loss_mask=e.loss_mask[:length]) for e in examples
    ]
