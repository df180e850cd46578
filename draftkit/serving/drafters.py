"""The drafters of every route: which version is in force, and how a new one comes into force.

Each route has one proposer of the decoder. A watcher thread looks at the registry, reads and checks
versions beside the rounds; the weights are copied in place by the thread that decodes, between two
rounds, and read back. What is corrupt, foreign or of another shape is refused and told; serving
goes on. Whether a version is any good is the daemon's to judge. Knows no requests and no HTTP.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from draftkit.config import DraftConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import Proposer
from draftkit.models.adapter import by_name
from draftkit.models.compatibility import check_same_architecture
from draftkit.models.files import ModelFolder
from draftkit.online.registry import Registry

POLL_SECONDS = 0.5  # how often a new version is looked for
START = "start"  # the version of weights that no registry has published
log = logging.getLogger(__name__)


@dataclass
class Route:
    """One route's drafter, known to the decoder by the route's name.

    One without a draft model has no weights to replace, and so no `registry` to follow. shape: the
    drafter's configuration, which that of every version must equal; None: versions have none.
    """

    name: str
    proposer: Proposer
    registry: Registry | None = None
    shape: PreTrainedConfig | None = None
    seen: str = ""  # the version that has been looked at
    trouble: str = ""  # with the registry, as it was told

    def __post_init__(self) -> None:
        self.proposer.version = self.proposer.version or START


class Drafters:
    """All routes, and the thread that follows their registries; see the module's docstring.

    Methods marked so are for the thread that decodes; the others for any.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = {route.name: route for route in routes}
        self.swaps = self.refused = 0  # versions
        self.last_swap_seconds = 0.0  # for which the rounds waited
        # What waits to be copied between two rounds: the route, the version, its weights, and
        # copies of what they replace.
        self._offer: tuple[Route, str, dict[str, Tensor], dict[str, Tensor]] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # For the thread that decodes

    def attach(self, decoder: Decoder) -> None:
        for route in self.routes.values():
            decoder.attach(route.name, route.proposer)
        self._decoder = decoder

    @torch.no_grad()
    def install(self) -> None:
        """Copy the weights that wait, if any; rows in flight go on and stay exact."""
        if self._offer is None:
            return
        route, version, weights, previous = self._offer
        before, started, reason = route.proposer.version, time.perf_counter(), ""
        try:
            self._decoder.swap(route.name, weights, version)
            if not same(route.proposer.weights(), weights):
                reason = "its weights read back other than they were written"
        except Exception as error:  # whatever it is, the rounds go on with what was in force
            reason = f"it could not be copied: {error}"
        if reason:
            self._decoder.swap(route.name, previous, before)
            self._refuse(route, version, reason)
        else:
            self.swaps += 1
        self.last_swap_seconds = time.perf_counter() - started
        self._offer = None  # only now is another one made

    # For any thread

    @property
    def waits(self) -> bool:
        """Whether there is something to install."""
        return self._offer is not None

    def versions(self) -> dict[str, str]:
        """The version in force on each route."""
        return {name: route.proposer.version for name, route in self.routes.items()}

    def start(self, wake: Callable[[], None]) -> None:
        """Follow the registries from now on; `install` must be called between rounds.

        `wake` is called when weights wait for it.
        """

        def watch() -> None:
            while not self._stopping.wait(POLL_SECONDS):
                self.poll()

        self._wake = wake
        self._thread = threading.Thread(target=watch, name="drafters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> None:
        """Follow every registry, once, unless a version waits to be installed."""
        for route in self.routes.values():
            if route.registry is not None and self._offer is None:
                try:
                    self._follow(route, route.registry)
                    route.trouble = ""
                except Exception as error:  # a registry out of reach is tried again, and told once
                    if str(error) != route.trouble:
                        log.exception("route %s: its registry cannot be followed", route.name)
                    route.trouble = str(error)

    def _follow(self, route: Route, registry: Registry) -> None:
        """Read and check the current version once: it waits for `install`, or is refused."""
        version = registry.current()
        if version is None or version.name == route.seen:
            return
        if version.name != route.proposer.version:
            own = route.proposer.weights()
            try:
                given = registry.read(version)  # which looks at all checksums
                if route.shape is not None:
                    stored = ModelFolder(DraftConfig(path=str(version.path))).config
                    check_same_architecture(route.shape, stored)
                weights = fitted(own, given)
            except ValueError as error:
                self._refuse(route, version.name, str(error))
            else:
                previous = {name: tensor.clone() for name, tensor in own.items()}
                self._offer = (route, version.name, weights, previous)
                if self._thread is None:  # no other thread decodes
                    self.install()
                else:
                    self._wake()
        route.seen = version.name

    def _refuse(self, route: Route, version: str, reason: str) -> None:
        self.refused += 1
        names = (route.name, version, route.proposer.version)
        log.error("route %s: version %s is refused, %s goes on: %s", *names, reason)


def fitted(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`given` as it can be copied into `own`: whole, on its device and in its precision.

    Copies to a device run beside what else it does, and have arrived when this returns. Raises
    ValueError as `by_name` does, and naming the first tensor that is not finite.
    """
    wanted = by_name(own, given)
    device = next(iter(own.values())).device
    with torch.cuda.stream(_side_stream(device) if device.type == "cuda" else None):
        copies = {name: new.to(own[name].device, own[name].dtype) for name, new in wanted.items()}
        # Read at once: to look at a number on a device is to wait for it.
        finite = torch.stack([torch.isfinite(new).all() for new in copies.values()]).tolist()
    for name, is_finite in zip(copies, finite, strict=True):
        if not is_finite:
            raise ValueError(f"{name} holds numbers that are not finite")
    return copies


def same(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> bool:
    """Whether every tensor of `own` holds exactly what is `given`."""
    if not any(tensor.is_cuda for tensor in own.values()):
        return all(torch.equal(tensor, given[name]) for name, tensor in own.items())
    equal = [(tensor == given[name]).all() for name, tensor in own.items()]
    return bool(torch.stack(equal).all())


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """For work that rounds on `device` do not wait for."""
    return torch.cuda.Stream(device)
