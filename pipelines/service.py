"""Where a server and its refit loop meet: the folder `<root>/<name>/service/`.

`buffer.sqlite` is what was served, `drafters/<route>/` the versions of each route's drafter. It is
no stage: nothing in it is ever complete, and either process may be killed at any moment.
"""

from pathlib import Path

from draftkit.config import Config
from draftkit.online.buffer import Buffer
from draftkit.online.registry import Registry


def service_folder(config: Config) -> Path:
    """The folder of the experiment's service, made if it is not there."""
    folder = Path(config.root) / config.name / "service"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def buffer_of(config: Config) -> Buffer:
    """The traffic buffer of the service."""
    path = service_folder(config) / "buffer.sqlite"
    return Buffer(path, config.online.buffer, gate_fraction=config.online.gate.fraction)


def registry_of(config: Config, route: str) -> Registry:
    """The drafter versions of a route."""
    return Registry(service_folder(config) / "drafters", route)
