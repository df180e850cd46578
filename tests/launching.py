"""Processes: those that know each other, as a launcher would start them, and commands."""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from accelerate.state import AcceleratorState, PartialState

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A port of this machine that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environments(count: int) -> list[dict[str, str]]:
    """What a launcher sets in the environment of each of `count` processes."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(count), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def run_processes(module: str, *arguments: str, count: int = 2, seconds: float = 200) -> None:
    """Run `count` processes of `python -m module`; all must end well."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in rank_environments(count)
    ]
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]


def fork_ranks(function: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Any]:
    """What `function(*arguments)` returns in each of `count` processes that train together.

    They are forked, which saves the seconds that an interpreter takes to import torch.
    """
    forking = multiprocessing.get_context("fork")
    readers, ranks = [], []
    for environment in rank_environments(count):
        reader, writer = forking.Pipe(duplex=False)
        process = forking.Process(target=_rank, args=(environment, writer, function, arguments))
        process.start()
        writer.close()  # so that a process that dies without an answer ends the reading
        readers.append(reader)
        ranks.append(process)
    try:
        answers = [reader.recv() for reader in readers]
    finally:
        for process in ranks:
            process.join(timeout=10)
            process.kill()
    for _, error in answers:
        assert not error, error
    return [value for value, _ in answers]


def _rank(
    environment: dict[str, str],
    writer: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """One process: forget what the parent knew of its own ranks, and answer once."""
    os.environ |= environment
    AcceleratorState._reset_state()
    PartialState._reset_state()
    try:
        writer.send((function(*arguments), ""))
    except BaseException:
        writer.send((None, traceback.format_exc()))


class Forked:
    """`python -m module arguments` in a fork of this process, with the face of `Popen`.

    It has imported all that this one has, which saves the seconds of a new interpreter.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            self.pid = os.fork()
        if self.pid == 0:
            _become(module, arguments, writing)
        os.close(writing)
        self.stdout = os.fdopen(reading, encoding="utf-8")  # and stderr
        self.returncode: int | None = None

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:  # what it waits for may never come
            self.kill()
        self.stdout.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process has not ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, if it has not ended."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """The exit code; negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _become(module: str, arguments: tuple[str, ...], writing: int) -> NoReturn:
    """Run the command and end the process, whatever happens."""
    code = 1
    try:
        for number in (1, 2):
            os.dup2(writing, number)
        sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, encoding="utf-8")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        AcceleratorState._reset_state()
        PartialState._reset_state()
        os.chdir(ROOT)
        sys.argv = [module, *arguments]
        warnings.simplefilter("ignore")
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
