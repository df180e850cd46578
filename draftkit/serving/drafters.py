"""The drafters of every route: which version is in force, and how a new one comes into force.

Each route has two proposers of the decoder: `current`, and `candidate` for a version that is tried
on a few rows first. A watcher thread looks at the registry, reads and checks versions beside the
rounds; the weights are copied in place by the thread that decodes, between two rounds, and read
back. What is corrupt, foreign or of another shape is refused and told; serving goes on.
Knows no requests and no HTTP.
"""

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftkit.config import GateConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import Proposer
from draftkit.online.registry import Registry, Version
from draftkit.serving.canary import Served, Verdict, give_up, judge
from draftkit.serving.weights import fitted, same

START = "start"  # the version of weights that no registry has published
log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The watching ends while a version waits to be installed."""


class Swapper(Protocol):
    """Who can copy weights between rounds: a decoder."""

    def swap(self, proposer_id: str, state_dict: dict[str, Tensor], version: str) -> None:
        """Copy them in place."""
        ...


@dataclass
class Role:
    """One proposer of a route and the version whose weights it has."""

    proposer_id: str
    proposer: Proposer
    version: Version | None = None  # None: none of a registry
    served: Served = field(default_factory=Served)  # by this version


@dataclass
class Offer:
    """Weights that wait to be copied between two rounds."""

    role: Role
    version: Version
    weights: dict[str, Tensor]
    previous: dict[str, Tensor]  # copies of what they replace
    done: threading.Event = field(default_factory=threading.Event)
    installed: bool = False


class Route:
    """One route's drafters. `make` makes a proposer with the starting weights.

    One without a draft model has no weights to replace, and so no `registry` to follow.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Proposer],
        registry: Registry | None = None,
    ) -> None:
        def role(kind: str) -> Role:
            proposer = make()
            proposer.version = proposer.version or START
            return Role(f"{name}/{kind}", proposer)

        self.name = name
        self.registry = registry
        self.current = role("current")
        assert registry is None or self.current.proposer.weights()
        self.candidate = None if registry is None else role("candidate")
        self.tries = False  # whether the candidate gets rows
        self.rows = 0  # that have begun since it does
        self.before: tuple[Version, Served] | None = None  # what a version on trial replaced
        self.refused: set[str] = set()
        self.seen: Hashable = None  # the pointers that have been followed
        self.trouble = ""  # with the registry, as it was told

    @property
    def roles(self) -> list[Role]:
        """The current one, and the candidate if there can be one."""
        return [role for role in (self.current, self.candidate) if role is not None]


