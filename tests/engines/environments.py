"""`python -m tests.engines.environments [--torch PATH] [NAME ...]`: engines to test against.

    .engines/vllm        the community's vLLM for CPUs, and the plugin beside this file
    .engines/onnx        ONNX Runtime GenAI and its builder, on the torch of this interpreter
    .engines/llamacpp    bin/llama-server and bin/libllama.so, compiled, and its converter, on torch
                         and transformers of this interpreter
    .engines/lmeval      lm-eval, a client of servers, on torch and transformers of this interpreter
    .engines/s3          a server of S3's protocol and its client, beside all that the project has

What goes into each is pinned in `pins/<name>.txt`. An environment that was made from other pins, or
not to its end, is made anew; one that is ready stays. An engine that cannot be had here is skipped,
and the last lines say of each whether it is ready, or why not. What was done is in
`.engines/<name>.log`. Only the standard library is needed, and a compiler for llama.cpp.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".engines"
PINS = HERE / "pins"
PLUGIN = HERE / "plugins" / "vllm_expand"
MARK = ".ready"  # in an environment: the checksum of what it was made from
TORCH = "torch==2.13.0+cpu"  # the build that vLLM's wheel is compiled against; PyPI has it not
RECIPE = {  # changed with the steps below, so that environments of older steps are made anew
    "vllm": 1,
    "onnx": 1,
    "llamacpp": 2,
    "lmeval": 1,
    "s3": 1,
}
TARGETS = ("llama-server", "llama")
CONVERTER = ("convert_hf_to_gguf.py", "conversion", "gguf-py")  # and what it imports from beside it
# The server's page is left out: its build would fetch it from elsewhere.
CMAKE = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    *("-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN"),
)


class Unavailable(Exception):
    """Why an engine cannot be had here, in one line."""


def requirements(name: str) -> list[str]:
    """The pins of an engine."""
    lines = (PINS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def checksum(name: str) -> str:
    """Of all that an environment is made from."""
    parts = [str(RECIPE[name]), *requirements(name)]
    if name == "vllm":
        parts += [path.read_text(encoding="utf-8") for path in sorted(PLUGIN.glob("*.*"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def missing(name: str) -> str | None:
    """Why the environment of an engine cannot be used; None where it can."""
    mark = FOLDER / name / MARK
    if not mark.is_file():
        return f"no .engines/{name}: make engines"
    if mark.read_text(encoding="utf-8") != checksum(name):
        return f".engines/{name} was made from other pins: make engines"
    return None


class Log:
    """Runs commands for one engine; what they write goes to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")

    def run(self, *words: str | Path, folder: Path | None = None) -> None:
        """Raises Unavailable with the line that says what is wrong."""
        command = [str(word) for word in words]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            begin = file.tell()
            # Variables for the modules of this process would shadow the environment's own.
            clean = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
            code = subprocess.run(
                command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=clean, check=False
            ).returncode
        if code:
            with self.path.open("rb") as file:
                file.seek(begin)
                raise Unavailable(reason(file.read().decode(errors="replace")))


def reason(output: str) -> str:
    """The line of a failed command's output that says why: its first error, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") or "error: " in line]
    return (errors[:1] or lines[-1:] or ["it wrote nothing"])[0][:300]


def environment(folder: Path, log: Log) -> Path:
    """Make an empty environment of this interpreter's version; its interpreter."""
    log.run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    log.run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip>=25")
    return python


def install(python: Path, log: Log, *words: str | Path) -> None:
    """Install what is named and nothing else: pins name all that is needed."""
    log.run(python, "-m", "pip", "install", "--no-deps", "--progress-bar", "off", *words)


def beside_project(name: str, folder: Path, log: Log, *, without: str | None = None) -> Path:
    """Make an environment of the pins but one, and after them the packages of this interpreter."""
    python = environment(folder, log)
    install(python, log, *(one for one in requirements(name) if one != without))
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "project.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def make_vllm(folder: Path, torch: Path | None, log: Log) -> None:
    """vLLM's wheel for CPUs demands a build of torch that PyPI does not have."""
    python = environment(folder, log)
    if torch is None:
        words: list[str | Path] = [TORCH]
    elif torch.is_dir():
        words = ["--no-index", "--find-links", torch, TORCH]
    else:
        words = [torch]
    try:
        install(python, log, *words)
    except Unavailable as error:
        version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        raise Unavailable(
            f"no {TORCH} for {version}: make engines TORCH=FILE_OR_FOLDER names its wheel, or a "
            f"folder of wheels ({error})"
        ) from None
    install(python, log, *(one for one in requirements("vllm") if one != TORCH))
    with tempfile.TemporaryDirectory() as copy:  # since setuptools writes beside the source
        shutil.copytree(PLUGIN, copy, dirs_exist_ok=True)
        install(python, log, "--no-build-isolation", copy)
    log.run(python, "-c", "from vllm import LLM")


