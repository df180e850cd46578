"""The renderer shows all that it is given, says what is missing, and lets no text become markup."""

import pytest
from jinja2 import UndefinedError
from rich.table import Table

from draftkit.evaluation.page import Figure
from draftkit.templates import ENVIRONMENT, blocks, line, render

EVIL = "<b>|`\n</b> & 'q'"


def test_a_value_that_is_missing_is_named() -> None:
    with pytest.raises(UndefinedError, match="'rows' is undefined"):
        render("table.md")


def parts(form: str) -> str:
    """A section of a table, a figure and a sentence, in the page of a comparison or its like."""
    table = Table("name", title="all", caption=EVIL)
    table.add_column("number", justify="right")
    table.add_row(EVIL, "0.44 [0.43, 0.46]")
    text = (
        "{% extends 'page.' ~ form %}{% import 'parts.' ~ form as show %}"
        "{% block title %}{{ words }}{% endblock %}{% block sentence %}Yes.{% endblock %}"
        "{% block answers %}{{ show.answer('How?', '1.2', '[1, 2]', words) }}{% endblock %}"
        "{% block sections %}{% call show.section('Open') %}{{ show.table(table) }}"
        "{{ show.figure(figure) }}{% call show.text() %}It is {{ words }}{% endcall %}{% endcall %}"
        "{% call show.section('Shut', folded=true) %}{{ show.table(table) }}{% endcall %}"
        "{% endblock %}"
    )
    environment = ENVIRONMENT.overlay(autoescape=True)
    figure = Figure(lambda axes: None, EVIL)
    values = {"verdict": EVIL, "tone": "good", "words": EVIL, "table": table, "figure": figure}
    return environment.from_string(text).render(form=form, **values)


@pytest.mark.parametrize(("number", "words"), [(1, "1 way"), (0, "0 ways"), (1200, "1,200 ways")])
def test_one_of_a_kind_is_no_plural(number: int, words: str) -> None:
    assert ENVIRONMENT.from_string("{{ n | counted('way') }}").render(n=number) == words


def test_markdown_has_one_line_for_each_part_and_nothing_that_is_drawn_or_folded() -> None:
    safe = "&lt;b&gt;|` &lt;/b&gt; &amp; 'q'"
    assert parts("markdown").split("\n\n") == [
        f"# {safe}",
        f"**{safe}.** Yes.",
        f"**How? 1.2** [1, 2], {safe}",
        "## Open",
        "all",
        safe,
        f"| name | number |\n| --- | ---: |\n| {safe.replace('|', '&#124;')} | 0.44 [0.43, 0.46] |",
        f"It is {safe}\n",
    ]


def test_html_has_all_parts_and_no_tag_of_what_is_shown() -> None:
    page = parts("html")
    assert "<b>" not in page
    assert page.count("<table>") == page.count("<details>") + 1 == 2
    assert page.count("<svg ") == 1
    assert 'aria-label="&lt;b&gt;' in page


def test_lines_and_blocks_are_parted_by_what_they_are() -> None:
    assert line("a\n  <b> 'c'") == "a &lt;b&gt; 'c'"
    assert line(line("<b>")) == "&lt;b&gt;"
    assert blocks("\n\na\n\n\n\nb\nc\n") == "a\n\nb\nc"
