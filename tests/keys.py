"""The keys of summaries, which other tools read: they may become more, none may leave.

keys.json is one sorted list, `stage key.inner key`; of `compare` it has the columns of its table.
"""

from pathlib import Path
from typing import Any

from draftkit.artifacts import read_json

GOLDEN: list[str] = read_json(Path(__file__).with_name("keys.json"))


def key_paths(value: Any, depth: int = 2) -> list[str]:
    """Keys of a mapping, and of those in it; lists and deeper mappings are values."""
    if not isinstance(value, dict) or depth == 0:
        return []
    return [
        path
        for key, inner in value.items()
        for path in (key, *(f"{key}.{below}" for below in key_paths(inner, depth - 1)))
    ]


def missing_keys(stage: str, summary: dict[str, Any]) -> list[str]:
    """The keys that a summary of `stage` must have and has not."""
    found = {f"{stage} {path}" for path in key_paths(summary)}
    wanted = {line for line in GOLDEN if line.startswith(f"{stage} ")}
    assert wanted, stage
    return sorted(wanted - found)
