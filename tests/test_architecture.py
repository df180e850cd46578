"""What a linter cannot say of the code: one test a rule, which lists all that break it.

That imports point down is a contract of pyproject.toml, and that the library does not print a rule
of ruff: `make lint` checks both.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = sorted((ROOT / "draftkit").rglob("*.py"))
PIPELINES = sorted((ROOT / "pipelines").rglob("*.py"))
CODE = LIBRARY + PIPELINES
OF_VLLM = ROOT / "draftkit" / "engines" / "push_vllm.py"  # copied to its interpreter
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
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


def names_of(lines: Iterator[tuple[Path, int]]) -> list[str]:
    return [f"{name_of(path)}:{line}" for path, line in lines]


def test_probabilities_are_made_in_theory_only() -> None:
    """Of tokens, that is: the weights of an attention layer are those of places in a text."""
    lines = (
        (path, call.lineno)
        for path in CODE
        if "theory" not in path.parts and path.name != "attention.py"
        for name, call in calls(path)
        if name in ("softmax", "log_softmax", "Softmax", "LogSoftmax", "gumbel_softmax")
    )
    assert names_of(lines) == []


def test_no_model_generates_by_itself() -> None:
    """Sequences come from our decoder; a model's own `.generate(` is a peer to measure."""
    lines = (
        (path, call.lineno)
        for path in CODE
        if path.stem not in ("decoder_peers", "training_peers")
        for name, call in calls(path)
        if name == "generate" and isinstance(call.func, ast.Attribute)
    )
    assert names_of(lines) == []


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

    lines = ((p, call.lineno) for p in CODE for name, call in calls(p) if forbidden(name, call))
    assert names_of(lines) == []


def test_the_formulas_ask_nothing_of_the_world() -> None:
    """No `.item()`, no files, no models in theory: compiled code and enumeration run it."""
    lines = (
        (path, call.lineno)
        for path in LIBRARY
        if "theory" in path.parts
        for name, call in calls(path)
        if name in ("open", "from_pretrained", "manual_seed", "Generator")
    )
    assert names_of(lines) == []


def test_commands_import_one_another_relatively() -> None:
    """In a wheel they are `draftkit.pipelines`, and there is no other package of that name."""

    def absolute(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return node.level == 0 and str(node.module).split(".")[0] == "pipelines"
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        return any(name.split(".")[0] == "pipelines" for name in names)

    lines = ((p, node.lineno) for p in CODE for node in ast.walk(tree(p)) if absolute(node))
    assert names_of(lines) == []


def test_no_path_of_one_machine_is_written_down() -> None:
    machine = re.compile(r"""["'`(\s](/(home|root|work|Users|mnt)/|C:\\\\)""")
    lines = (
        (path, number)
        for path in CODE + TESTS
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(True), 1)
        if machine.search(" " + line)
    )
    assert names_of(lines) == []


def test_no_name_is_a_word_that_says_nothing() -> None:
    """`found`, `told`, `asked`, `said` and `place` fit any value: the field has a word for it."""
    empty = re.compile(r"(^|_)(found|told|asked|said|places?)(_|$)")

    def names(path: Path) -> Iterator[tuple[str, int]]:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name, node.lineno
            elif isinstance(node, ast.arg):
                yield node.arg, node.lineno
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno

    lines = ((p, line) for p in CODE for name, line in names(p) if empty.search(name))
    assert names_of(lines) == []


def test_importing_the_library_is_light_and_silent() -> None:
    code = (
        "import sys; import draftkit; import draftkit.config;"
        "heavy = ('torch', 'transformers', 'wandb', 'hydra', 'omegaconf', 'datasets', 'numpy');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def roots(path: Path) -> Iterator[tuple[str, int]]:
    """The packages that a module imports absolutely, with the lines."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0], node.lineno


def test_every_package_that_is_imported_is_declared() -> None:
    """A dependency of a dependency may be gone with its next release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {canonicalize_name(Requirement(one).name) for some in lists for one in some}
    distributions = packages_distributions()
    lines = (
        (path, line)
        for path in CODE
        if path != OF_VLLM
        for root, line in roots(path)
        if root not in (*sys.stdlib_module_names, "draftkit", "pipelines", "tests")
        and not declared & {canonicalize_name(name) for name in distributions.get(root, [])}
    )
    assert names_of(lines) == []


def test_what_vllm_imports_needs_nothing_but_what_is_beside_vllm() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "safetensors", "vllm"}
    assert {root for root, _ in roots(OF_VLLM)} <= allowed


def is_tested_at_its_mirror(path: Path) -> bool:
    """Whether the folder of `tests` that mirrors the module's names the module."""
    folder = ROOT / "tests" / path.relative_to(ROOT / "draftkit").parent
    package = ".".join(path.relative_to(ROOT).parent.parts)
    face = (path.parent / "__init__.py").read_text()
    if path.parent.name != "draftkit" and f"from {package}.{path.stem} import" in face:
        folder = folder.parent  # seen through the face of its package, and tested so
        package, path = ".".join(package.split(".")[:-1]), path.parent
    used = re.compile(rf"{package}\.{path.stem}\b|from {package} import .*\b{path.stem}\b")
    return any(used.search(test.read_text(encoding="utf-8")) for test in folder.glob("*.py"))


def test_every_module_is_tested_where_tests_mirror_it() -> None:
    modules = [path for path in LIBRARY if path.name != "__init__.py"]
    assert [name_of(path) for path in modules if not is_tested_at_its_mirror(path)] == []
