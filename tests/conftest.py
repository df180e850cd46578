"""No network, no account, one thread, fixed seeds: what holds in every test."""

import os

# Before any import of the libraries that read them.
os.environ["WANDB_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ["MPLBACKEND"] = "agg"
for _key in ("WANDB_API_KEY", "HYDRA_FULL_ERROR", "RANK", "WORLD_SIZE"):
    os.environ.pop(_key, None)

import gc  # noqa: E402
import resource  # noqa: E402
import socket  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

LEFT_OUT = pytest.StashKey[Counter[str]]()  # tests that -m takes out, by their marker
ELSEWHERE = {  # what runs the tests of a marker
    "engines": "make engines; python -m pytest -m engines",
    "gpu": "make gpu; python -m pytest -m gpu",
    "soak": "make soak",
}
_LOOPBACK = ("127.", "::1", "localhost")
# Files that take longest, in this order before all others: none is left for one worker at the end,
# and those that fork do so while the worker is small (a large one takes five times as long).
_FIRST = (
    "test_stage_kill",
    "test_stage",
    "test_service_kill",
    "test_faults",
    "test_pipelines",
    "test_loop_vllm",
    "test_online",
    "test_drift",
    "test_exactness",
    "test_memory",
    "test_graphs",
    "test_notebooks",
    "test_stage_command",
    "test_sources",
)


@pytest.fixture(autouse=True)
def short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of tiny models takes no seconds to find what their rounds cost."""
    monkeypatch.setattr("draftkit.evaluation.costs.SECONDS", 0.0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer is asked again at once."""
    monkeypatch.setattr("draftkit.endpoint.FIRST_WAIT", 0.0)


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices from all tests but those marked `gpu`, which run alone (`-m gpu`).

    The suite is the same everywhere: what chooses a device by itself would choose another one.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are taken out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order files by `_FIRST`; the Makefile keeps xdist from ordering them by their number.

    A soak test has an hour: some take 18 minutes on two slow cores.
    """
    places = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(_FIRST)))
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what `-m` leaves out; a test of two markers by the first of `ELSEWHERE`."""
    for item in items:
        markers = [name for name in ELSEWHERE if item.get_closest_marker(name)]
        item.config.stash.setdefault(LEFT_OUT, Counter()).update(markers[:1])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of a worker of xdist, send the count to the process that writes the summary."""
    if hasattr(session.config, "workeroutput"):
        counts = session.config.stash.get(LEFT_OUT, Counter())
        session.config.workeroutput["left_out"] = dict(counts)


@pytest.hookimpl(optionalhook=True)  # there is no such hook without xdist
def pytest_testnodedown(node: Any) -> None:
    """Take the count of a worker: each of them has collected everything."""
    counts = getattr(node, "workeroutput", {}).get("left_out", {})
    node.config.stash[LEFT_OUT] = Counter(counts)


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collection: every stage ends with one."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what `-m` has left out, and the processor time of this process and of its children.

    Those are the workers of xdist, which have ended by now, and what these started and waited for.
    """
    if terminalreporter.config.option.markexpr:
        counts = terminalreporter.config.stash.get(LEFT_OUT, Counter())
        for name, count in sorted(counts.items()):
            terminalreporter.write_line(f"not run: {count} marked {name} ({ELSEWHERE[name]})")
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    user, system = (
        sum(getattr(use, key) for use in spent) / 60 for key in ("ru_utime", "ru_stime")
    )
    limit = os.environ.get("PROCESSOR_MINUTES")
    terminalreporter.write_line(
        f"processor time {user + system:.1f} min (user {user:.1f} + sys {system:.1f})"
        + (f", limit {limit}" if limit else "")
    )


@pytest.fixture(autouse=True, scope="session")
def _loopback_only() -> Iterator[None]:
    """Refuse every connection that leaves this machine."""
    patch = pytest.MonkeyPatch()

    def guarded(name: str) -> None:
        original = getattr(socket.socket, name)

        def connect(self: socket.socket, address: Any) -> Any:
            inside = self.family not in (socket.AF_INET, socket.AF_INET6)
            if not inside and not str(address[0]).startswith(_LOOPBACK):
                raise AssertionError(f"a test reached for the network: {address}")
            return original(self, address)

        patch.setattr(socket.socket, name, connect)

    guarded("connect")
    guarded("connect_ex")
    yield
    patch.undo()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_pass() -> Iterator[None]:
    """Calibrate on an answer of each kind, where nobody looks at what rounds cost."""
    patch = pytest.MonkeyPatch()
    patch.setattr("draftkit.evaluation.costs.PASSES", 1)
    patch.setattr("draftkit.evaluation.costs.ROUNDS", 1)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of outputs for all tests of a file, which share what lies there."""
    return tmp_path_factory.mktemp("outputs")
