"""What a machine lacks is gathered with what that needs in turn, and nothing else."""

import zipfile

import pytest
from packaging.requirements import Requirement

from pipelines import wheels

# Packages of a registry: the tags of their wheels (none: source alone), and their needs.
REGISTRY = {
    "tool-2.1": ("py3-none-any", ["helper>=1", "torch>=2", 'old; python_version < "3.9"']),
    "helper-1.0": ("cp312-cp312-manylinux_2_17_x86_64", ['fancy; extra == "all"', "runtime==4.*"]),
    "runtime-4.9": ("", []),
    "compiled-1.0": ("", []),
    "wandb-0.1": ("py3-none-any", []),
}


def make_wheel(folder, name, tags, needs):
    lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {n}" for n in needs)]
    with zipfile.ZipFile(folder / f"{name}-{tags}.whl", "w") as archive:
        archive.writestr(f"{name}.dist-info/METADATA", "\n".join(lines) + "\n")


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """What pip is asked for; it serves `REGISTRY`."""
    log = []

    def pip(verb, *arguments):
        requirement = Requirement(arguments[-1])
        option = "--dest" if verb == "download" else "--wheel-dir"
        folder = wheels.Path(arguments[arguments.index(option) + 1])
        (name,) = (key for key in REGISTRY if key.startswith(f"{requirement.name}-"))
        tags, needs = REGISTRY[name]
        log.append((verb, requirement.name))
        if verb == "download" and not tags:
            return "ERROR: No matching distribution"
        built = "cp311-cp311-linux_riscv" if "compiled" in name else "py3-none-any"
        make_wheel(folder, name, tags or built, needs)
        return ""

    monkeypatch.setattr(wheels, "pip", pip)
    return log


def gathered(folder, *names, present=""):
    wheels.gather([Requirement(name) for name in names], wheels.read_present(present), folder)
    return sorted(path.name.split("-")[0] for path in folder.glob("*.whl"))


def test_needs_of_needs_come_along_and_what_is_there_stays_there(tmp_path, asked):
    assert gathered(tmp_path, "tool", "wandb", present="torch") == ["helper", "runtime", "tool"]
    assert asked == [
        ("download", "tool"),
        ("download", "helper"),
        ("download", "runtime"),
        ("wheel", "runtime"),
    ]


def test_a_version_that_does_not_fit_is_brought_along(tmp_path, asked):
    listed = "Package Version\n------- -------\ntorch   2.11.0\nhelper  0.9\n"
    assert gathered(tmp_path, "tool", present=listed) == ["helper", "runtime", "tool"]
    asked.clear()
    assert gathered(tmp_path, "helper>=1,<2", "torch>=2", present="helper==1.5\ntorch==2.11") == [
        "helper",
        "runtime",
        "tool",
    ]
    assert asked == []


def test_code_that_was_compiled_for_this_machine_is_refused(tmp_path):
    with pytest.raises(ValueError, match="built for this machine alone: compiled has code"):
        gathered(tmp_path, "compiled")


def test_what_pip_lists_is_read_in_all_its_forms():
    text = "Package Version\n---- ----\nhydra-core  1.3.8\nPyYAML==6.0.3\nrich numpy\n"
    found = wheels.read_present(text)
    assert {"hydra-core": "1.3.8", "pyyaml": "6.0.3", "rich": None, "numpy": None}.items() <= (
        found.items()
    )


def test_sizes_are_told_and_too_much_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wheels, "wanted", lambda: [Requirement("tool")])
    monkeypatch.setattr(wheels, "tree_bytes", lambda: 3_000_000)
    folder = tmp_path / "made"
    assert wheels.main(["--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "in 3 wheels, and 3.00 MB of tree" in shown
    assert f"--target /tmp/site {folder}/*.whl && PYTHONPATH=/tmp/site" in shown
    assert "-m pipelines.benchmark +experiment=bench_gpu" in shown
    monkeypatch.setattr(wheels, "tree_bytes", lambda: wheels.MOST_BYTES)
    assert wheels.main(["--folder", str(folder)]) == 1
    assert "more than 56 MB together" in capsys.readouterr().err


@pytest.mark.skipif(not (wheels.ROOT / ".git").exists(), reason="git tells what travels")
def test_the_checkout_is_small():
    assert 1e6 < wheels.tree_bytes() < 20e6


def test_what_is_wanted_is_what_the_project_declares():
    names = {requirement.name for requirement in wheels.wanted()}
    assert {"torch", "hydra-core", "wandb"} <= names
    there = wheels.read_present(wheels.PRESENT)
    assert not {"hydra-core", "omegaconf", "datasets"} & set(there)
