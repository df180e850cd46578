"""Notebooks run from top to bottom and are stored without outputs."""

import ast
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SHOWN = {  # by notebook
    "quickstart": ("gain in alpha", "break-even alpha"),
    "theory_of_acceptance": ("tau", "best by tvd", "break-even alpha"),
    "online_drift": ("records for the gate", "request ", "gate 1 lets", "in force"),
}
# Half a minute each: with every change only their imports are run.
LONG = ("online_drift", "quickstart")
RUN = [pytest.param(name, marks=pytest.mark.soak if name in LONG else ()) for name in SHOWN]


def cells(name: str) -> list[str]:
    """The code of a notebook, cell by cell. Nothing is compiled: it is what takes longest."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "strip the outputs before committing"
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    eager = '"tracker=none", "decode.compile=false"'
    return [source.replace('"tracker=none"', eager) for source in code]


def test_all_notebooks_are_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", RUN)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("short_bursts")
def test_a_notebook_runs_and_shows_what_it_promises(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: a kernel of its own would import torch anew."""
    monkeypatch.chdir(NOTEBOOKS.parent)
    names: dict[str, object] = {"__name__": "__main__"}
    for number, source in enumerate(cells(name)):
        exec(compile(source, f"{name}.ipynb, cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert [text for text in SHOWN[name] if text not in shown] == []


@pytest.mark.parametrize("name", SHOWN)
def test_all_that_a_notebook_imports_is_there(name: str) -> None:
    parts = [part for source in cells(name) for part in ast.parse(source).body]
    imports = [part for part in parts if isinstance(part, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(imports, []), name, "exec"), {})
