"""Part b: the tests that are marked gpu, in this process, each result written down at once.

Only files that have such a test are collected, so that no other one needs what it imports. On a
machine without CUDA they skip: a rehearsal shows that they can be collected.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from ...configuration import CONF_DIR
from .part import Part

ROOT = CONF_DIR.parent
# A test is marked itself, or by a parameter or a list of marks that it takes from `tests.cuda`.
MARKED = re.compile(r"\bmark\.gpu\b|\btests\.cuda\b")
TEXT_CHARACTERS = 4_000  # of a failure


class Counting:
    """A plugin of pytest that tells `part` of every result."""

    def __init__(self, part: Part, name: str) -> None:
        self.part = part
        self.name = name
        self.results: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0}
        self.results |= {"seconds_by_test": {}, "failures": {}, "reasons": {}, "printed": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count one phase of a test: a skip or an error in its set-up, its call, its end.

        What it printed is kept: tests of speed tell what they measured.
        """
        if report.when == "call" and report.capstdout.strip():
            self.results["printed"][report.nodeid] = report.capstdout[-TEXT_CHARACTERS:]
        if report.when == "call" or report.outcome != "passed":
            self._count(report, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that could not be read."""
        if report.outcome == "failed":
            self._count(report, 0.0)

    def _count(self, report: Any, seconds: float) -> None:
        test, text = report.nodeid, report.longrepr
        self.results[report.outcome] += 1
        self.results["seconds_by_test"][test] = round(seconds, 2)
        if report.outcome == "failed":
            self.results["failures"][test] = str(text)[-TEXT_CHARACTERS:]
        if report.outcome == "skipped":
            self.results["reasons"][test] = text[-1] if isinstance(text, tuple) else str(text)
        self.part.write(self.name, {"unfinished": True, "result": self.results})


def marked_files(folder: Path) -> list[Path]:
    """Test files below `folder` in which something may be marked gpu."""
    files = sorted(folder.rglob("test_*.py"))
    return [file for file in files if MARKED.search(file.read_text(encoding="utf-8"))]


def run(part: Part) -> None:
    """Run them. Raises AssertionError, in the step, where a test failed or none was there."""
    counting = Counting(part, "results")

    def tests() -> dict[str, Any]:
        files = [str(file) for file in marked_files(ROOT / "tests")]
        options = ["-m", "gpu", "-W", "default", "-p", "no:cacheprovider", "-q", "-ra"]
        options += ["--continue-on-collection-errors", "--rootdir", str(ROOT)]
        options += ["-c", str(ROOT / "pyproject.toml"), "--color", "no"]
        code = pytest.main([*options, *files], plugins=[counting])
        counts = {key: counting.results[key] for key in ("passed", "failed", "skipped")}
        part.step("results", lambda: counting.results)
        assert code == pytest.ExitCode.OK, f"pytest ends with {code!r}: {counts}"
        return counts

    part.step("tests", tests)
