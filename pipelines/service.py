"""Where server and daemon meet: one folder with the traffic and the drafters.

    <root>/<name>/service/buffer.sqlite             what was served
    <root>/<name>/service/drafters/<route>/         versions, and which is in force

Either may be started first, and either may be killed.
"""

from pathlib import Path

from draftkit.config import Config
from draftkit.models.loading import Outline, load_draft, save_model
from draftkit.online.buffer import Buffer
from draftkit.online.registry import Registry
from pipelines.inputs import models


def service_folder(config: Config) -> Path:
    """The folder of the service, made if missing."""
    path = Path(config.root) / config.name / "service"
    path.mkdir(parents=True, exist_ok=True)
    return path


def open_buffer(config: Config) -> Buffer:
    """The traffic buffer of the service."""
    path = service_folder(config) / "buffer.sqlite"
    return Buffer(path, config.online.buffer, gate_fraction=config.online.gate.fraction)


def open_registry(config: Config, route: str) -> Registry:
    """The drafters of a route; there may be none yet."""
    return Registry(service_folder(config) / "drafters", route)


def seed_registry(config: Config, route: str, outline: Outline) -> Registry:
    """The drafters of a route; the first version is the starting drafter."""
    registry = open_registry(config, route)
    if registry.current() is None:
        draft = load_draft(models(config)[1], outline)

        registry.seed(
            lambda folder: save_model(
                draft.model, outline.tokenizer, folder, kept_ids=draft.kept_ids
            )
        )
    return registry
