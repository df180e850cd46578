"""A page shows what it is given, whoever wrote it, and needs nothing from outside."""

import html
import re

from rich.table import Table

from draftkit.evaluation.page import (
    AFTER,
    COLOURS,
    Answer,
    Figure,
    Page,
    Section,
    as_html,
    as_markdown,
    without_traces,
)

EVIL = '<script src="https://example.com">|`\n</script>'
LOADS = re.compile(r"<script|<link|<img|<iframe|@import|url\((?!#)|https?:|\bsrc=|href=\"(?!#)")


def drawn(words="a line"):
    def draw(axes):
        axes.plot([0, 1], [0, 1], color=AFTER, marker="o", label="measured")
        axes.set(xlabel="x", ylabel="y")
        axes.legend()

    return Figure(draw, words)


def page(text="plain words", *, folded=False):
    table = Table("name", title=text, caption=text)
    table.add_column("number", justify="right")
    table.add_row(text, "0.44 [0.43, 0.46]")
    parts = [["accepted", text], ["rejected", text], ["bonus", text], ["unused", text]]
    trace = {"prompt": text, "counts": text, "rounds": [{"accepted": 1, "proposed": 2}]}
    trace["rounds"][0]["parts"] = parts
    answer = Answer("How fast?", "1.24", "[1.16, 1.31]", text)
    section = Section("Numbers", [text, table, drawn(text), trace], folded)
    return Page(text, "DEPLOY", "good", text, [answer], [section])


def bare(text):
    return html.unescape(re.sub("<[^>]*>", " ", text))


def test_a_page_shows_each_of_its_parts():
    text = as_html(page())
    for part in ("DEPLOY", "How fast?", "1.24", "[1.16, 1.31]", "Numbers", "0.44 [0.43, 0.46]"):
        assert part in bare(text)
    assert "<details>" not in text
    assert "<details>" in as_html(page(folded=True))
    for kind, tag in (("accepted", "span"), ("rejected", "del"), ("bonus", "ins")):
        assert f'<{tag} class="{kind}">plain words</{tag}>' in text


def test_a_page_loads_nothing_and_runs_nothing():
    assert not LOADS.search(as_html(page()))


def test_what_somebody_else_wrote_is_text_and_nothing_more():
    text = as_html(page(EVIL))
    assert not re.search("<script|</script", text)
    written = re.sub(r"\s+", " ", bare(text))
    assert written.count(re.sub(r"\s+", " ", EVIL)) >= 11  # of the title twice, of each part once
    short = as_markdown(page(EVIL))
    assert "<script" not in short
    (row,) = (line for line in short.splitlines() if "0.44" in line)
    assert row.count("|") == 3


def test_a_figure_follows_the_colours_of_the_page_and_its_text_stays_text():
    svg = drawn().svg
    assert "var(--after)" in svg
    assert "currentColor" in svg
    assert not [colour for colour in COLOURS if colour in svg]
    assert re.search("<text[^>]*>measured</text>", svg)


def test_two_figures_share_no_name():
    names = [set(re.findall(r'\bid="([^"]*)"', drawn(words).svg)) for words in ("one", "two")]
    assert names[0]
    assert not names[0] & names[1]
    assert drawn("one").svg == drawn("one").svg


def test_markdown_has_the_same_numbers_without_what_is_folded():
    text = as_markdown(page())
    assert text.startswith("# plain words\n\n**DEPLOY.** plain words\n")
    assert "**How fast? 1.24** [1.16, 1.31]" in text
    assert "| name | number |\n| --- | ---: |\n| plain words | 0.44 [0.43, 0.46] |" in text
    assert "Numbers" not in as_markdown(page(folded=True))


def test_what_leaves_the_machine_has_no_text_of_a_prompt():
    whole = page()
    numbers = Section("Only numbers", ["one"])
    shown = without_traces(whole._replace(sections=[*whole.sections, numbers]))
    assert shown.sections == [numbers]
    assert shown.answers == whole.answers
