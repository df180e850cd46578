"""Whose run a folder of the library holds: one call's, told by what its outcome depends on."""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from draftkit.artifacts import fingerprint, first_line, read_json, write_json
from draftkit.config import Config, HardwareConfig, flatten
from draftkit.data.prompts import Example
from draftkit.models.files import commit_of, model_sha256
from draftkit.theory.divergences import Divergence


def claim(
    folder: Path,
    config: Config,
    texts: Mapping[str, Sequence[Example]],
    loss: Divergence | None,
) -> None:
    """Raise ValueError, naming what differs, where `folder` holds the run of another call.

    Models count by their content, wherever they lie; the loss of a caller by its source.
    """
    settings = flatten(asdict(replace(config, hardware=HardwareConfig())))
    for key in ("target", "draft"):
        model = getattr(config, key)
        local, code = Path(model.location).is_dir(), model.trust_remote_code
        known = model_sha256(Path(model.location), code=code) if local else commit_of(model)
        settings |= {f"{key}.path": known, f"{key}.revision": None}
    for key, examples in texts.items():
        rows = [[example.token_ids, example.loss_mask] for example in examples]
        settings[key] = fingerprint(rows)
    if loss is not None:
        settings["divergence"] = source_of(loss)
    path = folder / "settings.json"
    stored = read_json(path) if path.exists() else settings
    if others := [key for key in {**settings, **stored} if stored.get(key) != settings.get(key)]:
        raise ValueError(
            f"{folder} holds a run of other prompts or settings ({', '.join(others)}): "
            "give another folder"
        )
    write_json(path, settings)


def source_of(loss: Any) -> list[Any]:
    """What tells a function from others: its source, and the values that it was made with.

    What it finds in its module does not count. Raises ValueError where it cannot be told.
    """
    try:
        if not inspect.isfunction(loss):
            raise TypeError("it is no function")
        values = {str(index): value for index, value in enumerate(loss.__defaults__ or ())}
        values |= {**(loss.__kwdefaults__ or {}), **inspect.getclosurevars(loss).nonlocals}
        made = {
            name: source_of(value) if inspect.isfunction(value) else json.loads(json.dumps(value))
            for name, value in values.items()
        }
        return [inspect.getsource(loss), made]
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"divergence: {loss!r} cannot be told from another loss ({first_line(error)}), so that "
            "a folder could not hold its run alone: define it in a file, of numbers and texts, or "
            "leave folder out"
        ) from error
