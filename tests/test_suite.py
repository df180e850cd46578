"""What holds of the suite itself, wherever it runs."""

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import conftest, releases, soak
from tests.conftest import ELSEWHERE, SOAKED


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
    makefile = (soak.ROOT / "Makefile").read_text(encoding="utf-8")
    assert '-m "not soak and not gpu and not engines"' in makefile
    for name, command in ELSEWHERE.items():
        assert command.startswith(f"make {name}")
        assert f"\n{name}: " in makefile


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
    project = tomllib.loads((soak.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = (soak.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
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
    done = subprocess.run(command, cwd=soak.ROOT, capture_output=True, text=True, check=True)
    assert ("x becomes y" in done.stderr) is shown


def test_warnings_that_are_no_errors_are_counted_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "WARNINGS", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("cache", "cache", "mask"):
            warnings.warn(f"{name} has another name" + " and so on" * 9, FutureWarning, 1)
    for one in caught:
        conftest.pytest_warning_recorded(one)
    cached, masked = conftest.warning_lines()
    assert cached.startswith("warned 2 times: FutureWarning: cache has another name and so")
    assert masked.startswith("warned 1 times: FutureWarning: mask")
    assert f"{__file__}:{caught[0].lineno}" in cached


# The share of the soak that a commit picks


def test_the_minutes_of_every_test_of_the_soak_are_known(request: pytest.FixtureRequest) -> None:
    """Of those that are collected with this one; and no test is listed that is no longer there."""
    assert request.config.stash[SOAKED] <= set(soak.MINUTES)
    for test in soak.MINUTES:
        file, name = test.split("::")
        assert f"def {name}(" in (soak.ROOT / file).read_text(encoding="utf-8")
    assert all((soak.ROOT / file).exists() for file in soak.TIMED)


def test_a_share_fits_into_its_time_and_some_commits_run_everything() -> None:
    shares = [soak.share(f"commit {number}") for number in range(60)]
    assert shares[0] == soak.share("commit 0") != shares[1]
    assert {test for picked in shares for test in picked} == set(soak.MINUTES)
    for picked in shares:
        assert sum(map(soak.MINUTES.__getitem__, picked)) <= soak.WORKERS * soak.SHARE_MINUTES


@pytest.fixture
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder for a suite, without the plugins that take long to import."""
    monkeypatch.setattr(soak, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout,xdist.plugin")


def soaked(file: Path, code: str, minutes: float = 1.0) -> int:
    """Soak the tests of that code beside a sound test, in a folder of their own."""
    header = "import pathlib, time, pytest\npytestmark = pytest.mark.soak"
    file.write_text(f"{header}\n{code}\n")
    file.with_name("test_sound.py").write_text(f"{header}\ndef test_sound(): pass\n")
    file.with_name("pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["soak"]\n')
    tests = [f"{file.name}::{name}" for name in re.findall(r"def (test_\w+)", code)]
    return soak.soak([*tests, "test_sound.py::test_sound"], minutes, ["-n", "0"])


@pytest.mark.usefixtures("_bare")
def test_a_share_that_runs_out_of_time_is_no_failure_unless_a_test_has_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slow = "def test_b(): time.sleep(60)"
    assert soaked(tmp_path / "test_one.py", slow, minutes=0.05) == 0
    assert "stopped after 0.05 minutes, which is no failure" in capfd.readouterr().out
    assert soaked(tmp_path / "test_two.py", f"def test_a(): assert 0\n{slow}", minutes=0.05) == 1


@pytest.mark.usefixtures("_bare")
def test_only_what_is_bound_by_a_clock_has_a_second_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that fails in its first run alone."""
    code = f"""
def test_a():
    file = pathlib.Path({str(tmp_path)!r}, "ran")
    ran = file.exists()
    file.touch()
    assert ran
"""
    file = tmp_path / "test_noise.py"
    assert soaked(file, code) == 1
    (tmp_path / "ran").unlink()
    monkeypatch.setattr(soak, "TIMED", (file.name,))
    assert soaked(file, code) == 0
    (tmp_path / "ran").unlink()
    assert soaked(file, code + "    assert 0\n") == 1
