"""`python -m pipelines.wheels`: what a clone lacks on a machine without a network, as wheels.

    python -m pipelines.wheels                          # for a machine like that of `PRESENT`
    python -m pipelines.wheels --present THERE.txt      # for one where `pip list` said that

Gathers the dependencies of pyproject.toml that the machine lacks, and theirs, by pip, for its
Python and Linux; what is published as source alone is built. Then prints sizes and the one command
that uses the wheels there. W&B is left out: `tracker=none` does without.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PathDistribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
MOST_BYTES = 56_000_000  # of tree and wheels together
OLDEST, NEWEST = 5, 28  # of manylinux_2_N: pip takes these tags literally
NOT_NEEDED = {"wandb"}
# What an image made for PyTorch has, of all that is asked for here.
PRESENT = """
accelerate annotated-doc anyio attrs certifi click filelock fsspec h11 httpcore httpx
huggingface-hub idna jinja2 markupsafe matplotlib numpy packaging pandas peft prometheus-client
psutil pyarrow pytest pytest-timeout python-dateutil pyyaml regex requests rich safetensors six
tokenizers torch tqdm transformers typing-extensions xxhash
"""
ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
    "os_name": "posix",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}

Present = Mapping[str, str | None]  # names, and versions where they are known


def read_present(text: str) -> dict[str, str | None]:
    """Packages of a list: names, `name==version`, or the columns of `pip list`."""
    packages: dict[str, str | None] = {}
    for line in text.splitlines():
        words = re.split(r"[\s=]+", line.strip())
        versions = [word for word in words[1:] if re.match(r"\d", word)]
        named = words[:1] if versions else words
        for name in filter(None, named):
            packages[canonicalize_name(name)] = versions[0] if versions else None
    return packages


def wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(line) for line in project["dependencies"]]


def gather(requirements: Sequence[Requirement], present: Present, folder: Path) -> None:
    """Put a wheel of each requirement that the machine lacks, and of theirs, into `folder`."""
    waiting, done = list(requirements), set(NOT_NEEDED)
    while waiting:
        requirement = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        if name in done or has(present, requirement):
            continue
        done.add(name)
        print(f"wheels: {requirement}", flush=True)
        waiting += needs(fetch(requirement, folder))


def has(present: Present, requirement: Requirement) -> bool:
    """Whether the machine has it, in a version that fits where that is known."""
    name = canonicalize_name(requirement.name)
    version = present.get(name)
    return name in present and (version is None or version in requirement.specifier)


def fetch(requirement: Requirement, folder: Path) -> Path:
    """Let pip download a wheel, or build one; returns it. ValueError if it can do neither."""
    before = set(folder.glob("*.whl"))
    platforms = [f"manylinux_2_{number}_x86_64" for number in range(NEWEST, OLDEST - 1, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
    options += [word for platform in platforms for word in ("--platform", platform)]
    plain = f"{requirement.name}{requirement.specifier}"
    if (error := pip("download", *options, "--dest", str(folder), plain)) and (
        error := pip("wheel", "--wheel-dir", str(folder), plain)
    ):
        raise ValueError(f"{plain}: {error}")
    (made,) = set(folder.glob("*.whl")) - before
    tags = parse_wheel_filename(made.name)[3]
    if any(tag.platform.endswith("_x86_64") or tag.platform == "any" for tag in tags):
        return made
    raise ValueError(f"{made.name} was built for this machine alone: {plain} has code to compile")


def pip(*arguments: str) -> str:
    """Run pip without dependencies; what went wrong, in a line, or nothing."""
    command = [sys.executable, "-m", "pip", *arguments, "--no-deps", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return " ".join(done.stderr.split())[-300:] if done.returncode else ""


def needs(wheel: Path) -> Iterator[Requirement]:
    """What a wheel says that it depends on, there."""
    (information,) = (path for path in zipfile.Path(wheel).iterdir() if path.suffix == ".dist-info")
    for line in PathDistribution(information).requires or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(ENVIRONMENT):
            yield requirement


def tree_bytes() -> int:
    """Size of the checkout: what git tracks or would."""
    command = ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files = (ROOT / name for name in done.stdout.split("\0") if name)
    return sum(file.stat().st_size for file in files if file.is_file())


def main(arguments: Sequence[str]) -> int:
    """Gather, then print sizes and the command; exit code 1 for more than may travel."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.wheels", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("outputs/wheels"))
    parser.add_argument("--present", type=Path, help="a list of packages, as `pip list` prints it")
    options = parser.parse_args(arguments)
    if not (ROOT / "pyproject.toml").is_file():
        print("wheels: it gathers for the tree of a clone: run it in one", file=sys.stderr)
        return 2
    text = PRESENT if options.present is None else options.present.read_text(encoding="utf-8")
    present = read_present(text)
    shutil.rmtree(options.folder, ignore_errors=True)  # two versions of one would not install
    options.folder.mkdir(parents=True)
    gather(wanted(), present, options.folder)
    wheels = sorted(options.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:8.2f} MB  {wheel.name}")
    size, tree = sum(wheel.stat().st_size for wheel in wheels), tree_bytes()
    print(f"{size / 1e6:8.2f} MB in {len(wheels)} wheels, and {tree / 1e6:.2f} MB of tree")
    print("There, in the tree:")
    print(
        "    python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade "
        f"--target /tmp/site {options.folder}/*.whl && "
        "PYTHONPATH=/tmp/site python3 -m pipelines.benchmark +experiment=bench_gpu"
    )
    if size + tree <= MOST_BYTES:
        return 0
    print(f"wheels: more than {MOST_BYTES / 1e6:.0f} MB together", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
