"""From the registry to the engine that serves: the version in force is brought, and read back.

A `Delivery` looks at every turn of the daemon whether what the registry says is what serves, and
pushes it if not: so a publication, a version taken back by whomever, an engine that was started
anew and a push that failed are one case. Failures are logged in one line, and end nobody.

vLLM is paused (its requests wait), loads, forgets cached prefixes, is read back, and goes on,
whatever happens. Where it computes with something else than was pushed, what served before comes
back, and the registry says so.
"""

import json
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from torch import Tensor

from draftkit.artifacts import first_line, remove, sha256_file
from draftkit.endpoint import OTHERWISE, Endpoint
from draftkit.engines.push_vllm import NOT_READ, digest
from draftkit.online.registry import NotInForce, Registry, Version

COMMAND_SECONDS = 900.0  # in which an engine that starts anew must be there
PUSHED = "pushed"  # the folder of what engines load, by route, in that of a service
LONGEST_WAIT = 16  # turns between two pushes that fail

logger = logging.getLogger(__name__)


class Mismatch(ValueError):
    """The engine does not compute with what was pushed, but with the version `served`, if any."""

    served: str | None = None


class Engine(Protocol):
    """What serves. Its methods raise ValueError, one line."""

    def serves(self) -> str | None:
        """The version that the engine has, as it says; None for none that was pushed."""

    def push(self, folder: Path, name: str, before: tuple[Path, str] | None) -> None:
        """Let it serve the version `name` in `folder`. Raises Mismatch where it does not, after
        going back to the one `before`."""


class Delivery:
    """Brings the versions of one route to its engine.

    write: makes of a version a folder that the engine loads. folder: where these lie; the engine
    must see it by the same path.
    """

    def __init__(
        self,
        route: str,
        registry: Registry,
        engine: Engine,
        *,
        write: Callable[[Version, Path], object],
        folder: Path,
    ) -> None:
        self.serves: str | None = None  # None: it is not known
        self._route, self._registry, self._engine = route, registry, engine
        self._write, self._folder = write, folder.absolute()
        self._has_begun = False  # an engine that another daemon left paused goes on after a push
        self._wait = self._turns = 0

    @property
    def is_there(self) -> bool:
        """Whether what is in force is what serves, as far as is known."""
        version = self._registry.current()
        return version is not None and version.name == self.serves

    def bring(self) -> str | None:
        """Push what is in force, unless it serves; its name, if it serves from now on.

        A failure is logged, and tried again at the next turn, then after twice as many each time.
        """
        if self._turns > 0:
            self._turns -= 1
            return None
        try:
            return self._bring()
        except Exception as error:
            self._turns, self._wait = self._wait, min(max(1, 2 * self._wait), LONGEST_WAIT)
            reason = f"route {self._route}: the push failed: {first_line(error)}"
            logger.warning(reason, exc_info=not isinstance(error, ValueError | OSError))
        served = None
        with suppress(ValueError):
            served = self._engine.serves()
        self._note(served)
        return None

    def _bring(self) -> str | None:
        version = self._registry.current()
        assert version is not None
        served = self._engine.serves()
        self._note(served)
        if self._has_begun and served == version.name:
            return None
        self._has_begun = False
        before = self._before(version, served)
        try:
            self._engine.push(self._exported(version), version.name, before)
        except Mismatch as error:
            if error.served not in version.ancestors:  # what was taken back must not come again
                raise
            reason = f"{first_line(error)}: {error.served} serves again"
            with suppress(NotInForce):  # another one is, and the next turn brings it
                self._registry.rollback(error.served, reason=reason, current=version.name)
            logger.warning("route %s: %s is taken back: %s", self._route, version.name, reason)
            self._note(error.served)
        else:
            self._note(version.name)
        self._has_begun, self._wait = True, 0
        kept = {version.name, self.serves, before and before[1]}
        for path in [path for path in self._folder.iterdir() if path.name not in kept]:
            remove(path)
        return self.serves

    def _before(self, version: Version, served: str | None) -> tuple[Path, str] | None:
        """What to go back to: the version that served, else the parent, where it is whole."""
        for name in (served, version.parent):
            with suppress(ValueError):
                if name and name != version.name:
                    return self._exported(self._registry.version(name)), name
        return None

    def _note(self, name: str | None) -> None:
        if name != self.serves:
            self._registry.note_served(name)
        self.serves = name

    def _exported(self, version: Version) -> Path:
        """The folder of `version` for the engine, which is written once.

        Raises ValueError for a version that is damaged.
        """
        path = self._folder / version.name
        if not path.is_dir():
            self._registry.read(version)
            self._write(version, path)
        return path


