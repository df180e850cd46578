"""Notebooks run from top to bottom and are stored without outputs."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
SHOWN = {  # by notebook
    "quickstart": ("gain in alpha", "break-even alpha"),
    "theory_of_acceptance": ("tau", "best by tvd", "break-even alpha"),
    "online_drift": ("records for the gate", "request ", "gate 1 lets", "in force"),
}


def test_all_notebooks_are_run():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_runs_and_shows_what_it_promises(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "strip the outputs before committing"
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream"
    )
    assert [text for text in SHOWN[name] if text not in shown] == []
