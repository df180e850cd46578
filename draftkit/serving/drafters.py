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
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftkit.config import GateConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import Proposer
from draftkit.online.registry import Registry, Version
from draftkit.serving.canary import AcceptanceLog, give_up, judge
from draftkit.serving.weights import fitted, same

START = "start"  # the version of weights that no registry has published
log = logging.getLogger(__name__)


class _Stopped(Exception):
    """The watching ends while a version waits to be installed."""


@dataclass
class Role:
    """One proposer of a route and the version whose weights it has."""

    proposer_id: str
    proposer: Proposer
    version: Version | None = None  # None: none of a registry
    acceptance: AcceptanceLog = field(default_factory=AcceptanceLog)  # of this version


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
        # What a version on trial has replaced, and how that was accepted.
        self.before: tuple[Version, AcceptanceLog] | None = None
        self.refused: set[str] = set()
        self.seen: Hashable = None  # the pointers that have been followed
        self.trouble = ""  # with the registry, as it was told

    @property
    def roles(self) -> list[Role]:
        """The current one, and the candidate if there can be one."""
        return [role for role in (self.current, self.candidate) if role is not None]

    def lacks(self, version: Version, role: Role) -> bool:
        """Whether `version` is to be loaded for `role`."""
        in_force = None if role.version is None else role.version.name
        return version.name != in_force and version.name not in self.refused


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
        self._offer: Offer | None = None
        self._lock = threading.Lock()  # of versions in force and how they are accepted
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    # For the thread that decodes

    def attach(self, decoder: Decoder) -> None:
        for route in self.routes.values():
            for role in route.roles:
                decoder.attach(role.proposer_id, role.proposer)
        self._decoder = decoder

    def choose(self, name: str, *, seeded: bool) -> str:
        """The proposer of a new row of the route `name`.

        A seeded one gets the current version, so that it repeats.
        """
        route = self.routes[name]
        route.rows += 1
        may_try = route.tries and not seeded
        if route.candidate is not None and may_try and self._draw() < self._gate.canary_fraction:
            return route.candidate.proposer_id
        return route.current.proposer_id

    @torch.no_grad()
    def install(self) -> None:
        """Copy the weights that wait, if any; rows in flight go on and stay exact."""
        if (offer := self._offer) is None:
            return
        self._offer = None  # there is no other before this one is done
        role, started = offer.role, time.perf_counter()
        before = role.proposer.version
        try:
            self._decoder.swap(role.proposer_id, offer.weights, offer.version.name)
            offer.installed = same(role.proposer.weights(), offer.weights)
        except Exception:  # whatever it is, the rounds go on with what was in force
            log.exception("version %s could not be copied", offer.version.name)
        if not offer.installed:
            self._decoder.swap(role.proposer_id, offer.previous, before)
        with self._lock:
            if offer.installed:
                self.swaps += 1
                role.version, role.acceptance = offer.version, AcceptanceLog()
            self.last_swap_seconds = time.perf_counter() - started
        offer.done.set()

    def observe(self, name: str, version: str, *, tested: int, acceptance: float) -> None:
        """Take in a finished row that one version alone drafted for, without a seed."""
        with self._lock:
            for role in self.routes[name].roles:
                if role.version is not None and role.version.name == version:
                    role.acceptance.add(tested, acceptance)
                    return

    # For any thread

    @property
    def waits(self) -> bool:
        """Whether there is something to install."""
        return self._offer is not None

    def versions(self) -> dict[str, str]:
        """The version in force on each route."""
        return {name: route.current.proposer.version for name, route in self.routes.items()}

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

    def _follow(self, route: Route, registry: Registry, candidate: Role) -> None:
        pointers = registry.pointers()
        if pointers == route.seen:
            return
        current, tried = registry.current(), registry.candidate()
        if current is not None and route.lacks(current, route.current):
            before, acceptance = route.current.version, route.current.acceptance
            if self._load(route, registry, route.current, current):
                # On trial where no candidate came before it.
                on_trial = self._gate.canary_fraction == 0
                is_next = before is not None and before.name in current.ancestors
                route.before = (before, acceptance) if before and is_next and on_trial else None
        if tried is None or (current is not None and tried.name == current.name):
            route.tries = False
        else:
            self._try(route, registry, candidate, tried)
        route.seen = pointers

    def _try(self, route: Route, registry: Registry, role: Role, version: Version) -> None:
        """Let `version` have its share of the rows, or all of them where nothing is tried first."""
        is_new = route.lacks(version, role)
        if is_new:
            route.tries = False
            self._load(route, registry, role, version)
        if version.name in route.refused:
            registry.withdraw(version.name, reason="refused by the server: its weights do not fit")
        elif self._gate.canary_fraction == 0:
            registry.promote(version.name)
        else:
            if is_new:
                with self._lock:  # both see the same traffic from now on
                    route.current.acceptance = AcceptanceLog()
                    route.rows = 0
            route.tries = True

    def _load(self, route: Route, registry: Registry, role: Role, version: Version) -> bool:
        """Read, check and install `version`; False if it was refused."""
        own = role.proposer.weights()
        try:
            weights = fitted(own, registry.read(version))
        except ValueError as error:
            reason = str(error)
        else:
            previous = {name: tensor.clone() for name, tensor in own.items()}
            offer = self._offer = Offer(role, version, weights, previous)
            if self._thread is None:  # no other thread decodes
                self.install()
            else:
                self.wake()
            while not offer.done.wait(0.1):
                if self._stopping.is_set():
                    raise _Stopped
            if offer.installed:
                return True
            reason = "its weights read back other than they were written"
        route.refused.add(version.name)
        self.refused += 1
        log.error(
            "route %s: version %s is refused, %s goes on: %s",
            route.name,
            version.name,
            route.current.proposer.version,
            reason,
        )
        return False

    def _judge(self, route: Route, registry: Registry, candidate: Role) -> None:
        """Promote or withdraw a candidate, take back a version on trial, or leave that open."""
        gate, before = self._gate, None
        with self._lock:
            if route.tries:
                role, old = candidate, route.current.acceptance.copy()
            elif route.before is not None:
                role, (before, old) = route.current, route.before
            else:
                return
            new = role.acceptance.copy()
        verdict = judge(new=new, old=old, positions=gate.canary_tokens)
        if verdict is None and before is None:
            verdict = give_up(
                new=new,
                rows=route.rows,
                share=gate.canary_fraction,
                positions=gate.canary_tokens,
            )
        if verdict is None or role.version is None:
            return
        name = role.version.name
        if before is None and verdict.stays:
            registry.promote(name)
        elif before is None:
            registry.withdraw(name, reason=verdict.reason)
        elif not verdict.stays:
            registry.rollback(before.name, reason=verdict.reason)
        route.tries, route.before = False, None
        fate = "stays" if verdict.stays else "goes"
        log.warning("route %s: version %s %s: %s", route.name, name, fate, verdict.reason)
        self._follow(route, registry, candidate)
