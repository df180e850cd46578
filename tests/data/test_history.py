"""The prompts of a chat's answers: as many of the newest turns as fit, found in linear time."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast as Fast

from draftkit.config import DataConfig
from draftkit.data.chats import ChatFormat, answers
from draftkit.data.corpora import Document
from draftkit.data.lengths import lengths_within
from draftkit.data.prompts import RowReader
from tests.templates import CHAT, byte_bpe, headers, thinking

SYSTEM = {"role": "system", "content": "Keep short."}
GREETING = {"role": "assistant", "content": "Ask me."}


def turns_of(draw: random.Random, count: int) -> list[dict[str, str]]:
    """A chat with turns of many lengths, thoughts, and answers that follow one another.

    Whoever is asked may speak first.
    """
    turns = [SYSTEM] * draw.randrange(2) + [GREETING] * draw.randrange(2)
    for _ in range(count):
        turns.append({"role": "user", "content": "say " * draw.choice([1, 2, 5, 40])})
        for _ in range(draw.choice([1, 1, 3])):
            thought = f"<think>\n{'of it ' * draw.choice([1, 30])}\n</think>\n\n"
            turns.append({"role": "assistant", "content": thought + "the " * draw.randrange(9)})
    return turns


def by_trying_all(
    template: ChatFormat, turns: list[dict[str, str]], end: int, limit: int
) -> list[int]:
    """The prompt of the answer at `end` with the most turns that fit, else the last one alone."""
    front = turns[: turns[0]["role"] == "system"]
    users = [at for at in range(len(front) + 1, end) if turns[at]["role"] == "user"]
    starts = [len(front), *users]
    prompts = [template.context([*front, *turns[start:end]]) for start in starts]
    return next((prompt for prompt in prompts if len(prompt) <= limit), prompts[-1])


@pytest.mark.parametrize("make", [thinking, headers, lambda: byte_bpe(template=CHAT)])
def test_prompts_have_the_most_turns_that_fit(make: Callable[[], Fast]) -> None:
    tokenizer, draw = make(), random.Random(0)
    cut = 0
    for limit in (60, 120, 250):
        for _ in range(4):
            turns, template = turns_of(draw, 6), ChatFormat(tokenizer, fixed_date=True)
            made = [*answers(turns, template, limit)]
            roles = [turn["role"] for turn in turns]
            asked = roles.index("user")
            ends = [at for at, role in enumerate(roles) if role == "assistant" and at > asked]
            best = [by_trying_all(template, turns, end, limit) for end in ends]
            assert [prompt for prompt, _, _ in made] == best
            whole = [template.context(turns[:end]) for end in ends]
            assert [is_cut for _, _, is_cut in made] == [
                one != all_of_it for one, all_of_it in zip(best, whole, strict=True)
            ]
            cut += sum(is_cut for _, _, is_cut in made)
    assert cut > 20


class Counting(Fast):
    """Counts the characters that it is given, and those that templates render."""

    characters = 0

    def __call__(self, text: Any = None, *others: Any, **options: Any) -> Any:
        self.characters += len(text) if isinstance(text, str) else sum(map(len, text))
        return super().__call__(text, *others, **options)

    def apply_chat_template(self, conversation: Any, *others: Any, **options: Any) -> Any:
        self.characters += sum(len(turn["content"]) for turn in conversation)
        return super().apply_chat_template(conversation, *others, **options)


def read_characters(answers: int) -> int:
    """How much is rendered and tokenised to read a chat of `answers` to short questions."""
    tokenizer: Any = byte_bpe(template=CHAT)
    tokenizer.__class__ = Counting
    turns = [
        {"role": role, "content": f"{n} the draft and the target"}
        for n in range(answers)
        for role in ("user", "assistant")
    ]
    data = DataConfig(name="local", path="a", max_prompt_tokens=128)
    reader = RowReader(tokenizer, data, lengths_within(4096, data))
    before = tokenizer.characters
    ((_, made),) = reader.read([Document("id", "", {"messages": turns})])
    assert len(made) == answers
    return tokenizer.characters - before


def test_a_chat_twice_as_long_is_read_in_twice_the_time() -> None:
    assert read_characters(64) < 2.2 * read_characters(32)
