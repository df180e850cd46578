"""What somebody reads who decides about a drafter: the page of an evaluation, or of a training.

One file of HTML that needs nothing else, and the same in short as Markdown. Its words are those of
`templates/report.html`; here is what they say of a summary: tables, figures, and the remedy that
follows from the numbers.
"""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from draftkit.artifacts import write_text
from draftkit.config import SamplingConfig, flatten
from draftkit.evaluation import report
from draftkit.evaluation.alpha import ENTROPIES, UNSURE
from draftkit.evaluation.choice import HYBRID
from draftkit.evaluation.intervals import LEAST_UNITS
from draftkit.templates import interval, render

REPORT, SHORT = "report.html", "report.md"
TONES = {"deploy": "good", "do_not_deploy": "bad", "inconclusive": "open"}
WORTHWHILE = 1.02  # times faster: less is no reason for another number of proposals
LOST = {
    "entropy": "the target's entropy, nats",
    "position": "token of the answer",
    "category": "category of the prompt",
}
# Colours in which figures are drawn, and what the page makes of each: they follow the reader's
# light or dark.
INK, MUTED, BEFORE, AFTER = "#010101", "#020202", "#030303", "#040404"
COLOURS = {INK: "currentColor", MUTED: "var(--muted)"}
COLOURS |= {BEFORE: "var(--before)", AFTER: "var(--after)"}
DRAWN = {"before": BEFORE, "after": AFTER, "draft": AFTER}
STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "svg.fonttype": "none",  # text stays text
}
FONT = re.compile(r"'DejaVu Sans'[^;\"]*")
NAMED = re.compile(r'(?<=<g) id="[^"]*"')  # groups have the same names in every figure


@dataclass
class Figure:
    """What `draw` draws on one pair of axes, in the colours above; `words` say what it shows."""

    draw: Callable[[Any], None]
    words: str

    @cached_property
    def svg(self) -> str:
        """The drawing, which is made where somebody looks at it."""
        import matplotlib
        from matplotlib.figure import Figure as Canvas

        file = io.StringIO()
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": self.words}):
            canvas = Canvas(figsize=(4.6, 3.0), layout="constrained")
            self.draw(canvas.subplots())
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            canvas.savefig(file, format="svg", metadata=nothing)
        svg = "<svg " + file.getvalue().partition("<svg ")[2]
        svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", NAMED.sub("", FONT.sub("sans-serif", svg)))
        for colour, css in COLOURS.items():
            svg = svg.replace(colour, css)
        named = f'<svg role="img" aria-label="{html.escape(self.words)}" '
        return svg.replace("<svg ", named, 1)


