"""A tiny pair on disk, and others of the same shape that are not to be taken for it."""

import shutil
from pathlib import Path

import torch

from draftkit.artifacts import read_json, write_json
from draftkit.models.loading import save_model
from draftkit.models.shrink import write_kept_ids
from tests import tiny
from tests.tiny import byte_tokenizer

PATHS = ["target.path={0}/target", "draft.path={0}/draft"]
# Models that are others than in the pair, by what is other about them.
OTHERS = {
    "target": ("target",),
    "tokenizer": ("target", "draft"),
    "draft": ("draft",),
    "kept_ids": ("draft",),
}


def save_pairs(folder: Path) -> None:
    """Target and draft below `folder/pair`, and below each of `OTHERS` with that one changed."""
    target = tiny.model()
    save_model(target, byte_tokenizer(), folder / "pair" / "target")
    save_model(tiny.related(target), byte_tokenizer(), folder / "pair" / "draft")
    for name in OTHERS:
        shutil.copytree(folder / "pair", folder / name)
    save_model(tiny.model(seed=1), byte_tokenizer(), folder / "target" / "target")
    save_model(tiny.related(target, seed=2), byte_tokenizer(), folder / "draft" / "draft")
    for model in OTHERS["tokenizer"]:
        swap_ids(folder / "tokenizer" / model / "tokenizer.json")
    write_kept_ids(folder / "kept_ids" / "draft", torch.arange(tiny.VOCAB_SIZE - 2))


def swap_ids(path: Path) -> None:
    """Let two bytes change places in a tokenizer."""
    content = read_json(path)
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    write_json(path, content)


def paths(folder: Path) -> list[str]:
    """The overrides that name the pair below `folder`."""
    return [text.format(folder) for text in PATHS]