class Command:
    """An engine to which the user's own command line brings a version.

    It gets DRAFTKIT_DRAFT (the folder), DRAFTKIT_VERSION and DRAFTKIT_ROUTE, and has failed where
    its exit status is not 0, or after so many `seconds`. Whoever is told to stop waits for it: a
    restart that is half done serves nobody.
    """

    def __init__(self, command: str, route: str, *, seconds: float = COMMAND_SECONDS) -> None:
        self._command, self._route, self._seconds = command, route, seconds
        self._served: str | None = None

    def serves(self) -> str | None:
        return self._served

    def push(self, folder: Path, name: str, before: tuple[Path, str] | None) -> None:
        self._served = None
        given = {"DRAFT": str(folder), "VERSION": name, "ROUTE": self._route}
        process = subprocess.Popen(
            self._command,
            shell=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {f"DRAFTKIT_{key}": value for key, value in given.items()},
            start_new_session=True,  # it ends with all that it started
        )
        try:
            status = process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise ValueError(
                f"online.command did not end within {self._seconds:.0f} s with {name}"
            ) from None
        if status != 0:
            raise ValueError(f"online.command ended with status {status} for {name}")
        self._served = name


class Vllm:
    """A vLLM in development mode, whose workers have the extension `engines.push_vllm`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def serves(self) -> str | None:
        return self._call("draftkit_version")[0]["version"] or None

    def push(self, folder: Path, name: str, before: tuple[Path, str] | None) -> None:
        self._call("draftkit_read", str(folder))  # refuses a drafter of other shapes
        with self._paused():
            try:
                self._load(folder, name)
            except Mismatch as error:
                if before is not None:
                    with suppress(ValueError):
                        self._load(*before)
                        error.served = before[1]
                raise

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Requests wait meanwhile. They go on in the end, whatever happens."""
        try:
            self._post("/pause?mode=keep")
            yield
        except BaseException:
            with suppress(ValueError):  # the first error is the one that counts
                self._post("/resume")
            raise
        self._post("/resume")

    def _load(self, folder: Path, name: str) -> None:
        """Load, and read back. Raises Mismatch where something else computes."""
        sums = {file.name: sha256_file(file) for file in folder.glob("*.safetensors")}
        self._call("draftkit_push", str(folder), json.dumps(sums))
        # Cached prefixes of older weights are exact, but accepted less.
        if not self._post("/reset_prefix_cache").get("success"):  # as requests hold parts of them
            with suppress(ValueError):
                self._post("/reset_prefix_cache?reset_running_requests=true")
        read = self._call("draftkit_read", str(folder))
        if wrong := differing(folder, [entry for worker in read for entry in worker["read"]]):
            others = f" and {len(wrong) - 1} more tensors" * (len(wrong) > 1)
            raise Mismatch(f"the engine does not compute with {wrong[0]}{others} of {name}")
        self._call("draftkit_version", name)

    def _call(self, method: str, *words: str) -> list[dict[str, Any]]:
        """What each worker answers. Raises Mismatch for an error of one."""
        body = {"method": method, "args": list(words)}
        answers = self._post("/collective_rpc", body)["results"]
        for error in (one["error"] for one in answers if "error" in one):
            raise Mismatch(f"{self._endpoint.url} cannot take the drafter: {error}")
        return answers

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        response, route = self._endpoint.ask(path, body or {}, optional=True), path.split("?")[0]
        if response.status_code == 404:
            advice = "start vLLM with VLLM_SERVER_DEV_MODE=1"
            raise self._endpoint.failure(f"has no {route}: {advice}")
        if "has no attribute 'draftkit_" in response.text:
            advice = "start vLLM with --worker-extension-cls push_vllm.Push"
            raise self._endpoint.failure(f"cannot be pushed to: {advice}")
        try:
            if response.is_success:
                return response.json()
        except OTHERWISE:
            pass
        text = " ".join(response.text.split())[:200]
        raise self._endpoint.failure(f"answers {route} by status {response.status_code}: {text}")


def differing(folder: Path, read: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of those tensors in `folder` that are not what was `read` (entries of
    `draftkit_read`, of all workers), or of which no worker has some part."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= safetensors.torch.load_file(file)
    weights.pop(NOT_READ, None)
    parts, wrong = {name: dict[str, int]() for name in weights}, set[str]()
    for entry in read:
        rows, columns = slice(*entry["rows"]), slice(*entry["columns"])
        part = weights[entry["name"]][rows]
        if part.dim() > 1:
            part = part[:, columns]
        if digest(part.to(getattr(torch, entry["dtype"]))) != entry["sha256"]:
            wrong.add(entry["name"])
        size = (rows.stop - rows.start) * (columns.stop - columns.start)
        parts[entry["name"]][f"{rows} {columns}"] = size  # workers may share one
    return [
        name
        for name, tensor in weights.items()
        if name in wrong or sum(parts[name].values()) < tensor.numel()
    ]
