"""A hook of mkdocs: pages of the site that lie outside docs/, or are made when it is built."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import draftkit
from pipelines.settings import page

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
CARD = "draftkit/embedded/README.md"
PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}
PAGES |= {CARD: "embedded.md"}
# Where links from README to a folder lead.
FOLDERS = {"docs/examples": "examples.md", "notebooks": "examples.md#notebooks"}
LINK = re.compile(r'(?<=\]\()[^)\s]+(?=\))|(?<=src=")[^"]+|(?<=srcset=")[^"]+')
NOTEBOOKS = (
    "\n## Notebooks\n\nIn the folder `notebooks` of the repository, with their figures: {names}.\n"
)


def moved(text: str) -> str:
    """`text` with the links of a page at the root, or of one in docs/, as the site has them."""

    def link(match: re.Match[str]) -> str:
        target = match[0].removeprefix("../")
        return (PAGES | FOLDERS).get(target, target.removeprefix("docs/"))

    return LINK.sub(link, text)


def examples() -> str:
    """The scripts of docs/examples, each whole."""
    parts = ["# Scripts to copy\n"]
    for file in sorted(EXAMPLES.glob("*.sh")):
        parts.append(f"## {file.name}\n\n```sh\n{file.read_text(encoding='utf-8')}```\n")
    names = ", ".join(f"`{one.name}`" for one in sorted((ROOT / "notebooks").glob("*.ipynb")))
    return "\n".join([*parts, NOTEBOOKS.format(names=names)])


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root, the scripts, the settings as they are, and the public names."""
    made = {new: moved((ROOT / old).read_text(encoding="utf-8")) for old, new in PAGES.items()}
    names = "\n\n".join(f"::: draftkit.api.{name}" for name in draftkit.__all__)
    made["api.md"] = f"# Public names\n\nEach is `draftkit.NAME`.\n\n{names}\n"
    made |= {"examples.md": examples(), "settings.md": page()}
    for name, content in made.items():
        if (old := files.get_file_from_path(name)) is not None:
            files.remove(old)
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to the embedded target's card leads to its page."""
    return markdown.replace(f"../{CARD}", PAGES[CARD])
