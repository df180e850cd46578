"""Where a server and its refit loop meet: the folder `<root>/<name>/service/`.

`buffer.sqlite` is what was served, `drafters/<route>/` the versions of each route's drafter. It is
no stage: nothing in it is ever complete, and either process may be started first, or killed.
"""

from pathlib import Path

import torch

from draftkit.config import Config
from draftkit.models.loading import Outline, load_draft, save_model
from draftkit.online.buffer import Buffer
from draftkit.online.registry import Registry
from pipelines.inputs import draft_of


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
    """The drafter versions of a route; there may be none yet."""
    return Registry(service_folder(config) / "drafters", route)


def seeded_registry(config: Config, route: str, outline: Outline) -> Registry:
    """The drafter versions of a route, of which the first is the starting drafter."""
    registry = registry_of(config, route)

    def write(folder: Path) -> None:
        draft = load_draft(draft_of(config), outline, dtype=torch.float32)
        save_model(draft.model, outline.tokenizer, folder, kept_ids=draft.kept_ids)

    registry.seed(write)
    return registry