class Drafters:
    """All routes, and the thread that follows their registries; see the module's docstring.

    `wake` is called when weights wait for `install`. Methods marked so are for the thread that
    decodes; the others for any.
    """

    def __init__(
        self,
        routes: Iterable[Route],
        gate: GateConfig,
        *,
        poll_seconds: float = 0.5,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.routes = {route.name: route for route in routes}
        self.swaps = self.refused = 0  # versions
        self.last_swap_seconds = 0.0  # for which the rounds waited
        self.wake: Callable[[], None] = lambda: None
        self._gate = gate
        self._poll_seconds = poll_seconds
        self._draw = draw
        self._swapper: Swapper | None = None
        self._offers: deque[Offer] = deque()
        self._lock = threading.Lock()  # of what is served and counted
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._installs_itself = True  # while no other thread decodes

    # For the thread that decodes

    def attach(self, decoder: Decoder) -> None:
        for route in self.routes.values():
            for role in route.roles:
                decoder.attach(role.proposer_id, role.proposer)
        self._swapper = decoder

    def choose(self, route: str, *, seeded: bool) -> str:
        """The proposer of a new row. A seeded one gets the current version, so that it repeats."""
        found = self.routes[route]
        found.rows += 1
        role = found.candidate
        if role is None or not found.tries or seeded:
            return found.current.proposer_id
        tries = self._draw() < self._gate.canary_fraction
        return role.proposer_id if tries else found.current.proposer_id

    def install(self) -> None:
        """Copy the weights that wait, if any; rows in flight go on and stay exact."""
        while self._offers:
            self._install(self._offers.popleft())

    def observe(self, route: str, version: str, *, tested: int, acceptance: float) -> None:
        """Take in a finished row that one version alone drafted for, without a seed."""
        with self._lock:
            for role in self.routes[route].roles:
                if role.version is not None and role.version.name == version:
                    role.served.add(tested, acceptance)
                    return

    # For any thread

    @property
    def waits(self) -> bool:
        """Whether there is something to install."""
        return bool(self._offers)

    def versions(self) -> dict[str, str]:
        """The version in force on each route."""
        return {name: route.current.proposer.version for name, route in self.routes.items()}

    def start(self) -> None:
        """Follow the registries from now on; `install` must be called between rounds."""
        self._installs_itself = False
        self._thread = threading.Thread(target=self._watch, name="drafters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> None:
        """Follow every registry's pointers and judge what is on trial, once."""
        for route in self.routes.values():
            if route.registry is not None and route.candidate is not None:
                try:
                    self._follow(route, route.registry, route.candidate)
                    self._judge(route, route.registry, route.candidate)
                    route.trouble = ""
                except _Stopped:
                    return
                except Exception as error:  # a registry out of reach is tried again, and told once
                    if str(error) != route.trouble:
                        log.exception("route %s: its registry cannot be followed", route.name)
                    route.trouble = str(error)

    def _watch(self) -> None:
        while not self._stopping.wait(self._poll_seconds):
            self.poll()

    # Following

    def _follow(self, route: Route, registry: Registry, candidate: Role) -> None:
        pointers = registry.pointers()
        if pointers == route.seen:
            return
        current, tried = registry.current(), registry.candidate()
        if current is not None and self._is_new(route, route.current, current):
            self._replace(route, registry, current)
        if tried is None or (current is not None and tried.name == current.name):
            route.tries = False
        else:
            self._try(route, registry, candidate, tried)
        route.seen = pointers

    def _is_new(self, route: Route, role: Role, version: Version) -> bool:
        in_force = None if role.version is None else role.version.name
        return version.name != in_force and version.name not in route.refused

    def _replace(self, route: Route, registry: Registry, version: Version) -> None:
        """Bring `version` into force, on trial where no candidate came before it."""
        role = route.current
        before = role.version
        with self._lock:
            served = role.served.copy()
        if not self._load(route, registry, role, version):
            return
        is_next = before is not None and before.name in version.ancestors
        on_trial = is_next and self._gate.canary_fraction == 0
        route.before = (before, served) if before is not None and on_trial else None

    def _try(self, route: Route, registry: Registry, role: Role, version: Version) -> None:
        """Let `version` have its share of the rows, or all of them where nothing is tried first."""
        is_new = self._is_new(route, role, version)
        if is_new:
            route.tries = False
            self._load(route, registry, role, version)
        if version.name in route.refused:
            registry.withdraw(version.name, reason="refused by the server: its weights do not fit")
        elif self._gate.canary_fraction == 0:
            registry.promote(version.name)
        else:
            if is_new:
                with self._lock:
                    route.current.served = Served()  # both see the same traffic from now on
                    route.rows = 0
            route.tries = True

    def _load(self, route: Route, registry: Registry, role: Role, version: Version) -> bool:
        """Read, check and install `version`; False if it was refused."""
        try:
            own = role.proposer.weights()
            weights = fitted(own, registry.read(version))
        except ValueError as error:
            self._refuse(route, version, str(error))
            return False
        offer = Offer(role, version, weights, {name: own[name].clone() for name in own})
        self._offers.append(offer)
        if self._installs_itself:
            self.install()
        else:
            self.wake()
        while not offer.done.wait(0.1):
            if self._stopping.is_set():
                raise _Stopped
        if not offer.installed:
            self._refuse(route, version, "its weights read back other than they were written")
        return offer.installed

    def _refuse(self, route: Route, version: Version, reason: str) -> None:
        route.refused.add(version.name)
        with self._lock:
            self.refused += 1
        serving = route.current.proposer.version
        log.error(
            "route %s: version %s is refused, %s goes on: %s",
            route.name,
            version.name,
            serving,
            reason,
        )

    @torch.no_grad()
    def _install(self, offer: Offer) -> None:
        role, swapper = offer.role, self._swapper
        assert swapper is not None
        started = time.perf_counter()
        before = role.proposer.version
        try:
            swapper.swap(role.proposer_id, offer.weights, offer.version.name)
            offer.installed = same(role.proposer.weights(), offer.weights)
        except Exception:  # whatever it is, the rounds go on with what was in force
            log.exception("version %s could not be copied", offer.version.name)
        if not offer.installed:
            swapper.swap(role.proposer_id, offer.previous, before)
        with self._lock:
            if offer.installed:
                self.swaps += 1
                role.version, role.served = offer.version, Served()
            self.last_swap_seconds = time.perf_counter() - started
        offer.done.set()

    # Judging

    def _judge(self, route: Route, registry: Registry, candidate: Role) -> None:
        if route.tries and candidate.version is not None:
            verdict = self._verdict(candidate, route.current.served) or give_up(
                new=candidate.served,
                rows=route.rows,
                share=self._gate.canary_fraction,
                positions=self._gate.canary_tokens,
            )
            if verdict is None:
                return
            if verdict.stays:
                registry.promote(candidate.version.name)
            else:
                registry.withdraw(candidate.version.name, reason=verdict.reason)
            route.tries = False
            self._tell(route, candidate.version, verdict)
            self._follow(route, registry, candidate)
        elif route.before is not None and route.current.version is not None:
            version, (before, served) = route.current.version, route.before
            verdict = self._verdict(route.current, served)
            if verdict is None:
                return
            if not verdict.stays:
                registry.rollback(before.name, reason=verdict.reason)
            route.before = None
            self._tell(route, version, verdict)
            self._follow(route, registry, candidate)

    def _verdict(self, role: Role, old: Served) -> Verdict | None:
        with self._lock:
            new, old = role.served.copy(), old.copy()
        return judge(new=new, old=old, positions=self._gate.canary_tokens)

    def _tell(self, route: Route, version: Version, verdict: Verdict) -> None:
        fate = "stays" if verdict.stays else "goes"
        log.warning("route %s: version %s %s: %s", route.name, version.name, fate, verdict.reason)
