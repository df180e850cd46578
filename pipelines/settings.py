"""`python -m pipelines.settings [PART]`: what each setting means, its default and its bounds."""

import json
import sys
from dataclasses import MISSING
from inspect import getdoc
from textwrap import fill

from draftkit.config import known_settings, limits, sections

HEAD = """\
# Settings

`draftkit settings PART` prints those with PART in their name. Defaults are
those of no experiment: `draftkit COMMAND ... --cfg job` prints what a command
runs with. `python -m pipelines.settings > docs/settings.md` writes this page.
"""


def item(text: str, indent: str = "") -> str:
    """An item of a list, in 80 columns."""
    return fill(f"{indent}- {text}", 80, subsequent_indent=f"{indent}  ", break_on_hyphens=False)


def page(part: str = "") -> str:
    """The settings with `part` in their name, by section, in 80 columns.

    Below a setting stand its choices, where each means something.
    """
    lines = [] if part else [HEAD]
    for section in sections():
        own = [
            (key, one)
            for key, one in known_settings().items()
            if part in key and key.rpartition(".")[0] == section.key
        ]
        if own:
            about = fill(" ".join(str(getdoc(section)).split()), 80)
            lines += [f"## {section.key or 'The experiment'}", "", about, ""]
        for key, one in own:
            default = one.default if one.default_factory is MISSING else one.default_factory()
            rule = one.metadata["rule"]
            named = rule.names if isinstance(rule.names, dict) else {}
            typed = f"`{key}={default if isinstance(default, str) else json.dumps(default)}`"
            bounds = "" if named else f", {limits(one)}"
            lines.append(item(f"{typed}{bounds}: {rule.says}"))
            lines += [item(f"`{name}`: {text}", "  ") for name, text in named.items()]
        lines += [""] if own else []
    return "\n".join(lines)


if __name__ == "__main__":
    part = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if not (text := page(part)):
        print(f"settings: no setting has {part} in its name", file=sys.stderr)
        raise SystemExit(2)
    print(text.rstrip())
