"""The scripts that people copy: each runs commands that exist, with settings that compose."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.configuration import CONF_DIR, compose_config, compose_settings

FOLDER = CONF_DIR.parent / "docs" / "examples"
COMMANDS = {
    "chat_model.sh": ["distill", "evaluate"],
    "head_for_vllm.sh": ["distill", "export"],
    "loop.sh": ["capture", "online"],
    "own_pair.sh": ["check", "distill", "export"],
    "sweep.sh": ["distill", "compare"],
}
SHIM = """#!{python}
import json, sys
with open("{calls}", "a") as file:
    file.write(json.dumps(sys.argv) + "\\n")
"""


def jobs_of(words: list[str]) -> Iterator[tuple[str, ...]]:
    """The words of each job of a sweep."""
    parts = [word.partition("=") for word in words]
    return itertools.product(*([f"{a}{b}{one}" for one in c.split(",")] for a, b, c in parts))


def test_no_example_is_left_out() -> None:
    assert sorted(file.name for file in FOLDER.glob("*.sh")) == [*COMMANDS]


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_runs_commands_with_settings_that_compose(name: str, tmp_path: Path) -> None:
    """From any folder. Python and make write down what they are called with, and do nothing."""
    bin_folder, calls = tmp_path / ".venv" / "bin", tmp_path / "calls.jsonl"
    bin_folder.mkdir(parents=True)
    for program in ("python", "make"):
        (bin_folder / program).write_text(SHIM.format(python=sys.executable, calls=calls))
        (bin_folder / program).chmod(0o755)
    (tmp_path / "docs" / "examples").mkdir(parents=True)
    script = tmp_path / "docs" / "examples" / name
    script.write_text((FOLDER / name).read_text())
    (usage,) = [line for line in script.read_text().splitlines() if line.startswith("#     sh ")]
    given = [word for word in usage.split()[3:] if re.fullmatch(r"[A-Z]+(\.jsonl)?", word)]
    given = [word.replace("FILE", "/tmp/a file") for word in given]
    subprocess.run(["sh", script, *given, "seed=7"], cwd="/", check=True)
    called = [json.loads(line) for line in calls.read_text().splitlines()]
    commands = [words for program, *words in called if Path(program).name == "python"]
    modules = [module for _, module, *_ in commands]  # two run beside each other in loop.sh
    assert sorted(modules) == sorted(f"pipelines.{one}" for one in COMMANDS[name])
    for _, module, *words in commands:
        assert "seed=7" in words or module == "pipelines.compare"
        sweeps = words[:1] == ["-m"]
        for job in jobs_of(words) if sweeps else [words]:
            own = [word for word in job if word != "-m"]
            if name == "chat_model.sh":  # which reads a package that may not be there
                assert compose_settings(own).seed == 7
            else:
                compose_config([*own, "sampling.from=config"])


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_says_what_it_needs_how_long_it_took_and_what_came_out(name: str) -> None:
    head = (FOLDER / name).read_text().partition("set -eu")[0]
    assert "\n# Needs: " in head
    assert re.search(r"\n# Took: .*\d+ (minutes|h)\b", head)
    assert re.search(r"\n# Result.*\d", head)
