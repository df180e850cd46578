"""Where a server and its refit loop meet: the folder `<root>/<name>/service/`.

`buffer.sqlite` is what was served, `drafters/<route>/` the versions of each route's drafter,
`pushed/<route>/` those that another engine loads. It is no stage: nothing in it is ever complete,
and either process may be started first, or killed. It is for one target and one starting drafter,
whose fingerprints the buffer and every version keep; with others it is refused, unless
`overwrite=true` clears it first.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from draftkit.artifacts import LOCK, locked, remove
from draftkit.config import Config, DraftConfig
from draftkit.evaluation.page import REPORT
from draftkit.models.compatibility import unknown_target
from draftkit.models.files import ModelFolder
from draftkit.models.loading import Outline, load_draft, save_draft
from draftkit.online.buffer import Buffer
from draftkit.online.push import PUSHED
from draftkit.online.registry import Registry
from draftkit.online.sink import Sink
from draftkit.serving.recorder import Recorder
from draftkit.tracking import FILE_NAME

from .product import SUMMARY
from .stage import StageFolder

BUFFER, DRAFTERS = "buffer.sqlite", "drafters"
SERVER, STATE = "server", "refit"  # folders that server and daemon hold; trainers' states too


def service_folder(config: Config) -> Path:
    """The folder of the experiment's service; nothing is made."""
    return Path(config.root) / config.name / "service"


def daemon_folder(config: Config) -> Path:
    """Where the daemon tells what it does: metrics and totals."""
    return Path(config.root) / config.name / "refit"


def buffer_of(config: Config, fingerprints: Mapping[str, str]) -> Buffer:
    """The traffic buffer of the service.

    `fingerprints`: checksums of `target` and `draft`. Raises ValueError naming the keys, where the
    records are of another target, starting drafter or `online.buffer.top_k`.
    """
    settings = config.online.buffer
    return Buffer(
        service_folder(config) / BUFFER,
        settings,
        gate_fraction=config.online.gate.fraction,
        fingerprints={**fingerprints, "online.buffer.top_k": str(settings.top_k)},
    )


def recorder_of(config: Config, buffer: Buffer, target: str) -> Recorder:
    """What writes to `buffer`, and to the address of `online.sink`, where there is one.

    target: the checksum of the model that answers.
    """
    address = config.online.sink
    sink = None if address is None else Sink(address, target)
    return Recorder(buffer, config.online.buffer, sink)


def checksums_of(config: Config, made: StageFolder) -> dict[str, str]:
    """The fingerprints of a service: checksums of target and starting draft.

    Raises ValueError for a head that was made for another target, unless `draft.accept_target`.
    """
    draft = made.model(config, "draft")
    text = unknown_target(draft, ModelFolder(draft).config, made.digests["target"])
    if text and config.decode.has_drafter and not draft.accept_target:
        raise ValueError(text)
    return {key: made.digests[key] for key in ("target", "draft")}


def registry_of(
    config: Config, route: str, fingerprints: Mapping[str, str] | None = None
) -> Registry:
    """The drafter versions of a route; there may be none yet."""
    return Registry(service_folder(config) / DRAFTERS, route, fingerprints=fingerprints)


def seeded_registry(
    config: Config,
    route: str,
    start: DraftConfig,
    outline: Outline,
    fingerprints: Mapping[str, str],
) -> Registry:
    """The drafter versions of a route, of which the first is the starting drafter `start`.

    `fingerprints`: checksums of `target` and `draft`. Raises ValueError naming the keys, where the
    versions are of another target or starting drafter.
    """
    registry = registry_of(config, route, fingerprints)

    def write(folder: Path) -> None:
        draft = load_draft(start, outline, dtype=torch.float32)
        save_draft(draft, outline.tokenizer, folder)

    registry.seed(write)
    return registry


def clear_service(config: Config, *roles: str) -> None:
    """Delete records, versions, trainers' states, the daemon's account of them and its page.

    `roles`: those of `SERVER` and `STATE` that the caller does not hold. Raises ValueError where
    another process holds one: then nothing is deleted. A kill inside leaves a part, which is
    refused with other models as the whole would be.
    """
    folder, account = service_folder(config), daemon_folder(config)
    with ExitStack() as stack:
        for role in roles:
            stack.enter_context(locked(folder / role))
        states = [path for path in (folder / STATE).iterdir() if path.name != LOCK]
        logs = sorted(folder.glob(f"{BUFFER}*"), reverse=True)  # before their file
        drafters = (folder / DRAFTERS, folder / PUSHED)
        written = account / SUMMARY, account / FILE_NAME, folder / REPORT
        for path in (*states, *drafters, *written, *logs):
            remove(path)
