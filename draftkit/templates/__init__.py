"""The one renderer of documents: values in, text out, by the templates in this folder.

The wording is theirs; what to say is decided where the values come from. `.html` and `.markdown`
escape all that they show, since somebody else may have written it; `.md` holds commands, which
`shell` and `json` quote. A table is that of the terminal.
"""

import html
import json
import re
import shlex
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table


def interval(estimate: dict[str, Any], digits: int = 3, sign: str = "-") -> str:
    """`0.812 [0.801, 0.823]`, or the mean alone where there is no interval."""
    numbers = [estimate["mean"], *(estimate["ci95"] or [])]
    mean, *ends = (f"{number:{sign}.{digits}f}" for number in numbers)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def signed(gain: dict[str, Any]) -> str:
    """`+0.112 [+0.101, +0.123]`, or the mean alone where there is no interval."""
    return interval(gain, sign="+")


def counted(number: int, name: str) -> str:
    """`1 proposal`, `2 proposals`."""
    return f"{number:,} {name}{'s' * (number != 1)}"


def rows(table: Table) -> list[tuple[str, ...]]:
    """The cells of a terminal's table, by row."""
    return [*zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)]


def line(text: object) -> Markup:
    """Text on one line, in which nothing is markup; quotes stay as they are."""
    words = text.unescape() if isinstance(text, Markup) else str(text)
    return Markup(" ".join(html.escape(words, quote=False).split()))


def blocks(text: str) -> str:
    """Parts of a Markdown document, one empty line between them."""
    return re.sub(r"\n{3,}", "\n\n", text.strip())


ENVIRONMENT = Environment(
    loader=PackageLoader("draftkit"),
    autoescape=lambda name: name is not None and name.endswith((".html", ".markdown")),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {"interval": interval, "signed": signed, "number": format, "rows": rows}
ENVIRONMENT.filters |= {"line": line, "blocks": blocks, "shell": shlex.quote, "json": json.dumps}
ENVIRONMENT.filters["counted"] = counted


def render(name: str, /, **values: Any) -> str:
    """The document that the template `name` makes of `values`; each of them must be given."""
    return ENVIRONMENT.get_template(name).render(values)
