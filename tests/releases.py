"""What `make newest` and `make oldest` install: `python tests/releases.py newest|oldest`.

newest: every package of pyproject.toml without its bounds. oldest: the required ones at their lower
bound, those of tests and notebooks without. torch is at its pin for newest, since its builds are
gigabytes and its bound moves by hand. Standard library only: it runs before anything is installed.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AT_PINS = ("torch",)


def requirements(which: str, project: dict, pins: str) -> list[str]:
    """Words for `pip install`; `project` is the table of pyproject.toml, `pins` constraints.txt."""
    needed, extras = project["dependencies"], project["optional-dependencies"]
    tools = [_name(one) for extra in ("dev", "notebooks") for one in extras[extra]]
    if which == "oldest":
        return [_lowest(one) for one in needed] + tools
    pinned = {_name(line): line for line in pins.splitlines() if _name(line) in AT_PINS}
    return [pinned.get(_name(one), _name(one)) for one in needed] + tools


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _lowest(requirement: str) -> str:
    """`name>=1.2,<2` as `name==1.2`."""
    bound = re.search(r">=([\w.]+)", requirement)
    assert bound, requirement
    return f"{_name(requirement)}=={bound[1]}"


if __name__ == "__main__":
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(*requirements(sys.argv[1], table, (ROOT / "constraints.txt").read_text("utf-8")))
