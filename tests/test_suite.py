"""What holds of the suite itself, wherever it runs."""

import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pipelines.configuration import compose_config
from tests import releases
from tests.conftest import ELSEWHERE

ROOT = Path(__file__).resolve().parents[1]


def test_advice_for_cuda_is_no_error() -> None:
    """Inductor's words, in every unit with a product in float32 where there are tensor cores."""
    warnings.warn(
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. "
        "Consider setting `torch.set_float32_matmul_precision('high')` for better performance.",
        UserWarning,
        stacklevel=1,
    )


def test_no_test_but_those_marked_so_sees_a_cuda_device() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_what_is_left_out_has_a_command_of_its_own_that_is_said(
    request: pytest.FixtureRequest,
) -> None:
    markers = {line.split(":")[0] for line in request.config.getini("markers")}
    assert {*ELSEWHERE} <= markers
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert '-m "not soak and not gpu and not engines"' in makefile
    for name, command in ELSEWHERE.items():
        assert command.startswith(f"make {name}")
        assert f"\n{name}: " in makefile


def test_what_needs_a_gpu_takes_at_most_nine_minutes_and_composes() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    recipe = makefile.partition("\ngpu: ")[2].partition("\n\n")[0]
    lines = recipe.splitlines()[1:]
    assert sum(int(line.split()[1]) for line in lines) <= 9 * 60
    commands = [line.removesuffix("$(PAIR)").split()[5:] for line in lines if "pipelines" in line]
    assert [compose_config(words).hardware.device for words in commands] == ["cuda", "cuda"]


def test_other_releases_are_chosen_by_the_bounds_of_the_project() -> None:
    project = {
        "dependencies": ["torch>=2.11,<2.14", "hydra-core>=1.3.5,<1.4", "numpy>=2,<3"],
        "optional-dependencies": {"dev": ["ruff==0.17.5", "trl>=1,<2"], "notebooks": ["nbformat"]},
    }
    pins = "numpy==2.4.6\ntorch==2.13.0\ntorchvision==0.28.0\n"
    tools = ["ruff", "trl", "nbformat"]
    newest = releases.requirements("newest", project, pins)
    assert newest == ["torch==2.13.0", "hydra-core", "numpy", *tools]
    oldest = releases.requirements("oldest", project, pins)
    assert oldest == ["torch==2.11", "hydra-core==1.3.5", "numpy==2", *tools]


def test_every_requirement_has_a_pin_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins: dict[str, list[str]] = {}
    for line in lines:
        pins.setdefault(Requirement(line).name, []).append(Requirement(line).specifier)
    for text in (*project["dependencies"], *extras["dev"], *extras["notebooks"]):
        wanted = Requirement(text)
        (*_, pinned) = [next(iter(one)).version for one in pins[wanted.name]]
        assert wanted.specifier.contains(pinned), text


@pytest.mark.parametrize(("options", "shown"), [((), False), (("-W", "default"), True)])
def test_a_command_shows_no_deprecation_of_a_dependency(
    options: tuple[str, ...], shown: bool
) -> None:
    code = "import pipelines, warnings; warnings.warn('x becomes y', FutureWarning)"
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ("x becomes y" in done.stderr) is shown
