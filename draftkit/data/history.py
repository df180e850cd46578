"""The answers of a chat and their prompts: all turns before each, or as many as there is room for.

Answers are read in order, and each begins to look where the one before it ended. So a chat is read
in a time that grows as its length does: no answer renders the turns that an earlier one has found
to be too many.

This module does not know rows, masks or splits.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from draftkit.data.chats import ChatFormat, Message


def answers(
    chat: Sequence[Message], template: ChatFormat, limit: int
) -> Iterator[tuple[list[int], list[int] | None, bool]]:
    """The answers of a chat to its users, and its last turn if that awaits one.

    Of each: the ids of its prompt, of at most `limit` tokens where that can be; of the answer,
    empty where it is awaited, None where the template writes it otherwise than after its prompt;
    and whether turns are left out of the prompt. A prompt begins with a user turn, behind the
    system turn that the chat may have; the whole one with whatever the chat begins with. Raises
    `TemplateRefusal` for a chat that the template refuses.
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
        turns = [*chat[:front], *chat[starts[first] : end + 1]]
        yield prompt, template.answer(turns, prompt) if end < len(chat) else [], first > 0
