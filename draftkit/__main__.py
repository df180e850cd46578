"""The command `draftkit`, also `python -m draftkit`: `draftkit distill +experiment=smoke`.

A command is a module of `pipelines`, run as `python -m` would run it. That package lies beside this
one in a clone, and in this one in a wheel (pyproject.toml says so): it is chosen by name, and
nothing of it is imported before a command is known.
"""

import difflib
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
HELP = """\
draftkit COMMAND +experiment=NAME [group=CHOICE ...] [section.key=VALUE ...]

{commands}

draftkit COMMAND --help shows its choices and settings; plan=true prints what it would do.
--config-dir DIR adds your own experiments, DIR/experiment/NAME.yaml.
Several processes: accelerate launch --num_processes N -m draftkit COMMAND ..., which starts one
where there is no GPU: there python -m torch.distributed.run --nproc_per_node N -m draftkit COMMAND
"""


def package_of(library: Path) -> tuple[str, Path]:
    """Name and folder of the package of commands that belongs to the library in that folder."""
    inside = library / "pipelines"
    return (
        ("draftkit.pipelines", inside)
        if inside.is_dir()
        else ("pipelines", library.parent / "pipelines")
    )


def commands(folder: Path) -> dict[str, str]:
    """Every command with what the first line of its file says after its name."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py"))}
    return {
        name: text.partition("\n")[0].partition("`: ")[2]
        for name, text in texts.items()
        if '\nif __name__ == "__main__":\n' in text
    }


def main() -> None:
    """Run the command that `sys.argv` names. Exit code 2 where there is none of that name."""
    package, folder = package_of(HERE)
    known, (name, *_) = commands(folder), [*sys.argv[1:], "--help"]
    if name in ("-h", "--help"):
        width = max(map(len, known)) + 2
        lines = (f"    {command:<{width}}{line}" for command, line in known.items())
        print(HELP.format(commands="\n".join(lines)), end="")
    elif name == "--version":
        try:
            print(f"draftkit {version('draftkit')}")
        except PackageNotFoundError:
            print("draftkit (a clone that is not installed)")
    elif name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "`draftkit --help` lists them"
        print(f"draftkit: there is no command {name}: {hint}", file=sys.stderr)
        raise SystemExit(2)
    else:
        if package == "pipelines":
            sys.path.insert(0, str(folder.parent))  # before another package of so common a name
        del sys.argv[1]
        runpy.run_module(f"{package}.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
