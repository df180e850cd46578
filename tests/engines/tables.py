"""What people see of engines: the table that ends a measurement, and the page of all of them.

Renders measurements of `study`; computes nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from draftkit.evaluation.report import interval

Summary = Mapping[str, Any]
SMALLEST = 1e-12  # p value: below it the tail of a distribution is rounding
HEAD = ("drafts", "T", "predicted", "counted", "p", "speed-up")


def engine_title(summary: Summary) -> str:
    """`vLLM 0.32.0, plugin vllm_expand`."""
    plugin = f", plugin {summary['plugin']}" if summary["plugin"] else ""
    return f"{summary['title']} {summary['version']}{plugin}"


def speedup_of(row: Summary) -> str:
    """`0.78 (0.75 to 0.80)`: the median of the turns, the least and the most."""
    if row["speed"] is None:
        return "-"
    ratio = row["speed"]["speedup"]
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"


def p_value(row: Summary) -> str:
    p = row["p_holm"]
    if p >= 0.01:
        return f"{p:.2f}"
    return f"{p:.0e}" if p > SMALLEST else f"< {SMALLEST:.0e}"


def words(row: Summary) -> list[str]:
    """A row of either table."""
    lengths = [interval(row[side], 2) for side in ("predicted", "counted")]
    return [row["drafts"], f"{row['temperature']:g}", *lengths, p_value(row), speedup_of(row)]


def positions(shares: Sequence[float] | None) -> str:
    return "not counted" if shares is None else " ".join(f"{share:.2f}" for share in shares)


def position_line(row: Summary) -> str:
    """What was accepted at least so far, by position."""
    both = (positions(row[f"{side}_by_position"]) for side in ("predicted", "counted"))
    return "accepted at each position: predicted {}, counted {}".format(*both)


def greedy_line(row: Summary) -> str:
    """How many greedy answers are what they have to be."""
    compared, plain = row["compared"], row["same_as_plain"]
    beside = "" if plain is None else f"its own without the drafter in {plain} of {compared}, "
    ours = f"our decoder's in {row['same_as_ours']} of {compared}"
    return f"greedy answers with {row['drafts']} drafts equal {beside}{ours}"


def measured_table(summary: Summary) -> Table:
    """Predicted beside counted, in at most 80 columns."""
    title = (
        f"{engine_title(summary)}: tokens a pass, gamma {summary['gamma']}, "
        f"{summary['prompts']} prompts, 95 % intervals"
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in HEAD:
        table.add_column(name, justify="left" if name == "drafts" else "right", no_wrap=True)
    for one in summary["cells"]:
        table.add_row(*words(one))
    return table


def measured_lines(summary: Summary) -> list[str]:
    """What stands below the table."""
    lines = [greedy_line(one) for one in summary["greedy"]]
    lines += [
        f"{c['drafts']}, T {c['temperature']:g}: {position_line(c)}" for c in summary["cells"]
    ]
    wrong = [c for c in summary["cells"] if not c["agrees"]]
    names = ", ".join(f"{c['drafts']} at T {c['temperature']:g}" for c in wrong)
    lines.append(
        f"DIFFERS from what was predicted: {names}" if wrong else "counted is what was predicted"
    )
    return lines


ABOUT = """\
# Engines: predicted and counted

What each engine counts of its own while it drafts, beside what draftkit's decoder predicts of it
for the same pair, prompts and gamma. Tokens a pass of the target are 1 + accepted / passes, with
95 % intervals over prompts; p is that of no difference, paired by prompt, two-sided, after Holm's
correction over the rows of an engine. Speed-up is tokens a second with the drafter over those
without it, from request to last token, one request at a time: the median of the turns, the least
and the most. Such small models show what an engine spends beside them; of larger ones it says
nothing.

    make engines
    python -m pipelines.distill +experiment=quickstart draft.kind=plain decode.gamma=1 name=plain
    python -m tests.engines.study outputs/engines draftkit/embedded \\
        outputs/plain/train/draft --name embedded

measures those that are installed; `python -m tests.engines.pairs FOLDER` makes the pairs `llama`
and `qwen3` (four layers and one, heads of 32 and of 64, briefly trained). Each writes this page
from the files beside it.
"""


def page(groups: Mapping[str, Sequence[tuple[Summary, str]]]) -> str:
    """The page of all engines: by pair, the summaries, each with a note or an empty one."""
    parts = [ABOUT]
    for pair, measured in groups.items():
        first = measured[0][0]
        parts.append(
            f"\n## {pair}\n\n{first['prompts']} prompts, {first['max_new_tokens']} tokens an "
            f"answer, gamma {first['gamma']}, {first['dtype']}, {first['turns']} turns; "
            f"{first['machine']}, {threads_of(first)}.\n\n"
            "| engine | drafts | T | predicted | counted | p | speed-up |\n"
            "|---|---|---|---|---|---|---|\n"
        )
        for summary, _ in measured:
            for number, one in enumerate(summary["cells"]):
                name = engine_title(summary) if number == 0 else ""
                parts.append("| " + " | ".join([name, *words(one)]) + " |\n")
        parts.append("\n")
        for summary, note in measured:
            parts += [f"- {engine_title(summary)}: {greedy_line(g)}.\n" for g in summary["greedy"]]
            for one in summary["cells"]:
                if not one["agrees"]:
                    where = f"{one['drafts']} drafts at T {one['temperature']:g}"
                    parts.append(f"- {engine_title(summary)}, {where}: {position_line(one)}.\n")
            if note:
                parts.append(f"- {engine_title(summary)}: {note}\n")
    return "".join(parts)


def threads_of(summary: Summary) -> str:
    threads = summary["threads"]
    return (
        "threads as each engine chooses"
        if threads is None
        else f"{threads} thread" + "s" * (threads != 1)
    )
