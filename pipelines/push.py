"""How the daemon's versions reach an engine that is not draftkit's: `online.push`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from draftkit.config import Config
from draftkit.endpoint import Endpoint
from draftkit.engines.folder import write_folder
from draftkit.models.loading import Outline, with_path
from draftkit.online.push import PUSHED, Command, Delivery, Engine, Vllm
from draftkit.online.registry import Registry, Version

from .export import check as check_exported
from .service import service_folder
from .stage import StageFolder

RETRIES = 2  # of a request to the engine, which may be starting


def check_pushed(config: Config) -> None:
    """Raise ValueError for a drafter that no engine loads, or an engine without an address."""
    if config.online.push == "none":
        return
    check_exported(config)
    if config.online.push == "vllm" and config.engine.url is None:
        raise ValueError("online.push=vllm: name the engine by engine.url=http://127.0.0.1:8000")


def let_go_on(config: Config) -> None:
    """Let an engine that a killed daemon left paused answer again: it may be asked for scores."""
    if config.online.push == "vllm":
        assert config.engine.url is not None
        with Endpoint("engine.url", config.engine.url) as endpoint, suppress(ValueError):
            endpoint.ask("/resume", {}, optional=True)


@contextmanager
def bringing(
    config: Config,
    made: StageFolder,
    target: Outline,
    registries: Sequence[Registry],
    note: Callable[[], None],
) -> Iterator[Callable[[str], bool]]:
    """What brings the version in force of a route to its engine, if any, and says so.

    It returns whether that is there. note: is called when another one serves.
    """
    start, owner = made.model(config, "draft"), made.model(config, "target")

    def write(version: Version, folder: Path) -> None:
        draft, gamma = with_path(start, version.path), max(1, config.proposals)
        write_folder(draft, owner, folder, gamma=gamma, untied=True, owner=target)

    deliveries: dict[str, Delivery] = {}

    def bring(route: str) -> bool:
        if route not in deliveries:
            return True
        delivery, before = deliveries[route], deliveries[route].serves
        if (name := delivery.bring()) is not None:
            print(f"online: {route}: the engine serves {name}", flush=True)
        if delivery.serves != before:
            note()
        return delivery.is_there

    with ExitStack() as stack:
        for registry in registries:
            route = registry.path.name
            if registry.served() is not None:  # which another daemon knew
                registry.note_served(None)
            if config.online.push != "none":
                folder = service_folder(config) / PUSHED / route
                engine = engine_of(config, route, stack)
                deliveries[route] = Delivery(route, registry, engine, write=write, folder=folder)
        yield bring


def engine_of(config: Config, route: str, stack: ExitStack) -> Engine:
    """Where the versions of `route` go, until the end of `stack`."""
    if config.online.push == "command":
        assert config.online.command is not None
        return Command(config.online.command, route)
    assert config.engine.url is not None
    return Vllm(stack.enter_context(Endpoint("engine.url", config.engine.url, retries=RETRIES)))
