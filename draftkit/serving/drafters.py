"""The drafters of every route: which version is in force, and how a new one comes into force.

Each route has one proposer of the decoder. A watcher thread looks at the registry, reads and checks
versions beside the rounds; the weights are copied in place by the thread that decodes, between two
rounds, and read back. What is corrupt, foreign or of another shape is refused and told; serving
goes on. Whether a version is any good is the daemon's to judge. Knows no requests and no HTTP.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import Proposer
from draftkit.online.registry import Registry, Version
from draftkit.serving.weights import fitted, same

START = "start"  # the version of weights that no registry has published
log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The watching ends while a version waits to be installed."""


class Route:
    """One route's drafter, known to the decoder by the route's name.

    One without a draft model has no weights to replace, and so no `registry` to follow.
    """

    def __init__(self, name: str, proposer: Proposer, registry: Registry | None = None) -> None:
        proposer.version = proposer.version or START
        assert registry is None or proposer.weights()
        self.name = name
        self.proposer = proposer
        self.registry = registry
        self.refused: set[str] = set()
        self.seen: Hashable = None  # the pointer that has been followed
        self.trouble = ""  # with the registry, as it was told


@dataclass
class Offer:
    """Weights that wait to be copied between two rounds."""

    route: Route
    version: str
    weights: dict[str, Tensor]
    previous: dict[str, Tensor]  # copies of what they replace
    done: threading.Event = field(default_factory=threading.Event)
    installed: bool = False


class Drafters:
    """All routes, and the thread that follows their registries; see the module's docstring.

    `wake` is called when weights wait for `install`. Methods marked so are for the thread that
    decodes; the others for any.
    """

    def __init__(self, routes: Iterable[Route], *, poll_seconds: float = 0.5) -> None:
        self.routes = {route.name: route for route in routes}
        self.swaps = self.refused = 0  # versions
        self.last_swap_seconds = 0.0  # for which the rounds waited
        self.wake: Callable[[], None] = lambda: None
        self._poll_seconds = poll_seconds
        self._offer: Offer | None = None
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
        if (offer := self._offer) is None:
            return
        self._offer = None  # there is no other before this one is done
        route, started = offer.route, time.perf_counter()
        before = route.proposer.version
        try:
            self._decoder.swap(route.name, offer.weights, offer.version)
            offer.installed = same(route.proposer.weights(), offer.weights)
        except Exception:  # whatever it is, the rounds go on with what was in force
            log.exception("version %s could not be copied", offer.version)
        if offer.installed:
            self.swaps += 1
        else:
            self._decoder.swap(route.name, offer.previous, before)
        self.last_swap_seconds = time.perf_counter() - started
        offer.done.set()

    # For any thread

    @property
    def waits(self) -> bool:
        """Whether there is something to install."""
        return self._offer is not None

    def versions(self) -> dict[str, str]:
        """The version in force on each route."""
        return {name: route.proposer.version for name, route in self.routes.items()}

    def start(self) -> None:
        """Follow the registries from now on; `install` must be called between rounds."""
        self._thread = threading.Thread(target=self._watch, name="drafters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            self.poll()

    def poll(self) -> None:
        """Follow every registry's pointer, once."""
        for route in self.routes.values():
            if route.registry is not None:
                try:
                    self._follow(route, route.registry)
                    route.trouble = ""
                except _Stopped:
                    return
                except Exception as error:  # a registry out of reach is tried again, and told once
                    if str(error) != route.trouble:
                        log.exception("route %s: its registry cannot be followed", route.name)
                    route.trouble = str(error)

    def _follow(self, route: Route, registry: Registry) -> None:
        pointer = registry.pointer()
        if pointer == route.seen:
            return
        current = registry.current()
        if current is not None and current.name not in (route.proposer.version, *route.refused):
            self._load(route, registry, current)
        route.seen = pointer

    def _load(self, route: Route, registry: Registry, version: Version) -> None:
        """Read, check and install `version`, or refuse it."""
        own = route.proposer.weights()
        try:
            weights = fitted(own, registry.read(version))
        except ValueError as error:
            reason = str(error)
        else:
            previous = {name: tensor.clone() for name, tensor in own.items()}
            offer = self._offer = Offer(route, version.name, weights, previous)
            if self._thread is None:  # no other thread decodes
                self.install()
            else:
                self.wake()
            while not offer.done.wait(0.1):
                if self._stopping.is_set():
                    raise _Stopped
            if offer.installed:
                return
            reason = "its weights read back other than they were written"
        route.refused.add(version.name)
        self.refused += 1
        names = (route.name, version.name, route.proposer.version)
        log.error("route %s: version %s is refused, %s goes on: %s", *names, reason)
