"""A page that needs nothing else: one file of HTML, and the same as Markdown.

Its text is escaped, its tables are those of the terminal, its figures are drawings in the page,
whose colours follow the reader's light or dark.
"""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, Template
from rich.table import Table

from draftkit.artifacts import write_text

REPORT, SHORT = "report.html", "report.md"
# Colours in which figures are drawn, and what the page makes of each.
INK, MUTED, BEFORE, AFTER = "#010101", "#020202", "#030303", "#040404"
COLOURS = {INK: "currentColor", MUTED: "var(--muted)"}
COLOURS |= {BEFORE: "var(--before)", AFTER: "var(--after)"}
STYLE = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "svg.fonttype": "none",  # text stays text
}
FONT = re.compile(r"'DejaVu Sans'[^;\"]*")
NAMED = re.compile(r'(?<=<g) id="[^"]*"')  # groups have the same names in every figure


class Answer(NamedTuple):
    """A question of the reader, the number that answers it, its interval, and what it is."""

    question: str
    number: str
    interval: str
    words: str


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


Part = str | Table | Figure | Mapping[str, Any]  # a paragraph; a trace as JSON holds it


class Section(NamedTuple):
    """What stands below a heading; `folded` opens at a click."""

    title: str
    parts: Sequence[Part]
    folded: bool = False


class Page(NamedTuple):
    """A title, the verdict in a word with its sentence, answers in large, and sections.

    tone: `good`, `bad` or `open`, by which the verdict is coloured.
    """

    title: str
    verdict: str
    tone: str
    sentence: str
    answers: Sequence[Answer]
    sections: Sequence[Section]


def write_page(folder: Path, page: Page) -> None:
    """Leave the page in `folder`, in both forms."""
    write_text(folder / REPORT, as_html(page))
    write_text(folder / SHORT, as_markdown(page))


def without_traces(page: Page) -> Page:
    """The page as it may leave the machine: traces hold the texts of prompts."""
    shown = [one for one in page.sections if not any(isinstance(part, dict) for part in one.parts)]
    return page._replace(sections=shown)


def as_html(page: Page) -> str:
    """The page as one file of HTML."""
    text = files("draftkit.evaluation").joinpath("page.html").read_text(encoding="utf-8")
    template = Template(text, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return template.render(page._asdict(), rows=rows)


def as_markdown(page: Page) -> str:
    """The same without drawings, traces and what is folded."""
    blocks = [f"# {_line(page.title)}", f"**{page.verdict}.** {_line(page.sentence)}"]
    for one in page.answers:
        blocks.append(f"**{one.question} {one.number}** {one.interval}, {_line(one.words)}")
    for section in page.sections:
        parts = [part for part in section.parts if isinstance(part, str | Table)]
        if parts and not section.folded:
            blocks.append(f"## {section.title}")
            blocks += [_line(part) if isinstance(part, str) else _table(part) for part in parts]
    return "\n\n".join(blocks) + "\n"


def _line(text: str) -> str:
    return " ".join(html.escape(text, quote=False).split())


def _table(table: Table) -> str:
    head = tuple(str(column.header) for column in table.columns)
    sides = tuple("---:" if column.justify == "right" else "---" for column in table.columns)
    lines = [
        f"| {' | '.join(_line(cell).replace('|', '&#124;') for cell in row)} |"
        for row in (head, sides, *rows(table))
    ]
    notes = [_line(str(note)) for note in (table.title, table.caption) if note]
    return "\n\n".join([*notes, "\n".join(lines)])


def rows(table: Table) -> list[tuple[str, ...]]:
    """The cells of a terminal's table, by row."""
    return [*zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)]
