"""Conversations to token ids, in one place: what is trained on, judged on and served is the same.

The context of an answer is what `apply_chat_template` gives for the turns before it, with the
generation prompt behind them: what a server would see. The answer is what the template adds to
that context for the turn itself, up to the token that ends it. Templates rewrite turns once they
are history (they drop their reasoning), so every answer has a context of its own.

What a turn says is text: only the template can end a turn or begin one. A name of a special token
in a turn gets a space of no width behind its first letter, and so is none to the tokenizer. Added
tokens that are not special (`<think>`) stay tokens.

This module does not know rows, lengths or losses.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from draftkit.artifacts import first_line
from draftkit.config import DataConfig

# Some templates print today's date; with this one the same rows give the same tokens every day.
DATE_MACRO = "{% macro strftime_now(format) %}01 Jan 2026{% endmacro %}{{ '' }}"

NO_WIDTH = "\u200b"

Message = Mapping[str, Any]


class TemplateRefusal(ValueError):
    """The chat template does not take a conversation; the message is its reason, one line."""


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer's chat template, with what is put in front and the variables it is given.

    options: variables of the template. fixed_date: what prints today's date prints a fixed one.
    Raises ValueError for settings that the template has no use for.
    """

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fixed_date: bool = False

    def __post_init__(self) -> None:
        given = {"data.system": self.system, "data.template_options": self.options}
        if useless := [key for key, value in given.items() if value and not self.has_template]:
            raise ValueError(
                f"{useless[0]}: the tokenizer of target.path has no chat template: leave it out, "
                "or take an instruct model"
            )
        for name in self.options:
            if not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise ValueError(
                    f"data.template_options: the chat template of target.path has no {name!r}"
                )

    @property
    def has_template(self) -> bool:
        """Whether there is a template at all; without one nothing below can be called."""
        return self.tokenizer.chat_template is not None

    @cached_property
    def _template(self) -> str:
        template = self.tokenizer.get_chat_template(tools=self.options.get("tools"))
        is_dated = self.fixed_date and "strftime_now" in template
        return DATE_MACRO + template if is_dated else template

    def names_special(self, turns: Any) -> bool:
        """Whether a text in `turns`, or in what lies in them, holds a special token's name."""
        return self._disarmed(turns) != turns

    def context(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation that awaits its answer. `TemplateRefusal` where refused."""
        return self._ids(self._rendered(messages, awaits=True))

    def answer(self, messages: Sequence[Message], context: Sequence[int]) -> list[int] | None:
        """The ids of the last turn after `context`, that of the turns before; its end is the last.

        None where the template writes the turn otherwise than after its own generation prompt.
        """
        text = self._rendered(messages)
        whole = self._ids(text)
        if whole[: len(context)] == [*context]:
            return self._ended(whole[len(context) :]) or None
        # The first characters of the answer may merge with the last token before it; a server
        # has read that token when the answer begins.
        before = self._rendered(messages[:-1], awaits=True)
        if not text.startswith(before):
            return None
        return self._ended(self._ids(text[len(before) :])) or None

    def _ended(self, ids: list[int]) -> list[int]:
        """`ids` up to the token that ends the turn: what follows it belongs to the next."""
        if (end := self.tokenizer.eos_token_id) in ids:
            return ids[: ids.index(end) + 1]
        special = [at for at, token in enumerate(ids) if token in self._special]
        return ids[: special[-1] + 1] if special else ids

    def _rendered(self, messages: Sequence[Message], *, awaits: bool = False) -> str:
        """The text that the template makes, where no turn holds the name of a special token."""
        turns = [dict(message) for message in messages]
        if self.system is not None and turns[0]["role"] not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": self.system})
        tools = self.options.get("tools")
        try:
            text: Any = self.tokenizer.apply_chat_template(
                self._disarmed(turns),
                chat_template=self._template,
                add_generation_prompt=awaits,
                tokenize=False,
                **{**self.options, "tools": self._disarmed(tools)},
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateRefusal(first_line(error)[:200]) from error
        return text

    def _disarmed(self, content: Any) -> Any:
        """`content` with a space of no width in every name of a special token, however deep."""
        if isinstance(content, str):
            return self._names.sub(lambda name: f"{name[0][0]}{NO_WIDTH}{name[0][1:]}", content)
        if isinstance(content, Mapping):
            return {self._disarmed(key): self._disarmed(value) for key, value in content.items()}
        return [*map(self._disarmed, content)] if isinstance(content, list | tuple) else content

    def _ids(self, text: str) -> list[int]:
        return text_ids(self.tokenizer, [text], special=False)[0]

    @cached_property
    def _special(self) -> dict[int, Any]:
        """The special tokens by their ids."""
        known = self.tokenizer.added_tokens_decoder.items()
        return {number: token for number, token in known if token.special}

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """Any special token's name."""
        names = (re.escape(token.content) for token in self._special.values())
        return re.compile("|".join(names) or "(?!)")


def chat_format(
    tokenizer: PreTrainedTokenizerBase, data: DataConfig, *, fixed_date: bool
) -> ChatFormat:
    """The chat template of `tokenizer` as `data` has it applied. Raises ValueError as it does."""
    return ChatFormat(tokenizer, data.system, data.template_options, fixed_date)


def text_ids(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    special: bool = True,
    literal: bool = False,
) -> list[list[int]]:
    """The ids of plain texts; `special`: with what the tokenizer puts around a text.

    The token that begins a text is not put before one that begins with it. literal: the names of
    special tokens are words.
    """
    if not texts:
        return []
    ids = tokenizer(
        list(texts),
        add_special_tokens=special,
        split_special_tokens=literal,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,  # a document may well be longer than the model's context
    )["input_ids"]
    twice = [tokenizer.bos_token_id] * 2
    return [one[1:] if special and not literal and one[:2] == twice else one for one in ids]
