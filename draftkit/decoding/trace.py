"""One generation shown round by round: what was proposed, accepted, rejected, corrected.

After Figure 1 of Leviathan et al. 2211.17192: a line a round, accepted proposals in green, the
rejected one in red and struck through, the target's own token in blue. Every kind also has a mark
or a decoration of its own, so that colours may be missing. Knows no models; text comes from
`decode`, any function from ids to text.
"""

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import groupby
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftkit.decoding.generation import Completion, TraceRound
from draftkit.decoding.streaming import REPLACEMENT, Decode, TextStream


class Part(NamedTuple):
    """Tokens that are shown together: one, or those that share a character."""

    kind: str  # a key of KINDS
    ids: list[int]
    text: str


class Look(NamedTuple):
    """How a kind of token is shown."""

    marks: tuple[str, str]
    style: str


KINDS = {
    "accepted": Look(("", ""), "green"),
    "rejected": Look(("[-", "-]"), "red strike"),
    "correction": Look(("{+", "+}"), "bold bright_blue"),
    "bonus": Look(("{+", "+}"), "bold bright_blue"),
    "unused": Look(("(~", "~)"), "dim"),
}
LEGEND = {
    "accepted": "accepted",
    "rejected": "rejected",
    "correction": "the target's own token",
    "unused": "not used",
}
ENTERED = ("accepted", "correction")  # what enters an answer; a bonus is shown as a correction


def parts(step: TraceRound, context: list[int], decode: Decode) -> list[Part]:
    """What to show of a round after the ids of `context`, in the order to show it.

    `unused`: proposals behind the first rejected one, and what an end of text or the length limit
    cut off.
    """
    accepted, rest = step.proposed[: step.accepted], step.proposed[step.accepted :]
    before = context + accepted
    runs = [
        ("accepted", context, accepted[: step.committed]),
        ("unused", context + accepted[: step.committed], accepted[step.committed :]),
    ]
    if step.next_token is None:
        runs.append(("unused", before, rest))
    else:
        own = step.kinds[-1] if step.committed > step.accepted else "unused"
        runs += [
            ("rejected", before, rest[:1]),
            (own, before, [step.next_token]),
            ("unused", before + rest[:1], rest[1:]),
        ]
    return [
        Part(kind, ids, text)
        for kind, behind, run in runs
        for ids, text in pieces(behind, run, decode)
    ]


def pieces(before: list[int], ids: list[int], decode: Decode) -> Iterator[tuple[list[int], str]]:
    """Cut the text of `ids` behind `before` into tokens; those that share a character stay one.

    What has no text, as an end of text, is shown by its ids.
    """
    stream = TextStream(decode, context=before)
    together: list[int] = []
    for count, token_id in enumerate(ids, start=1):
        together.append(token_id)
        last = count == len(ids)
        text = stream.push([token_id]) + (stream.flush() if last else "")
        if text or last:
            yield together, text or "".join(f"⟨{hidden}⟩" for hidden in together)
            together = []


def answer(trace: Completion, decode: Decode) -> Iterator[Part]:
    """The whole answer; tokens that share a character are shown as the last of them."""
    ids = [token for step in trace.steps for token in step.emitted[: step.committed]]
    kinds = [kind for step in trace.steps for kind in step.kinds[: step.committed]]
    end = 0
    for together, text in pieces(trace.prompt_ids, ids, decode):
        end += len(together)
        yield Part(kinds[end - 1], together, text)


