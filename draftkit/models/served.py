"""The sampling that a model's authors advise: what its generation_config.json says of it.

Servers such as vLLM take these keys where a request has none, so a drafter is trained and judged
under them (`sampling.from=model`). Reads one small file, and no weights.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from draftkit.artifacts import first_line
from draftkit.config import SamplingConfig, TargetConfig
from draftkit.hub import hub_has
from draftkit.models.loading import check_folder

FILE = "generation_config.json"
KEYS = tuple(one.name for one in fields(SamplingConfig))


def served_sampling(target: TargetConfig, given: Mapping[str, Any]) -> tuple[SamplingConfig, str]:
    """The sampling of `target`'s file, and a line that says where each part of it comes from.

    What is `given` wins; what neither names has the default of `SamplingConfig`. Raises ValueError
    naming the file, or `target.path`, for what cannot be read.
    """
    content, file = _content(target), f"{target.path}/{FILE}"
    advised: dict[str, Any] = {
        name: _number(content[name], name, file)
        for name in KEYS
        if name not in given and content is not None and content.get(name) is not None
    }
    origin = f"{', '.join(advised)} of {file}" if advised else f"{file} has no other key of it"
    if content is None:
        origin = f"{target.path} has no {FILE}"
    elif content.get("do_sample") is False and "temperature" not in given:
        advised["temperature"] = 0.0
        origin = f"{file} has do_sample: false, which is greedy"
    try:
        sampling = SamplingConfig(**advised | dict(given))
    except ValueError as error:
        raise ValueError(f"{file}: {error}: correct it, or give that key yourself") from error
    parts = ", ".join(f"{name} {getattr(sampling, name):g}" for name in KEYS)
    own = f" ({', '.join(given)} as given)" if given else ""
    if content is not None and sampling.temperature > 0 and "top_k" not in {**advised, **given}:
        origin += "; no top_k there: all ids, where `generate` of transformers would take 50"
    return sampling, f"sampling.from=model: {parts}{own}; {origin}"


def _number(value: Any, name: str, file: str) -> Any:
    """The value of `name`, of the type that `SamplingConfig` has for it."""
    kind = type(getattr(SamplingConfig(), name))
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise ValueError(f"{file}: {name} is {value!r}: correct it, or give sampling.{name}=...")
    return kind(value)


def _content(target: TargetConfig) -> dict[str, Any] | None:
    """What the file of `target` holds, None where there is none."""
    if target.path is None:
        return None
    check_folder(target)
    path, name, revision = Path(target.location) / FILE, target.location, target.revision
    local = path.parent.is_dir()
    if not (path.exists() if local else hub_has(name, FILE, section="target", revision=revision)):
        return None
    try:
        path = path if local else Path(str(cached_file(name, FILE, revision=revision)))
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"sampling.from=model: cannot read {FILE} of target.path {target.path} "
            f"({first_line(error)}): mend or fetch it, or use sampling.from=config"
        ) from error
