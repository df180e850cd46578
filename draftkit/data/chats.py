"""Conversations to token ids, in one place: what is trained on, judged on and served is the same.

The context of an answer is what `apply_chat_template` gives for the turns before it, with the
generation prompt behind them: what a server would see. The answer is what the template adds to
that context for the turn itself, up to the token that ends it. Templates rewrite turns once they
are history (they drop their reasoning), so every answer has a context of its own.

What a turn says is text: only the template can end a turn or begin one. The name of a special token
in a turn gets a space of no width behind its first letter, and so is none to the tokenizer. So does
that of any added token that the template speaks of (`<think>`). An assistant's own turn may reason
and call tools: there it is broken only if it parts turns.

This module does not know rows, lengths or losses.
"""

import copy
import json
import re
import traceback
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, cached_property, partial
from itertools import cycle, product
from string import ascii_letters
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from draftkit.artifacts import first_line
from draftkit.config import DataConfig
from draftkit.data.messages import change_arguments

DAY = datetime(2026, 1, 1)
NO_WIDTH = "\u200b"
CALLS = ("tool_calls", "function_call")  # of an assistant's turn, beside what it says
WORDS = ("xyzzy", "plugh", "plover")  # in no template
REASONING = ("reasoning_content", "reasoning", "thinking")  # the keys of a turn that hold it
BEGUN = re.compile(r"([<\[◁][^<>\[\]◁▷\s]+[>\]▷])(\s*)\Z")  # what may begin it, and space
ENDS = (("<", "</"), ("[", "[/"), ("◁", "◁/"))  # by what its end differs

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
    _patterns: dict[str, Any] = field(
        default_factory=dict, repr=False, compare=False
    )  # by template

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
        return self.tokenizer.get_chat_template(tools=self.options.get("tools"))

    def names_special(self, turns: Any) -> bool:
        """Whether a text in `turns`, or in what lies in them, has the name of a token broken."""
        return self._disarmed(turns) != turns

    def text_mark(self) -> str | None:
        """A text that begins a turn and is no token, so that a message can hold it; None: none."""
        parts = re.split("|".join(WORDS), self._shown(*WORDS))
        tokens = re.compile("|".join(map(re.escape, self._added)) or "(?!)")
        for between in parts[1:-1]:
            mark = tokens.split(between)[-1]
            if mark == between or re.search(r"[^\w\s]", mark):
                return mark.strip() or mark
        return None

    def context(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation that awaits its answer. `TemplateRefusal` where refused."""
        return self._ids(self._rendered(messages, awaits=True))

    def answer(self, messages: Sequence[Message], context: Sequence[int]) -> list[int] | None:
        """The ids of the last turn after `context`, that of the turns before; its end is the last.

        None where the template writes the turn otherwise than after its own generation prompt.
        """
        text = self._rendered(messages)
        ids = self._ids(text)
        if ids[: len(context)] != [*context]:
            before = self._rendered(messages[:-1], awaits=True)
            if not text.startswith(before):
                text = before + self._reasoned(messages, before)
                ids = self._ids(text)
            # The first characters of the answer may merge with the last token before it; a server
            # has read that token when the answer begins.
            if ids[: len(context)] != [*context]:
                return self._ended(self._ids(text[len(before) :])) or None
        return self._ended(ids[len(context) :]) or None

    def _reasoned(self, messages: Sequence[Message], before: str) -> str:
        """What is said after `before` in a last turn whose reasoning `before` has begun.

        Templates of models that always reason begin it in the generation prompt, and drop it from
        turns. Empty where `before` begins none, or the turn holds none.
        """
        turn = self._disarmed(messages[-1])
        content, begun = turn.get("content", ""), BEGUN.search(before)
        opened, space = begun.groups() if begun else ("", "")
        ends = [opened.replace(*pair, 1) for pair in ENDS if pair[0] in opened]
        end = next((one for one in ends if one in content or one in self._template), None)
        reasoning = next((turn[key] for key in REASONING if isinstance(turn.get(key), str)), "")
        if end is None or begun is None or not (end in content or reasoning):
            return ""
        if end in content:
            answer = content.lstrip().removeprefix(opened + space).removeprefix(opened)
        else:
            answer = f"{reasoning.strip()}{space}{end}{space * 2}{content}"
        plain = {key: one for key, one in turn.items() if key not in REASONING}
        shown = self._rendered([*messages[:-1], {**plain, "content": WORDS[0]}])
        front, word, rest = shown.rpartition(WORDS[0])
        return answer + rest if word and front.startswith(before[: begun.start()]) else ""

    def _ended(self, ids: list[int]) -> list[int]:
        """`ids` up to the token that ends the turn: what follows it belongs to the next."""
        if (end := self.tokenizer.eos_token_id) in ids:
            return ids[: ids.index(end) + 1]
        special = [at for at, token in enumerate(ids) if token in self._special]
        return ids[: special[-1] + 1] if special else ids

    def _rendered(self, messages: Sequence[Message], *, awaits: bool = False) -> str:
        """The text that the template makes, where no turn holds the name of a token of its own."""
        turns = [dict(message) for message in messages]
        if self.system is not None and turns[0]["role"] not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": self.system})
        return self._applied(
            self._disarmed(turns), self._disarmed(self.options.get("tools")), awaits
        )

    def _applied(self, turns: list[Any], tools: Any = None, awaits: bool = False) -> str:
        """What the template makes of `turns` as they are."""
        dated = self.fixed_date and "strftime_now" in self._template
        apply = partial(
            self.tokenizer.apply_chat_template,
            chat_template=(date_macro() if dated else "") + self._template,
            add_generation_prompt=awaits,
            tokenize=False,
            **{**self.options, "tools": tools},
        )
        try:
            return str(apply(turns))
        except Exception as error:  # a template may raise whatever Python does
            texts, dumped = copy.deepcopy(turns), partial(json.dumps, ensure_ascii=False)
            for turn in texts:
                change_arguments(turn, lambda one: one if isinstance(one, str) else dumped(one))
            with suppress(Exception):  # some templates take the arguments of calls as text alone
                return str(apply(texts))
            if type(error) is jinja2.TemplateError:
                raise TemplateRefusal(first_line(error)) from error
            # Python's words, and where they were raised.
            frames = traceback.walk_tb(error.__traceback__)
            lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
            if isinstance(error, jinja2.TemplateSyntaxError):
                lines = [error.lineno]
            where = f", line {lines[-1]} of the template" if lines else ""
            reason = f"{type(error).__name__}: {first_line(error).rstrip('.')}{where}"
            raise TemplateRefusal(reason) from error

    def _disarmed(self, content: Any, own: bool = False) -> Any:
        """`content` with a space of no width in every name of a token, however deep.

        own: of an assistant, which may reason and call tools in its own text.
        """
        if isinstance(content, str):
            return self._names[own].sub(rf"\g<0>{NO_WIDTH}", content)
        if isinstance(content, Mapping):
            own = own or content.get("role") == "assistant"
            return {self._disarmed(k, own): self._disarmed(v, own) for k, v in content.items()}
        if isinstance(content, list | tuple):
            return [self._disarmed(one, own) for one in content]
        return content

    def _ids(self, text: str) -> list[int]:
        return text_ids(self.tokenizer, [text], special=False)[0]

    @cached_property
    def _special(self) -> dict[int, Any]:
        """The special tokens by their ids."""
        known = self.tokenizer.added_tokens_decoder.items()
        return {number: token for number, token in known if token.special}

    @cached_property
    def _added(self) -> list[str]:
        """The names of all added tokens, the longest first; runs of white space are none."""
        names = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        return sorted(filter(str.strip, names), key=len, reverse=True)

    @property
    def _names(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """The names that are broken in any turn, and those that are in an assistant's own.

        Any: special tokens, and others that the template speaks of. Own: special ones, and those
        that begin and end turns.
        """
        template = self._template if self.has_template else ""
        if template not in self._patterns:
            special = {token.content for token in self._special.values()}
            turns = set[str]()  # names of others by which the template parts a plain chat
            if template:
                shown = self._shown(*WORDS) + self._shown(*WORDS, system="s")
                turns = {name for name in {*self._added} - special if name in shown}
            # It may write others around reasoning. Those it looks for in what an assistant says.
            sought = set[str]()
            for name, after in product(turns, ("", *turns)):
                if name not in sought:
                    texts = (f"a{one}b{after}c" for one in (name, WORDS[0]))
                    named, plain = (self._shown("hi", one).replace(name, WORDS[0]) for one in texts)
                    sought |= {name} if named != plain else set()
            turns -= sought
            spoken = {name for name in self._added if name in template}
            self._patterns[template] = _broken(special | turns | spoken), _broken(special | turns)
        return self._patterns[template]

    def _shown(self, *texts: str, system: str | None = None) -> str:
        """`texts` of user and assistant in turn as the template writes them; empty: refused."""
        front = [] if system is None else [{"role": "system", "content": system}]
        turns = zip(cycle(("user", "assistant")), texts, strict=False)
        try:
            return self._applied([*front, *({"role": role, "content": one} for role, one in turns)])
        except TemplateRefusal:
            return ""


def _broken(names: Iterable[str]) -> re.Pattern[str]:
    """The first character of each of the `names` in a text, also where names overlap."""
    by_first: dict[str, list[str]] = {}
    for name in sorted(filter(None, names)):
        by_first.setdefault(name[0], []).append(re.escape(name[1:]))
    alternatives = (f"{re.escape(a)}(?={'|'.join(rest)})" for a, rest in by_first.items())
    return re.compile("|".join(alternatives) or "(?!)")


@cache
def date_macro() -> str:
    """What a template may ask of today's date, answered by DAY: the same rows, the same tokens."""
    forms = ["".join(one) for one in product(("", *"-_0^#EO"), ascii_letters)]
    known = {form: DAY.strftime(f"%{form}") for form in forms}
    table = json.dumps({form: value for form, value in known.items() if value != f"%{form}"})
    return (
        "{% macro strftime_now(format) %}{% set forms = " + table + " %}"
        "{% for whole in format.split('%%') %}{{ '' if loop.first else '%' }}"
        "{% for part in whole.split('%') %}{% if loop.first %}{{ part }}"
        "{% elif part[:2] in forms %}{{ forms[part[:2]] + part[2:] }}"
        "{% elif part[:1] in forms %}{{ forms[part[:1]] + part[1:] }}"
        "{% else %}{{ '%' + part }}{% endif %}{% endfor %}{% endfor %}{% endmacro %}{{ '' }}"
    )


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


def answers(
    chat: Sequence[Message], template: ChatFormat, limit: int
) -> Iterator[tuple[list[int], list[int] | None, bool]]:
    """The answers of a chat to its users, and its last turn if that awaits one.

    They are read in order, and each begins to look where the one before it ended. So a chat is read
    in a time that grows as its length does: no answer renders the turns that an earlier one has
    found to be too many.

    Of each: the ids of its prompt, of at most `limit` tokens where that can be; of the answer,
    empty where it is awaited or has the weight 0, None where the template does not write it after
    its prompt, or leaves out its calls; and whether turns are left out of the prompt. A prompt
    begins with a user turn, behind the system turn that the chat may have; the whole one with
    whatever the chat begins with.
    Raises `TemplateRefusal` for a chat that the template refuses.
    """
    roles = [turn["role"] for turn in chat]
    if "user" not in roles:
        return
    front = int(roles[0] in ("system", "developer"))
    starts = [front, *(at for at in range(front + 1, len(chat)) if roles[at] == "user")]
    ends = [at for at in range(roles.index("user") + 1, len(chat)) if roles[at] == "assistant"]
    first = 0  # of `starts`: where the last prompt began
    for end in ends + [len(chat)] * (roles[-1] != "assistant"):

        def context(first: int, end: int = end) -> list[int]:
            return template.context([*chat[:front], *chat[starts[first] : end]])

        prompt, last = context(first), bisect_left(starts, end) - 1
        # Templates drop reasoning from history: there may be room again.
        while first > 0 and len(longer := context(first - 1)) <= limit:
            first, prompt = first - 1, longer
        while first < last and len(prompt) > limit:
            first += 1
            prompt = context(first)
        answer: list[int] | None = []
        if end < len(chat) and chat[end].get("weight") != 0:
            before = [*chat[:front], *chat[starts[first] : end]]
            answer = template.answer([*before, chat[end]], prompt)
            if any(chat[end].get(key) for key in CALLS):
                uncalled = {key: value for key, value in chat[end].items() if key not in CALLS}
                with suppress(TemplateRefusal):  # which tells the two apart
                    if answer == template.answer([*before, {"content": "", **uncalled}], prompt):
                        answer = None
        yield prompt, answer, first > 0
