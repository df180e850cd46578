"""How many tokens rows may have, and what is cut for it.

Prompts of chats and of rows with a prompt have a length of their own, as their answers have; plain
text is read in windows. All of it fits the context of both models.

This module does not know how rows are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftkit.config import DataConfig

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
    most = max(context // 2, context - data.max_completion_tokens)
    prompt = min(data.max_prompt_tokens, most)
    window = min(data.max_length, context)
    if window <= data.prompt_tokens:
        raise ValueError(
            f"data.prompt_tokens={data.prompt_tokens} leaves nothing of the models' context of "
            f"{context} tokens to learn: lower it"
        )
    return Lengths(prompt, min(data.max_completion_tokens, context - prompt), window)


def shares_cut(counts: Mapping[str, int]) -> dict[str, float]:
    """Of all rows: the share of prompts cut, of answers cut, of rows dropped, and of bad ones."""
    rows, answers = max(1, counts["rows"]), max(1, counts["completions"])
    read = max(1, counts["documents"] + counts["rows_bad"])
    return {
        "prompts_cut_share": counts["prompts_cut"] / rows,
        "completions_cut_share": counts["completions_cut"] / answers,
        "rows_dropped_share": counts["rows_dropped"] / rows,
        "rows_bad_share": counts["rows_bad"] / read,
    }


def cut_line(counts: Mapping[str, int], lengths: Lengths) -> str:
    """What was cut of the rows that are no plain text, in one line."""
    prompts, answers, dropped, _ = shares_cut(counts).values()
    return (
        f"{counts['rows']:,} prompts of at most {lengths.prompt:,} tokens, {prompts:.1%} cut; "
        f"{counts['completions']:,} answers of at most {lengths.completion:,}, {answers:.1%} cut; "
        f"{dropped:.1%} of the rows dropped"
    )


# What becomes of rows, and what a person hears of it.
COUNTS = (
    "rows_bad",  # left out before anything else is counted of them
    "documents",
    "documents_dropped",  # no prompt, nothing after it, or all their rows are dropped
    "windows",  # of plain text
    "rows",  # all others: a prompt, with its answer where it has one
    "rows_dropped",  # of them: chats whose last turn is too long
    "prompts_cut",  # to data.max_prompt_tokens: chats lose their oldest turns, others their left
    "completions",  # rows with an answer
    "completions_cut",  # on the right, to data.max_completion_tokens
    "prompts_templated",  # strings that became a user turn
    "rows_naming_special",  # of chats and prompts: a special token's name, which is text there
    "answers_unused",  # of chats, where the template does not write them after their prompt
    "answers_weightless",  # of chats, which give them the weight 0
    "answers_empty_reasoning",  # of chats, which begin with it
    "prompts_shared",  # examples left out, as another split has held out their prompt
    "test_prompts_repeated",  # those that an earlier test example has as well
)
NOTES = {
    "prompts_templated": "prompts became a user turn of the chat template",
    "rows_naming_special": "rows hold names of special tokens, which are text there (prompts that "
    "hold the chat template already need data.chat_template=never)",
    "answers_unused": "answers train nothing: the chat template writes them otherwise than after "
    "its own generation prompt, or without their tool calls",
    "answers_weightless": "answers train nothing: the chat gives them the weight 0",
    "answers_empty_reasoning": "answers, {share:.0%} of all, begin with an empty reasoning, which "
    "a target that reasons does not write: data.template_options={{enable_thinking: false}} puts "
    "it into the prompt",
    "prompts_shared": "examples are left out of training and validation, since their prompts are "
    "held out",
    "test_prompts_repeated": "test prompts repeat an earlier one",
}


def reading_notes(counts: Mapping[str, int], left_out: Sequence[str] = ()) -> list[str]:
    """What else became of the rows, in lines for the person who gave them."""
    share = counts["answers_empty_reasoning"] / max(1, counts["completions"])
    notes = ((counts[name], text.format(share=share)) for name, text in NOTES.items())
    return [f"{n:,} {text}" for n, text in notes if n] + [f"left out: {one}" for one in left_out]
