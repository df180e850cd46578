"""The answers of a chat and their prompts: all turns before each, or as many as there is room for.

Answers are read in order, and each begins to look where the one before it ended. So a chat is read
in a time that grows as its length does: no answer renders the turns that an earlier one has found
to be too many.

This module does not know rows, masks or splits.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from draftkit.data.chats import ChatFormat, Message, TemplateRefusal

CALLS = ("tool_calls", "function_call")  # of an assistant's turn, beside what it says


def answers(
    chat: Sequence[Message], template: ChatFormat, limit: int
) -> Iterator[tuple[list[int], list[int] | None, bool]]:
    """The answers of a chat to its users, and its last turn if that awaits one.

    Of each: the ids of its prompt, of at most `limit` tokens where that can be; of the answer,
    empty where it is awaited or has the weight 0, None where the template does not write it after
    its prompt; and whether turns are left out of the prompt. A prompt begins with a user turn,
    behind the system turn that the chat may have; the whole one with whatever the chat begins with.
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
        turns = [*chat[:front], *chat[starts[first] : end + 1]]
        is_learned = end < len(chat) and not is_weightless(chat[end])
        yield prompt, _written(template, turns, prompt) if is_learned else [], first > 0


def is_weightless(turn: Message) -> bool:
    """Whether a chat says that an answer is not to be learned, as OpenAI's files for tuning do."""
    return turn["role"] == "assistant" and turn.get("weight") == 0


def _written(
    template: ChatFormat, turns: Sequence[Message], prompt: Sequence[int]
) -> list[int] | None:
    """The ids of the last turn after `prompt`; None where the template leaves out its calls."""
    answer, turn = template.answer(turns, prompt), turns[-1]
    if any(turn.get(key) for key in CALLS):
        uncalled = {key: value for key, value in turn.items() if key not in CALLS}
        try:
            if answer == template.answer([*turns[:-1], {"content": "", **uncalled}], prompt):
                return None
        except TemplateRefusal:
            pass  # which tells the two apart
    return answer
