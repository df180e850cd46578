"""`python docs/pictures/draw.py RUN/samples.ansi [NUMBER]`: an answer of a run as SVG.

Every run of `evaluate` and `distill` writes its answers with the colours of a terminal. NUMBER
counts them, from 1. The pictures, light and dark, lie beside this file.
"""

import sys
from html import escape
from pathlib import Path

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
RULE = "─" * 80  # between answers
WIDTH, LINES = 84, 20  # characters of a line, and lines that are shown
HIGH, WIDE = 20, 8.5  # of a line and a character, in pixels
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
# Background, prompt, accepted, the target's own; of contrast 4.5 to 1 at least.
THEMES = {
    "light": ("#ffffff", "#57606a", "#116329", "#0550ae"),
    "dark": ("#0d1117", "#9198a1", "#7ee787", "#79c0ff"),
}


TITLE = "Token by token: grey the prompt, green accepted proposals, blue the target's own tokens"
KINDS = {2: "accepted", 12: "own"}  # by the number of a terminal's colour


def lines(text: Text) -> list[list[tuple[str, str]]]:
    """The lines of `text` as spans: what it is, and what it says."""
    console = Console(width=WIDTH)
    drawn = []
    for line in text.wrap(console, WIDTH)[:LINES]:
        spans = []
        for segment in line.render(console):
            colour = segment.style.color if segment.style else None
            kind = KINDS.get(colour.number if colour else None, "prompt")
            spans.append((kind, segment.text.rstrip("\n")))
        drawn.append(spans)
    return drawn


def svg(answer: str, theme: str) -> str:
    """One picture of `answer`, text with the codes of a terminal."""
    back, *colours = THEMES[theme]
    rows = lines(Text.from_ansi(answer))
    width, height = round(WIDTH * WIDE + 32), len(rows) * HIGH + 28
    kinds = zip(("prompt", "accepted", "own"), colours, strict=True)
    style = " ".join(f".{kind} {{ fill: {colour} }}" for kind, colour in kinds)
    drawn = "\n".join(
        f'<text x="16" y="{number * HIGH + 10}">'
        + "".join(f'<tspan class="{kind}">{escape(text)}</tspan>' for kind, text in spans)
        + "</text>"
        for number, spans in enumerate(rows, start=1)
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{TITLE}</title>
<style>text {{ font: 14px {FONT}; white-space: pre }} .own {{ font-weight: bold }} {style}</style>
<rect width="{width}" height="{height}" rx="6" fill="{back}"/>
{drawn}
</svg>
"""


def main(file: Path, number: int) -> None:
    """Draw the answer with this number in `file`, below what its colours mean."""
    text = file.read_text()
    rule = next(line for line in text.splitlines() if RULE in line)
    head, *answers = text.split(rule)
    shown = f"{head.strip()}\n\n{answers[number - 1].strip(chr(10))}"
    for theme in THEMES:
        (FOLDER / f"answer-{theme}.svg").write_text(svg(shown, theme))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
