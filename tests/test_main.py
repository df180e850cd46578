"""The command `draftkit`, out of a wheel that is built here, and out of the clone."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from draftkit.__main__ import commands, main, package_of
from pipelines.command import launch
from pipelines.configuration import CONF_DIR, compose_config
from pipelines.plan import DISTILL

ROOT = CONF_DIR.parent
OWN = "# @package _global_\ndefaults:\n  - smoke\nname: mine\nseed: 5\n"
Draftkit = Callable[..., subprocess.CompletedProcess[str]]


def isolated(*paths: Path) -> dict[str, str]:
    """An environment for `python -S`: dependencies and `paths`, no installed clone."""
    packages = [path for path in sys.path if path.endswith("-packages")]
    path = os.pathsep.join([*map(str, paths), *packages])
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    builder = WheelBuilder(str(ROOT))
    (made,) = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    return Path(made)


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the wheel, without what it depends on."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--no-compile", "--target", folder, wheel], check=True)
    return folder


@pytest.fixture
def draftkit(site: Path, tmp_path: Path) -> Draftkit:
    """`draftkit WORDS` in an empty folder, as installed."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-S", site / "bin" / "draftkit", *words],
            cwd=tmp_path,
            env=isolated(site),
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_a_wheel_has_commands_and_choices_in_the_one_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    version = wheel.name.split("-")[1]
    assert {name.split("/")[0] for name in names} == {"draftkit", f"draftkit-{version}.dist-info"}
    templates = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("draftkit/templates/*.*")}
    assert {f"draftkit/templates/{name}" for name in ("page.html", "page.markdown")} < templates
    assert templates <= names
    for folder, suffix in (("conf", "yaml"), ("pipelines", "py")):
        files = {
            f"draftkit/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob(f"*.{suffix}")
        }
        assert files == {name for name in names if name.startswith(f"draftkit/{folder}/")}


def test_an_installation_lists_its_commands_and_names_its_version(draftkit: Draftkit) -> None:
    shown = draftkit("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    known = commands(ROOT / "pipelines")
    for name, line in known.items():
        assert line, name
    width = max(map(len, known))  # so that the longest name stands apart from what it does
    lines = [f"    {name:<{width}}  {line}" for name, line in known.items()]
    assert "\n".join(lines) in shown.stdout
    assert draftkit("--version").stdout.startswith("draftkit 0.")


@pytest.mark.soak
def test_an_installation_plans_what_the_clone_plans_and_writes_nothing_into_itself(
    draftkit: Draftkit,
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One's own experiment builds upon one of the wheel's; addresses name settings and inputs."""
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(OWN)
    before = sorted(site.rglob("*"))
    done = draftkit("distill", "+experiment=mine", "--config-dir", "own", "plan=true")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(site.rglob("*")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs", "own"]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    launch(DISTILL, compose_config(["+experiment=smoke", "name=mine", "seed=5", "plan=true"]))
    assert capsys.readouterr().out == done.stdout


def test_the_clone_has_the_same_command_in_any_folder(tmp_path: Path) -> None:
    """Beside a package of the same name, too."""
    (tmp_path / "pipelines").mkdir()
    (tmp_path / "pipelines" / "__init__.py").write_text("raise ImportError('another one')\n")
    command = [sys.executable, "-S", "-m", "draftkit", "compare", "--help"]
    done = subprocess.run(
        command, cwd=tmp_path, env=isolated(ROOT), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("draftkit compare ")
    assert package_of(ROOT / "draftkit") == ("pipelines", ROOT / "pipelines")


@pytest.mark.parametrize(
    ("word", "hint"),
    [("distil", "did you mean distill?"), ("+experiment=pair", "`draftkit --help` lists them")],
)
def test_an_unknown_command_is_refused_in_one_line_with_the_near_match(
    word: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["draftkit", word, "plan=true"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err == f"draftkit: there is no command {word}: {hint}\n"
