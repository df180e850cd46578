"""Small drafters to publish, and short ways to do so."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from draftkit.online.registry import Registry, Version

TOLD = {"metrics": {"alpha": 0.5}}


def weights(value: float) -> Callable[[Path], None]:
    """A drafter in two files, with a tokenizer beside it."""

    def write(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        for part in (1, 2):
            tensors = {f"layer{part}": torch.full((3, part), float(value))}
            save_file(tensors, folder / f"model-{part}.safetensors")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocabulary.json").write_text(f"[{value}]")

    return write


def publish(registry: Registry, value: float, **more: str) -> Version:
    """A version of that value."""
    return registry.publish(weights(value), **TOLD, **more)


def chain(registry: Registry, count: int) -> list[Version]:
    """The seed and what is published after it, `count` in all."""
    return [registry.seed(weights(0)), *(publish(registry, n) for n in range(1, count))]


def name_of(version: Version | None) -> str | None:
    """Its name, if there is one."""
    return None if version is None else version.name
