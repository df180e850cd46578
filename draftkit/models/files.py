"""The files of a model's folder that loading reads; the rest of a folder is about the model.

What a download leaves behind (`.cache/`), a card, notes and pictures can change or be missing, and
the model is the same. Shared by whoever loads, copies, uploads or identifies a model.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from transformers import PreTrainedModel
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
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Weights that no text passes through: heads for several tokens, other senses, scales of a cache.
BESIDE_TEXT = re.compile(r"(^|\.)(mtp|visual|vision|audio|multi_modal)\w*\.|\.[kv]_scale$")
LAYER = re.compile(r"\.layers\.(\d+)\.")


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


def address_of(model: ModelConfig) -> str:
    """The checksum of the model that a section names; of the hub, its name and commit."""
    folder = Path(model.location)
    if folder.is_dir():
        return model_sha256(folder, code=model.trust_remote_code)
    return f"{model.path}@{commit_of(model)}"


def check_weights(model: ModelConfig) -> None:
    """Raise ValueError for a folder here whose weights are no safetensors."""
    folder = Path(model.location)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for kind in PICKLED for path in folder.glob(kind))
    where = f"{model.key}.path {model.path}: "
    if not pickled:
        raise ValueError(f"{where}holds no *.safetensors: give what save_pretrained wrote")
    raise ValueError(
        f"{where}{pickled[0]} is pickled, and reading it can run code. If you trust it, convert it "
        "by AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def unread(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """Of `names`, weights of a folder that `model` took no notice of, those that it should have.

    Older releases wrote buffers too, which are computed today. Layers behind the last one guess
    further tokens, where `num_nextn_predict_layers` says so.
    """
    buffers = [f".{name}" for name, _ in model.named_buffers()]
    text = model.config.get_text_config()
    last = getattr(text, "num_hidden_layers", 0)
    further = range(last, last + (getattr(text, "num_nextn_predict_layers", None) or 0))

    def is_beside(name: str) -> bool:
        layer = LAYER.search(name)
        return bool(
            BESIDE_TEXT.search(name)
            or any(f".{name}".endswith(one) or one.endswith(f".{name}") for one in buffers)
            or (layer and int(layer[1]) in further)
        )

    return sorted(name for name in names if not is_beside(name))
