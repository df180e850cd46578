"""How many tokens rows may have, what is cut for it, and when that is too much.

Prompts of chats and of rows with a prompt have a length of their own, as their answers have; plain
text is read in windows. All of it fits the context of both models.

This module does not know how rows are read.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from draftkit.config import DataConfig
from draftkit.data.corpora import setting

MOST_CUT = 0.05  # of the prompts: where a larger setting would hold them, more are refused
ADVISED_CUT = 0.01  # of the prompts, at the length that is advised then,
ADVISED_STEP = 64  # a multiple of so many tokens
WHOLE = 1 << 30  # tokens: more than any row has


@dataclass(frozen=True)
class Room:
    """What a sampled answer gets: `new` tokens at most, `total` with its prompt."""

    new: int
    total: int


@dataclass(frozen=True)
class Lengths:
    """Most tokens of a prompt, of its answer, and of a window of plain text."""

    prompt: int
    completion: int
    window: int

    def room(self, data: DataConfig, *, texts: bool, chats: bool) -> Room:
        """That of answers to prompts of plain `texts`, and of `chats` or rows with a prompt.

        Where there are both, the longer one decides.
        """
        rooms = [Room(self.window - data.prompt_tokens, self.window)] * texts
        rooms += [Room(self.completion, self.prompt + self.completion)] * chats
        return Room(max(room.new for room in rooms), max(room.total for room in rooms))


UNCUT = Lengths(WHOLE, WHOLE, WHOLE)


def lengths_within(context: int, data: DataConfig) -> Lengths:
    """The lengths of `data`, less where models of `context` tokens do not hold them.

    Where prompt and answer do not fit together a prompt gets half of the context, or what the
    answer leaves. Raises ValueError where a window would be no more than its prompt.
    """
    prompt = min(data.max_prompt_tokens, most_prompt(context, data))
    window = min(data.max_length, context)
    if window <= data.prompt_tokens:
        raise ValueError(
            f"data.prompt_tokens={data.prompt_tokens} leaves nothing of the models' context of "
            f"{context} tokens to learn: lower it"
        )
    return Lengths(prompt, min(data.max_completion_tokens, context - prompt), window)


def most_prompt(context: int, data: DataConfig) -> int:
    """The most that `data.max_prompt_tokens` can come to in a context."""
    return max(context // 2, context - data.max_completion_tokens)


def capped_line(counts: Mapping[str, int], lengths: Lengths, data: DataConfig, context: int) -> str:
    """What the context has lowered for the rows of `counts`, in one line; empty for nothing."""
    limits: dict[str, int] = {}
    if counts["rows"]:
        limits |= {"max_prompt_tokens": lengths.prompt, "max_completion_tokens": lengths.completion}
    if counts["windows"]:
        limits["max_length"] = lengths.window
    lowered = [
        f"data.{name} is {limit} instead of {getattr(data, name)}"
        for name, limit in limits.items()
        if limit < getattr(data, name)
    ]
    if not lowered:
        return ""
    return f"the smaller context of both models has {context} tokens: {', '.join(lowered)}"


def check_prompts_cut(
    tokens: Mapping[int, int], lengths: Lengths, context: int, data: DataConfig
) -> None:
    """Refuse to cut more than `MOST_CUT` of the prompts, of which `tokens[n]` have n tokens.

    Raises ValueError that names the setting which would hold them, or the way out where the
    context of the models holds no more.
    """
    total = sum(tokens.values())

    def longer(than: int) -> float:
        return sum(count for size, count in tokens.items() if size > than) / max(1, total)

    if data.overlong == "drop" or longer(lengths.prompt) <= MOST_CUT:
        return
    most = most_prompt(context, data)
    steps = range(ADVISED_STEP, most + ADVISED_STEP, ADVISED_STEP)
    advised = min(next((n for n in steps if longer(n) <= ADVISED_CUT), most), most)
    share = f"{setting(data)}: {longer(lengths.prompt):.0%} of the prompts are longer than"
    if longer(advised) <= MOST_CUT:
        raise ValueError(
            f"{share} data.max_prompt_tokens={lengths.prompt}: data.max_prompt_tokens={advised} "
            f"holds {1 - longer(advised):.0%} of them, data.overlong=drop leaves such rows out"
        )
    ways = []
    if longer(lengths.prompt) < 1:
        ways.append("data.overlong=drop leaves such rows out")
    if longer(context - 1) < 1:
        ways.append("a smaller data.max_completion_tokens leaves more")
    raise ValueError(
        f"{share} the {lengths.prompt} tokens that the models' context of {context} leaves for "
        f"them: {', '.join(ways) or 'use shorter prompts, or models of a longer context'}"
    )


def ways_out(
    tokens: Mapping[int, int], lengths: Lengths, context: int, data: DataConfig
) -> Iterator[str]:
    """What may help where every row is too long for `lengths`; `tokens` as above."""
    raised = []
    if lengths.prompt == data.max_prompt_tokens < most_prompt(context, data):
        raised.append("data.max_prompt_tokens")
    if lengths.completion < context - min(data.max_prompt_tokens, context // 2):
        raised.append("data.max_completion_tokens")
    if raised:
        yield f"raise {' and '.join(raised)}"
    else:
        yield f"use shorter rows, or models of a longer context than {context} tokens"
    if data.overlong == "drop":
        with suppress(ValueError):  # where that would be refused
            check_prompts_cut(tokens, lengths, context, replace(data, overlong="cut"))
            yield "use data.overlong=cut"


def shares_cut(counts: Mapping[str, int]) -> dict[str, float]:
    """Of all rows: the share of prompts cut, of answers cut, and of rows dropped."""
    rows, answers = max(1, counts["rows"]), max(1, counts["completions"])
    return {
        "prompts_cut_share": counts["prompts_cut"] / rows,
        "completions_cut_share": counts["completions_cut"] / answers,
        "rows_dropped_share": counts["rows_dropped"] / rows,
    }


def shared_line(counts: Mapping[str, int]) -> str:
    """Which prompts are alike, in one line; empty where none are."""
    shared, repeated = counts["prompts_shared"], counts["test_prompts_repeated"]
    if not shared and not repeated:
        return ""
    return (
        f"{shared:,} examples are left out of training and validation, since their prompts are "
        f"held out; {repeated:,} of {counts['test']:,} test prompts repeat another"
    )


def reading_lines(counts: Mapping[str, int], lengths: Lengths) -> list[str]:
    """What became of the rows that are no plain text, in lines for the person who gave them."""
    if not counts["rows"]:
        return []
    prompts, answers, dropped = shares_cut(counts).values()
    lines = [
        f"{counts['rows']:,} prompts of at most {lengths.prompt:,} tokens, {prompts:.1%} cut; "
        f"{counts['completions']:,} answers of at most {lengths.completion:,}, {answers:.1%} cut; "
        f"{dropped:.1%} of the rows dropped"
    ]
    notes = {
        "prompts_templated": "prompts became a user turn of the chat template",
        "rows_naming_special": "rows hold names of special tokens, which are text there (prompts "
        "that hold the chat template already need data.chat_template=never)",
        "answers_unused": "answers train nothing: the chat template writes them otherwise than "
        "after its own generation prompt",
    }
    return lines + [f"{counts[name]:,} {text}" for name, text in notes.items() if counts[name]]
