"""The answers of a chat and their prompts: all turns before each, or as many as there is room for.

Answers are read in order, and each begins to look where the one before it ended. So a chat is read
in a time that grows as its length does: no answer renders the turns that an earlier one has found
to be too many.

This module does not know rows, masks or splits.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from draftkit.data.chats import ChatFormat, Message


class History:
    """The answers of one chat to its users, and its last turn if that awaits one.

    Of each: the ids of its prompt, of at most `limit` tokens where that can be; of the answer,
    empty where it is awaited, None where the template writes it otherwise than after its prompt;
    and how many tokens the whole prompt has. A prompt begins with a user turn, behind the system
    turn that the chat may have; the whole one with whatever the chat begins with. Raises
    `TemplateRefusal` for a chat that the template refuses.
    """

    def __init__(self, chat: Sequence[Message], template: ChatFormat, limit: int) -> None:
        self._chat, self._template, self._limit = chat, template, limit
        front = int(chat[0]["role"] in ("system", "developer"))
        self._front = chat[:front]
        users = [at for at in range(front + 1, len(chat)) if chat[at]["role"] == "user"]
        self._starts = [front, *users]  # where a prompt may begin
        self._start = 0  # the one where the last prompt began
        self._left_out = 0  # tokens of what lies before it

    def __iter__(self) -> Iterator[tuple[list[int], list[int] | None, int]]:
        roles = [turn["role"] for turn in self._chat]
        first = roles.index("user") if "user" in roles else len(roles)
        for end in range(first + 1, len(roles)):
            if roles[end] == "assistant":
                prompt, whole = self._before(end)
                start = self._starts[self._start]
                turns = [*self._front, *self._chat[start : end + 1]]
                yield prompt, self._template.answer(turns, prompt), whole
        if first < len(roles) and roles[-1] != "assistant":
            prompt, whole = self._before(len(roles))
            yield prompt, [], whole

    def _before(self, end: int) -> tuple[list[int], int]:
        """The ids of the prompt of the answer at `end`, and how many the whole one has.

        The most turns that fit; the last user turn alone where none do. Tokens of turns that were
        left out are counted as they stood in the last prompt that held them, which is exact
        for templates that write a turn always alike.
        """
        made: dict[int, list[int]] = {}

        def prompt(start: int) -> list[int]:
            if start not in made:
                turns = [*self._front, *self._chat[self._starts[start] : end]]
                made[start] = self._template.context(turns)
            return made[start]

        def fits(start: int) -> bool:
            return len(prompt(start)) <= self._limit

        last = bisect_left(self._starts, end) - 1
        before = start = self._start
        if fits(start):
            # Templates drop reasoning from history: there may be room again.
            while start > 0 and fits(start - 1):
                start -= 1
        else:
            start = bisect_left(range(last + 1), True, lo=start + 1, key=fits)
            start = min(start, last)
        left_out = self._left_out + len(prompt(before)) - len(prompt(start))
        self._start, self._left_out = start, left_out if start else 0
        return prompt(start), len(prompt(start)) + self._left_out
