"""One generation shown round by round: what was proposed, accepted, rejected, corrected.

After Figure 1 of Leviathan et al. 2211.17192. `as_rows` is what a page shows of it; `answers` is
how it reads in a terminal, whose colours may be missing. Knows no models; text comes from
`detokenize`, any function from ids to text.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.text import Text

from draftkit.decoding.generation import Completion, TraceRound
from draftkit.decoding.streaming import REPLACEMENT, Detokenize, TextStream


class Part(NamedTuple):
    """Tokens that are shown together: one, or those that share a character.

    fate: accepted, rejected, correction, bonus or unused.
    """

    fate: str
    ids: list[int]
    text: str


# How a token that enters an answer is shown, by its fate: by marks around it, or by a style.
SHOWN = {"accepted": (("", ""), "green"), "correction": (("{+", "+}"), "bold bright_blue")}
SHOWN["bonus"] = SHOWN["correction"]


def parts(step: TraceRound, context: list[int], detokenize: Detokenize) -> list[Part]:
    """What to show of a round after the ids of `context`, in the order to show it.

    `unused`: proposals behind the first rejected one, and what an end of text or the length limit
    cut off.
    """
    accepted, rest = step.proposed[: step.accepted], step.proposed[step.accepted :]
    before, kept = context + accepted, accepted[: step.committed]
    runs = [("accepted", context, kept), ("unused", context + kept, accepted[step.committed :])]
    if step.next_token is None:
        runs.append(("unused", before, rest))
    else:
        own = step.fates[-1] if step.committed > step.accepted else "unused"
        runs += [("rejected", before, rest[:1]), (own, before, [step.next_token])]
        runs.append(("unused", before + rest[:1], rest[1:]))
    return [
        Part(fate, ids, text)
        for fate, behind, run in runs
        for ids, text in pieces(behind, run, detokenize)
    ]


def pieces(
    before: list[int], ids: list[int], detokenize: Detokenize
) -> Iterator[tuple[list[int], str]]:
    """Cut the text of `ids` behind `before` into tokens; those that share a character stay one.

    What has no text, as an end of text, is shown by its ids.
    """
    stream = TextStream(detokenize, context=before)
    together: list[int] = []
    for count, token_id in enumerate(ids, start=1):
        together.append(token_id)
        last = count == len(ids)
        text = stream.push([token_id]) + (stream.flush() if last else "")
        if text or last:
            yield together, text or "".join(f"⟨{hidden}⟩" for hidden in together)
            together = []


def answer(trace: Completion, detokenize: Detokenize) -> Iterator[Part]:
    """The whole answer; tokens that share a character are shown as the last of them."""
    ids = [token for step in trace.steps for token in step.emitted[: step.committed]]
    fates = [fate for step in trace.steps for fate in step.fates[: step.committed]]
    end = 0
    for together, text in pieces(trace.prompt_ids, ids, detokenize):
        end += len(together)
        yield Part(fates[end - 1], together, text)


PROMPT_IDS = 80  # of a prompt that are shown
HIDDEN = (*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
SIGNS = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    **dict.fromkeys(HIDDEN, REPLACEMENT),
    **dict.fromkeys([0x0A, 0x85, 0x2028, 0x2029], "↵"),
    0x09: "⇥",
    0x7F: "\u2421",
}


def visible(text: str) -> str:
    """`text` on one line, with signs for line ends, tabs, controls and changes of direction."""
    return text.translate(SIGNS)


def readable(text: str) -> str:
    """`text` with its line ends, and signs for all else that `visible` shows as signs."""
    return "\n".join(map(visible, text.split("\n")))


def as_rows(trace: Completion, detokenize: Detokenize) -> dict[str, Any]:
    """A generation as JSON holds it: counts, the end of its prompt, every round by its parts.

    Texts are on one line, as `visible` shows them.
    """
    tokens = sum(step.committed for step in trace.steps)
    accepted = sum(step.accepted for step in trace.steps)
    proposed = sum(len(step.proposed) for step in trace.steps)
    rounds, text = [], list(trace.prompt_ids)
    for step in trace.steps:
        shown = [[part.fate, visible(part.text)] for part in parts(step, text, detokenize)]
        rounds.append({"accepted": step.accepted, "proposed": len(step.proposed), "parts": shown})
        text += step.emitted[: step.committed]
    cut = "…" * (len(trace.prompt_ids) > PROMPT_IDS)
    return {
        "counts": f"{tokens} tokens in {len(rounds)} rounds, {accepted} of {proposed} accepted",
        "prompt": cut + visible(detokenize(trace.prompt_ids[-PROMPT_IDS:])),
        "rounds": rounds,
    }


def answers(
    traces: Sequence[Completion], detokenize: Detokenize, *, width: int, marks: bool
) -> Group:
    """Prompts and answers as they read; `marks` tell whose token is whose, else styles alone."""

    def part(fate: str, text: str) -> Text:
        around, style = SHOWN[fate]
        return Text(text.join(around) if marks else text, style)

    own = part("correction", "the target's own token")
    blocks = [Text("  ").join([Text("prompt", "dim"), part("accepted", "accepted"), own])]
    for trace in traces:
        text = Text().append(readable(detokenize(trace.prompt_ids)), "dim")
        for _, same in groupby(answer(trace, detokenize), key=lambda part: SHOWN[part.fate]):
            shown = list(same)
            text.append(part(shown[0].fate, readable("".join(one.text for one in shown))))
        blocks += [Text(width * "─", style="dim"), text]
    return Group(*blocks)


def as_text(block: RenderableType, *, width: int, colour: bool) -> str:
    """`block` in lines of at most `width` cells, with ANSI colours if `colour`."""
    system = "standard" if colour else None
    console = Console(width=width, color_system=system, no_color=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(block, overflow="fold")
    return "".join(f"{line.rstrip()}\n" for line in capture.get().split("\n")[:-1])
