"""What tests need of a service: its models, its fingerprints, and what lies in its folder."""

from draftkit.config import Config
from draftkit.models.loading import load_outline
from draftkit.online.buffer import Buffer
from draftkit.online.registry import Registry
from pipelines import service
from pipelines.plan import DRAFT_MODEL, TARGET_MODEL
from pipelines.product import Stage
from pipelines.stage import StageFolder, inputs_of

PAIR = Stage(name="test", inputs=(TARGET_MODEL, DRAFT_MODEL))


def pair_of(config: Config) -> StageFolder:
    """Target and starting draft, made first where they are missing."""
    return inputs_of(PAIR, config)


def buffer_of(config: Config) -> Buffer:
    """The traffic buffer of `config`."""
    return service.buffer_of(config, service.checksums_of(config, pair_of(config)))


def seeded_registry(config: Config, route: str = "default") -> Registry:
    """The drafter versions of a route, begun with the starting drafter."""
    pair = pair_of(config)
    start, outline = (
        pair.model(config, "draft"),
        load_outline(pair.model(config, "target"), config.hardware),
    )
    fingerprints = service.checksums_of(config, pair)
    return service.seeded_registry(config, route, start, outline, fingerprints)
