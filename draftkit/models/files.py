"""The files of a model's folder that loading reads; the rest of a folder is about the model.

What a download leaves behind (`.cache/`), a card, notes and pictures can change or be missing, and
the model is the same. Shared by whoever loads, copies, uploads or identifies a model.
"""

from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from transformers.utils.hub import cached_file

from draftkit.artifacts import sha256_tree
from draftkit.config import ModelConfig

CARD = "README.md"  # about a model, no part of it
# Not safetensors: engines take every such file of a folder for weights.
KEPT_IDS = "kept_ids.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_FILES = (
    *VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
# By patterns, since shards are numbered, and vocabularies have a name in every family.
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "adapter_config.json"),
    *("config.json", "config.*.json", "generation_config.json", KEPT_IDS),
    *TOKENIZER_FILES,
    *("tokenizer.*.json", "*vocab*.json", "tekken.json", "*.model", "*.spm", "*.tiktoken"),
    *("bpe.codes", "additional_chat_templates"),
)
CODE = "*.py"  # read where `trust_remote_code` says so


def is_of_model(name: str, *, code: bool = False) -> bool:
    """Whether a name directly inside a model's folder is read by loading; `code`: if trusted."""
    patterns = (*MODEL_FILES, CODE) if code else MODEL_FILES
    return not name.startswith(".") and any(fnmatchcase(name, pattern) for pattern in patterns)


def files_of_model(folder: Path, *, code: bool = False) -> Iterator[Path]:
    """The files below `folder` that loading reads."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and is_of_model(path.relative_to(folder).parts[0], code=code):
            yield path


def model_sha256(folder: Path, *, code: bool = False) -> str:
    """Checksum of the model in `folder`: of the names and contents of what loading reads."""
    return sha256_tree(folder, skip=lambda name: not is_of_model(name, code=code))


def commit_of(model: ModelConfig) -> str:
    """The commit of a model of the hub in `revision`; that itself where nobody knows the commit."""
    commit = model.revision or "main"
    with suppress(OSError, ValueError):  # then loading says what is wrong
        file = Path(str(cached_file(model.location, "config.json", revision=commit)))
        commit = file.parent.name  # snapshots/<commit>/config.json of the hub's cache
    return commit
