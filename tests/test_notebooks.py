"""Notebooks run from top to bottom, need draftkit alone, and are stored with their figures."""

import ast
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SHOWN = {  # by notebook: how many figures, and what it prints
    "quickstart": (3, ("gain in alpha", "lossless: True", "verdict: ", "tokens a target pass")),
    "theory_of_acceptance": (4, ("tau at gamma 4", "best by tvd", "break-even alpha")),
    "divergences_and_sources": (2, ("reverse_kl", "next_token", " over ", "replay")),
    "comparison": (3, ("1 layer, TVD", "3 layers, forward KL", "on the front")),
}
# A minute each: with every change only their imports are run.
LONG = ("quickstart", "divergences_and_sources", "comparison")
RUN = [pytest.param(name, marks=pytest.mark.soak if name in LONG else ()) for name in SHOWN]


def cells(name: str) -> list[nbformat.NotebookNode]:
    """The cells of a notebook that hold code."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_all_notebooks_are_run() -> None:
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_is_stored_as_it_ran(name: str) -> None:
    """By `jupyter nbconvert --to notebook --execute --inplace`."""
    count, texts = SHOWN[name]
    assert [cell.execution_count for cell in cells(name)] == [*range(1, len(cells(name)) + 1)]
    outputs = [output for cell in cells(name) for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == count
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    printed = "".join(output.get("text", "") for output in outputs)
    assert [text for text in texts if text not in printed] == []


@pytest.mark.parametrize("name", RUN)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:FigureCanvasAgg")
@pytest.mark.usefixtures("one_pass")
def test_a_notebook_runs_and_shows_what_it_promises(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: a kernel of its own would import torch anew."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(name)):
        exec(compile(cell.source, f"{name}.ipynb, cell {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert [text for text in SHOWN[name][1] if text not in shown] == []


@pytest.mark.parametrize("name", SHOWN)
def test_all_that_a_notebook_imports_is_there_and_draftkit_alone(name: str) -> None:
    parts = [part for cell in cells(name) for part in ast.parse(cell.source).body]
    imports = [part for part in parts if isinstance(part, ast.Import | ast.ImportFrom)]
    assert imports
    modules = [part.module or "" for part in imports if isinstance(part, ast.ImportFrom)]
    modules += [one.name for part in imports if isinstance(part, ast.Import) for one in part.names]
    assert not {module.partition(".")[0] for module in modules} & {"pipelines", "tests"}
    exec(compile(ast.Module(imports, []), name, "exec"), {})