def make_onnx(folder: Path, torch: Path | None, log: Log) -> None:
    """Any torch will do for the builder: that of the project saves a download of its own."""
    if find_spec("torch") is None:
        raise Unavailable(f"no torch in {sys.executable}, which the builder shares")
    python = beside_project("onnx", folder, log)
    log.run(python, "-c", "import onnxruntime_genai")
    # Its imports alone: the builder's --help ends in an error of its own text.
    module = "onnxruntime_genai.models.builder"
    log.run(python, "-c", f"import runpy; runpy.run_module({module!r}, run_name='imported')")


def make_llamacpp(folder: Path, torch: Path | None, log: Log) -> None:
    """No index has a built llama-server, nor the converter: the archive of llama-cpp-python holds
    the source of both, and of the `gguf` that the converter needs."""
    if not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))):
        raise Unavailable("no C++ compiler")
    pins = requirements("llamacpp")
    (source,) = (one for one in pins if one.startswith("llama-cpp-python=="))
    python = beside_project("llamacpp", folder, log, without=source)
    tools = folder / "bin"
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        words = ("--no-deps", "--no-binary", ":all:", "--progress-bar", "off", "--dest", work)
        log.run(python, "-m", "pip", "download", *words, source)
        (archive,) = work.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(work, filter="data")
        (code,) = work.glob("llama_cpp_python-*/vendor/llama.cpp")
        for part in CONVERTER:
            shutil.move(code / part, folder / part)
        build, ninja = work / "build", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
        log.run(tools / "cmake", "-S", code, "-B", build, *CMAKE, ninja)
        log.run(tools / "cmake", "--build", build, "--target", *TARGETS)
        for path in (build / "bin").glob("*"):
            if path.name == "llama-server" or ".so" in path.name:
                shutil.copy2(path, tools / path.name, follow_symlinks=False)
    log.run(python, folder / CONVERTER[0], "--help")
    log.run(tools / "llama-server", "--version")


def make_lmeval(folder: Path, torch: Path | None, log: Log) -> None:
    """Of what lm-eval needs the project has the larger part."""
    python = beside_project("lmeval", folder, log)
    log.run(python, "-c", "from lm_eval.models.openai_completions import LocalCompletionsAPI")


def make_s3(folder: Path, torch: Path | None, log: Log) -> None:
    """By its interpreter the project's own commands read and write such addresses."""
    python = beside_project("s3", folder, log)
    log.run(python, "-c", "import moto.server, s3fs, pyarrow")


MAKERS: dict[str, Callable[[Path, Path | None, Log], None]] = {
    "vllm": make_vllm,
    "onnx": make_onnx,
    "llamacpp": make_llamacpp,
    "lmeval": make_lmeval,
    "s3": make_s3,
}


def make(name: str, torch: Path | None) -> str:
    """Make the environment of one engine where it is missing: `ready`, or `skipped: reason`."""
    if missing(name) is None:
        return "ready"
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.monotonic()
    say(f"{name}: making .engines/{name}; its log is .engines/{name}.log")
    try:
        MAKERS[name](folder, torch, Log(FOLDER / f"{name}.log"))
    except Unavailable as error:
        shutil.rmtree(folder, ignore_errors=True)
        return f"skipped: {error}"
    (folder / MARK).write_text(checksum(name), encoding="utf-8")
    say(f"{name}: made in {(time.monotonic() - begin) / 60:.1f} min")
    return "ready"


def say(text: str) -> None:
    """Write a line at once: the next step takes minutes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(words: Sequence[str]) -> int:
    """0 also where engines were skipped: each is optional."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.environments")
    parser.add_argument("--torch", type=Path, help="the wheel of torch's CPU build, or its folder")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}")
    options = parser.parse_args(words)
    if unknown := sorted({*options.names} - {*MAKERS}):
        parser.error(f"no engine {', '.join(unknown)}: {', '.join(MAKERS)}")
    torch = options.torch and options.torch.expanduser().absolute()
    if torch and not torch.exists():
        parser.error(f"--torch: there is no {torch}")
    states = {name: make(name, torch) for name in options.names or MAKERS}
    for name, state in states.items():
        say(f"{name}: {state}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
