"""A tiny pair on disk, and others of the same shape that are not to be taken for it."""

import shutil
from pathlib import Path

from draftkit.models.loading import save_model
from tests import tiny
from tests.serving.fakes import chat_tokenizer
from tests.tiny import byte_tokenizer

PATHS = ["target.path={0}/target", "draft.path={0}/draft"]
OTHERS = ("target", "draft")  # models of which there is another one


def save_pairs(folder: Path) -> None:
    """Target and draft below `folder/pair`, and below each of `OTHERS` with that one changed."""
    target = tiny.model()
    save_model(target, byte_tokenizer(), folder / "pair" / "target")
    save_model(tiny.related(target), byte_tokenizer(), folder / "pair" / "draft")
    for name in OTHERS:
        shutil.copytree(folder / "pair", folder / name)
    save_model(tiny.model(seed=1), byte_tokenizer(), folder / "target" / "target")
    save_model(tiny.related(target, seed=2), byte_tokenizer(), folder / "draft" / "draft")


def save_chat_pair(folder: Path) -> list[str]:
    """A pair whose target has a chat template; the overrides that name it."""
    target = tiny.model()
    save_model(target, chat_tokenizer(), folder / "target")
    save_model(tiny.related(target), byte_tokenizer(), folder / "draft")
    return paths(folder)


def paths(folder: Path) -> list[str]:
    """The overrides that name the pair below `folder`."""
    return [text.format(folder) for text in PATHS]