def decision_page(
    judged: dict[str, Any],
    *,
    name: str,
    traces: Sequence[Mapping[str, Any]] = (),
    provenance: Mapping[str, Any] | None = None,
    trained: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the page of an evaluation's summary shows; `name` of the experiment.

    traces: by `trace.as_rows`, with the texts of prompts. trained: the summary of the training.
    """
    use = judged["use"] if judged["use"] in judged["ways"] else "drafter"
    drawn = "speedup_by_k" in judged
    sampling, neutral = judged["sampling"], vars(SamplingConfig())
    changing = (key for key in sampling if key == "temperature" or sampling[key] != neutral[key])
    made_with = Table("what", "value")
    for key, value in flatten(provenance or {}).items():
        made_with.add_row(key, " ".join(value) if isinstance(value, list) else str(value))
    return {
        "name": name,
        "judged": judged,
        "verdict": report.VERDICTS[judged["verdict"]],
        "tone": TONES[judged["verdict"]],
        # `temperature 0.6, top-k 20, top-p 0.95`: what of it changes a distribution.
        "sampling": ", ".join(f"{key.replace('_', '-')} {sampling[key]:g}" for key in changing),
        "sample": report.sample_text(judged["alpha"]),
        "use": report.WAYS.get(use, use),
        "way": judged["ways"][use],
        "chosen_of": len(judged["ways"]) - 1 if use == HYBRID else 1,
        "ways": report.ways_table(judged),
        "figures": [speedup_figure(judged), position_figure(judged)] if drawn else [],
        "numbers": report.numbers_table(judged) if drawn else None,
        **advice(judged),
        "lost": lost_table(judged),
        "worthwhile": WORTHWHILE - 1,
        "unsure": UNSURE,
        "engines": report.engine_table(judged) if "engines" in judged else None,
        "trained": trained,
        "traces": traces,
        "tables": [*map(report.evaluation_table, judged["by_temperature"].values())],
        "provenance": made_with if provenance else None,
    }


def as_html(page: Mapping[str, Any]) -> str:
    """The page as one file of HTML."""
    return render("report.html", form="html", **page)


def as_markdown(page: Mapping[str, Any]) -> str:
    """The same without figures, traces and what is folded."""
    return render("report.html", form="markdown", **page)


def write_page(folder: Path, page: Mapping[str, Any]) -> None:
    """Leave the page in `folder`, in both forms."""
    write_text(folder / REPORT, as_html(page))
    write_text(folder / SHORT, as_markdown(page))


def advice(judged: Mapping[str, Any]) -> dict[str, Any]:
    """What would raise the speed-up or alpha, the cheapest remedy first, as the page explains.

    remedy: `fewer` proposals, a `colder` target, `more` data or a `bigger` drafter; `unknown` of
    few documents. part, lost_by: where acceptance is lost that the second and the third mend.
    """
    alpha, factors = judged["alpha"], judged["speedup"]["predicted_by_gamma"]
    best, used = judged["best_gamma"], judged["gamma"]
    if alpha["ci95"] is None:
        return {"remedy": "unknown"}
    if best < used < len(factors) and factors[best] >= WORTHWHILE * factors[used]:
        return {"remedy": "fewer"}
    unsure = [name for start, name in ENTROPIES.items() if start >= UNSURE]
    for by, remedy in (("entropy", "colder"), ("category", "more"), ("position", "more")):
        for row in judged["lost"].get(by, ()):
            known = by != "entropy" or (row["part"] in unsure and judged["temperature"] > 0)
            if known and row["alpha"]["ci95"] and row["alpha"]["ci95"][1] < alpha["ci95"][0]:
                return {"remedy": remedy, "part": row, "lost_by": LOST[by]}
    return {"remedy": "bigger"}


def lost_table(judged: Mapping[str, Any]) -> Table:
    """Every part: its share of the tokens, alpha there, and its share of 1 - alpha."""
    lost = 1 - judged["alpha"]["mean"]
    few = f"No interval where fewer than {LEAST_UNITS} documents have tokens in a part."
    title = f"1 - alpha = {lost:.3f}, in parts that sum to it"
    numbers = (Column(name, justify="right") for name in ("tokens", "alpha there", "lost there"))
    table = Table("by", "part", *numbers, title=title, caption=few)
    for by, parts in judged["lost"].items():
        for number, row in enumerate(parts):
            cells = f"{row['tokens']:.0%}", interval(row["alpha"]), interval(row["lost"])
            table.add_row("" if number else LOST[by], row["part"], *cells)
    return table


def speedup_figure(judged: dict[str, Any]) -> Figure:
    """Speed-up over the number of proposals: computed, with the band of tau, and measured."""

    def draw(axes: Any) -> None:
        for name, one in report.drafts_in(judged).items():
            factors, taus = one["speedup_by_k"].values(), one["acceptance_length_by_k"].values()
            numbers, colour = range(1, len(factors) + 1), DRAWN[name]
            axes.plot(numbers, factors, color=colour, label=f"{name}, computed")
            ends = [t["ci95"] or 2 * [t["mean"]] for t in taus]
            points = zip(factors, taus, ends, strict=True)
            band = [(f * low / t["mean"], f * high / t["mean"]) for f, t, (low, high) in points]
            axes.fill_between(numbers, *zip(*band, strict=True), color=colour, alpha=0.2, lw=0)
            mean = one["speedup"]["measured"]
            low, high = one["speedup"]["ci95"] or (mean, mean)
            style = {"fmt": "o", "capsize": 3, "color": colour, "label": f"{name}, measured"}
            axes.errorbar([one["gamma"]], [mean], [[mean - low], [high - mean]], **style)
        axes.axhline(1, color=MUTED, linewidth=1, linestyle=":")
        axes.set(xlabel="proposals a round", ylabel="speed-up of the rounds")
        axes.legend()

    return Figure(draw, "Speed-up over the number of proposals; band and bars: 95 % intervals.")


def position_figure(judged: dict[str, Any]) -> Figure:
    """How many rounds get so far: computed from the texts, and as decoded."""

    def draw(axes: Any) -> None:
        for name, one in report.drafts_in(judged).items():
            chain = [*accumulate((rate or 0 for rate in one["alpha_given_chain"]), mul)]
            for shares, mark, how in (
                (chain, "-", "computed"),
                (one["acceptance_per_position"], "o", "in decoding"),
            ):
                numbers = range(1, len(shares) + 1)
                axes.plot(numbers, shares, mark, color=DRAWN[name], label=f"{name}, {how}")
        axes.set(xlabel="position in the round", ylabel="accepted up to here", ylim=(0, 1))
        axes.legend()

    return Figure(
        draw,
        "Share of rounds whose proposals are all accepted up to a position. Computed for rounds "
        "that begin at every token; in decoding more of them begin at hard ones.",
    )