PROMPT = "prompt  "
LINE = "↵"
JOINER = "\u200d"  # of emoji
HIDDEN = (*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
SIGNS = {
    **{code: chr(0x2400 + code) for code in range(0x20)},
    **dict.fromkeys(HIDDEN, REPLACEMENT),
    **dict.fromkeys([0x0A, 0x85, 0x2028, 0x2029], LINE),
    0x09: "⇥",
    0x7F: "\u2421",
}


def visible(text: str) -> str:
    """`text` on one line, with signs for line ends, tabs, controls and changes of direction."""
    return text.translate(SIGNS)


def readable(text: str) -> str:
    """`text` with its line ends, and signs for all else that `visible` shows as signs."""
    return "\n".join(map(visible, text.split("\n")))


def steps(trace: Completion, decode: Decode) -> Iterator[tuple[TraceRound, list[Part]]]:
    """Every round with its parts."""
    text = list(trace.prompt_ids)
    for step in trace.steps:
        yield step, parts(step, text, decode)
        text += step.emitted[: step.committed]


def figures(trace: Completion) -> dict[str, str]:
    """The counts of a generation, each under what it counts."""
    steps = trace.steps
    emitted, accepted = sum(len(step.emitted) for step in steps), sum(s.accepted for s in steps)
    return {
        "tokens": f"{sum(step.committed for step in steps)}",
        "target passes": f"{len(steps)}",
        "acceptance length": f"{emitted / max(1, len(steps)):.2f}",
        "accepted": f"{accepted} of {sum(len(step.proposed) for step in steps)}",
    }


def marked(shown: Sequence[Part]) -> Text:
    """Join parts to one text; neighbours of one kind share their marks."""
    text = Text()
    for kind, group in groupby(shown, key=lambda part: part.kind):
        look = KINDS[kind]
        body = visible("".join(part.text for part in group))
        # What joins the sign before it must not join a mark.
        base = "◌" if body and cell_len(body[0]) == 0 else ""
        text.append(look.marks[0], "dim").append(base + body.removeprefix(JOINER), look.style)
        text.append(look.marks[1], "dim")
    return text


def rounds(trace: Completion, decode: Decode, *, width: int) -> Group:
    """Counts, legend, prompt and every round of a generation, in lines of at most `width` cells."""
    legend = [Part(kind, [], text) for kind, text in LEGEND.items()]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for number, (step, shown) in enumerate(steps(trace, decode), start=1):
        table.add_row(str(number), f"{step.accepted}/{len(step.proposed)}", marked(shown))
    prompt, cut = visible(decode(trace.prompt_ids[-width:])), len(trace.prompt_ids) > width
    while cell_len(PROMPT + prompt) + cut > width and prompt:
        prompt, cut = prompt[1:], True
    head = ", ".join(f"{label} {value}" for label, value in figures(trace).items())
    key = Text("  ").join(marked([part]) for part in legend)
    return Group(Text(head), key, Text(PROMPT + "…" * cut + prompt, style="dim"), table)


def answers(traces: Sequence[Completion], decode: Decode, *, width: int, marks: bool) -> Group:
    """Prompts and answers as they read; `marks` tell whose token is whose, else styles alone."""

    def part(kind: str, text: str) -> Text:
        look = KINDS[kind]
        return Text(text.join(look.marks) if marks else text, look.style)

    legend = [Text("prompt", "dim"), *(part(kind, LEGEND[kind]) for kind in ENTERED)]
    blocks = [Text("  ").join(legend)]
    for trace in traces:
        text = Text().append(readable(decode(trace.prompt_ids)), "dim")
        for _, same in groupby(answer(trace, decode), key=lambda part: KINDS[part.kind]):
            shown = list(same)
            text.append(part(shown[0].kind, readable("".join(one.text for one in shown))))
        blocks += [Text(width * "─", style="dim"), text]
    return Group(*blocks)


def as_text(block: RenderableType, *, width: int, colour: bool) -> str:
    """`block` in lines of at most `width` cells, with ANSI colours if `colour`."""
    system = "standard" if colour else None
    console = Console(width=width, color_system=system, no_color=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(block, overflow="fold")
    return "".join(f"{line.rstrip()}\n" for line in capture.get().split("\n")[:-1])


def as_page(blocks: Iterable[RenderableType], *, width: int) -> str:
    """`blocks` below each other on a page of HTML that needs nothing else."""
    console = Console(width=width, record=True, file=StringIO(), legacy_windows=False)
    for block in blocks:
        console.print(block, "", overflow="fold")
    return console.export_html(inline_styles=True)
