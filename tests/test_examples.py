"""The scripts that people copy: each runs commands that exist, with settings that compose."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.configuration import CONF_DIR, compose_settings

SCRIPTS = sorted((CONF_DIR.parent / "docs" / "examples").glob("*.sh"))
SHIM = """#!{python}
import json, sys
with open("calls.jsonl", "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_runs_commands_with_settings_that_compose(script: Path, tmp_path: Path) -> None:
    """Python and make write down what they are called with, in place of doing it."""
    (bin_folder := tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "make"):
        (bin_folder / name).write_text(SHIM.format(python=sys.executable))
        (bin_folder / name).chmod(0o755)
    (usage,) = [line for line in script.read_text().splitlines() if line.startswith("#     sh ")]
    given = [word for word in usage.split()[3:] if word.isupper() or word == "FILE.jsonl"]
    subprocess.run(["sh", script, *given, "seed=7"], cwd=tmp_path, check=True)
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    commands = [words for program, *words in calls if Path(program).name == "python"]
    assert commands
    for _, module, *words in commands:
        assert (CONF_DIR.parent / f"{module.replace('.', '/')}.py").exists()
        if words[0] == "-m":  # a sweep: its first job
            words = [word if "[" in word else word.partition(",")[0] for word in words[1:]]
        settings = compose_settings(words)
        assert settings.seed == (7 if "seed=7" in words else 0)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_an_example_says_what_it_needs_how_long_it_took_and_what_came_out(script: Path) -> None:
    head = script.read_text().partition("set -eu")[0]
    assert all(f"\n# {word}" in head for word in ("Needs: ", "Took: ", "Result"))
