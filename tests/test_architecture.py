"""The house stands: imports point down, formulas live in theory, files and functions stay small."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted((ROOT / "draftkit").rglob("*.py"))
PIPELINES = sorted((ROOT / "pipelines").rglob("*.py"))
CODE = LIBRARY + PIPELINES
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in the file with the last part of its name."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                yield function.attr, node
            elif isinstance(function, ast.Name):
                yield function.id, node


def places(found: Iterator[tuple[Path, int]]) -> list[str]:
    return [f"{name_of(path)}:{line}" for path, line in found]


def test_imports_point_down() -> None:
    """The contracts of pyproject.toml, checked by import-linter."""
    code = (
        "import sys; from importlinter.cli import lint_imports;"
        "sys.exit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Contracts: [1-9]\d* kept, 0 broken", done.stdout)


def test_probabilities_are_made_in_theory_only() -> None:
    """Of tokens, that is: the weights of an attention layer are those of places in a text."""
    found = (
        (path, call.lineno)
        for path in CODE
        if "theory" not in path.parts and path.name != "attention.py"
        for name, call in calls(path)
        if name in ("softmax", "log_softmax", "Softmax", "LogSoftmax", "gumbel_softmax")
    )
    assert places(found) == []


def test_no_model_generates_by_itself() -> None:
    """Sequences come from our decoder; a model's own `.generate(` is a peer to measure."""
    found = (
        (path, call.lineno)
        for path in CODE
        if path.stem not in ("decoder_peers", "training_peers")
        for name, call in calls(path)
        if name == "generate" and isinstance(call.func, ast.Attribute)
    )
    assert places(found) == []


def test_nothing_is_pickled_and_no_remote_code_is_trusted_by_default() -> None:
    def forbidden(name: str, call: ast.Call) -> bool:
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        torch_file = owner == "torch" and name in ("save", "load")
        trusted = any(
            keyword.arg == "trust_remote_code"
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is True
            for keyword in call.keywords
        )
        return torch_file or trusted or owner in ("pickle", "dill", "joblib", "shelve", "marshal")

    found = ((p, call.lineno) for p in CODE for name, call in calls(p) if forbidden(name, call))
    assert places(found) == []


def test_the_formulas_ask_nothing_of_the_world() -> None:
    """No `.item()`, no files, no models in theory: compiled code and enumeration run it."""
    found = (
        (path, call.lineno)
        for path in LIBRARY
        if "theory" in path.parts
        for name, call in calls(path)
        if name in ("open", "from_pretrained", "manual_seed", "Generator")
    )
    assert places(found) == []


def test_the_library_does_not_print() -> None:
    found = (
        (path, call.lineno) for path in LIBRARY for name, call in calls(path) if name == "print"
    )
    assert places(found) == []


@pytest.mark.parametrize("path", CODE + TESTS, ids=name_of)
def test_a_file_has_at_most_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_a_function_has_at_most_60_lines(path: Path) -> None:
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1}"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > 60
    ]
    assert long == []


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_a_module_and_its_public_parts_say_what_they_are(path: Path) -> None:
    module = tree(path)
    if not module.body:
        return  # an empty __init__
    assert ast.get_docstring(module)
    silent = [
        node.name
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert silent == []


@pytest.mark.parametrize("path", CODE + TESTS, ids=name_of)
def test_no_path_of_one_machine_is_written_down(path: Path) -> None:
    if path == Path(__file__):
        return
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"""["'`(\s](/(home|root|work|Users|mnt)/|C:\\\\)""", text)


def test_importing_the_library_is_light_and_silent() -> None:
    code = (
        "import sys; import draftkit; import draftkit.config;"
        "heavy = ('torch', 'transformers', 'wandb', 'hydra', 'omegaconf', 'datasets', 'numpy');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_every_module_is_tested_where_tests_mirror_it(path: Path) -> None:
    if path.name == "__init__.py":
        return
    folder = ROOT / "tests" / path.relative_to(ROOT / "draftkit").parent
    package = ".".join(path.relative_to(ROOT).parent.parts)
    if f"from {package}.{path.stem} import" in (path.parent / "__init__.py").read_text():
        folder = folder.parent  # seen through the face of its package, and tested so
        package, path = ".".join(package.split(".")[:-1]), path.parent
    used = re.compile(rf"{package}\.{path.stem}\b|from {package} import .*\b{path.stem}\b")
    texts = [test.read_text(encoding="utf-8") for test in folder.glob("*.py")]
    assert any(used.search(text) for text in texts)
