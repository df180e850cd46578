"""A model's folder: which of its files loading reads, and what they say beside the weights.

The rest of a folder is about the model: what a download leaves behind (`.cache/`), a card, notes
and pictures can change or be missing, and the model is the same. Shared by whoever loads, copies,
uploads or identifies a model.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)
from transformers.utils import cached_file

from draftkit.artifacts import first_line, sha256_tree
from draftkit.config import ModelConfig
from draftkit.hub import hub_has
from draftkit.models.seq2seq import start_token

WHOLE = "give a complete folder written by save_pretrained"
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


def address_of(model: ModelConfig) -> str:
    """The checksum of the model that a section names; of the hub, its name and commit.

    Where its commit is not known, its `revision` stands for it.
    """
    folder = Path(model.location)
    if folder.is_dir():
        return model_sha256(folder, code=model.trust_remote_code)
    commit = model.revision or "main"
    with suppress(OSError, ValueError):  # then loading says what is wrong
        file = Path(str(cached_file(model.location, "config.json", revision=commit)))
        commit = file.parent.name  # snapshots/<commit>/config.json of the hub's cache
    return f"{model.path}@{commit}"


def check_weights(model: ModelConfig) -> None:
    """Raise ValueError for a folder here whose weights are no safetensors."""
    folder = Path(model.location)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for kind in PICKLED for path in folder.glob(kind))
    if not pickled:
        raise ValueError(f"{model.named}: holds no *.safetensors: give what save_pretrained wrote")
    raise ValueError(
        f"{model.named}: {pickled[0]} is pickled, and reading it can run code. If you trust it, "
        "convert it by AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
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
    left = []
    for name in sorted(names):
        layer = LAYER.search(name)
        is_further = layer is not None and int(layer[1]) in further
        is_buffer = any(f".{name}".endswith(one) or one.endswith(f".{name}") for one in buffers)
        if not (BESIDE_TEXT.search(name) or is_further or is_buffer):
            left.append(name)
    return left


@contextmanager
def refusing(
    model: ModelConfig, failure: str = "cannot load the model", remedy: str = WHOLE
) -> Iterator[None]:
    """Errors of reading `model` become a ValueError of one line that names its key."""
    try:
        yield
    except Exception as error:  # what a damaged folder, or a missing package, raises has no bound
        if not Path(model.location).is_dir():
            remedy = f"fetch all of it by `hf download {model.path}`, or {remedy}"
        raise ValueError(f"{model.named}: {failure} ({first_line(error)}): {remedy}") from error


def check_folder(model: ModelConfig) -> None:
    """Raise ValueError if `model.path` is no model folder, and no model of the hub in reach."""
    assert model.path is not None
    key, path, name = model.key, Path(model.location), model.named
    if model.names_gguf:
        raise ValueError(f"{name}: commands read a GGUF file into a folder: give {key}.path there")
    looks_local = path.is_absolute() or model.path.startswith((".", "~")) or path.exists()
    if not looks_local and model.path.count("/") == 1:
        if hub_has(model.path, "config.json", section=key, revision=model.revision):
            return
        at = f" at {key}.revision={model.revision}" if model.revision else ""
        raise ValueError(
            f"{name}: no folder here, and the hub has no config.json of it{at}: correct the name, "
            "or log in with `hf auth login` where it is a private one"
        )
    if not path.is_dir():
        raise ValueError(
            f"{name}: no such folder: "
            "give one written by save_pretrained, or a hub name OWNER/MODEL"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{name}: holds no config.json: give a folder written by save_pretrained")


def auto_model(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a model of `config`."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def end_of_text_ids(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Ids that end a text: those of the generation config (one or a list) and the tokenizer's."""
    declared = generation.eos_token_id if generation else None
    ids = set(declared if isinstance(declared, list) else [declared])
    ids.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in ids if i is not None))


class ModelFolder:
    """The folder of a model, or its name on the hub, opened once: what it says, without weights.

    config: the shapes of the model. Raises ValueError naming the model's key for what is no model
    that reads and writes text, and later for a tokenizer that is unusable.
    """

    def __init__(self, model: ModelConfig) -> None:
        check_folder(model)
        self.model = model
        self.source = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
        with refusing(model):
            config = AutoConfig.from_pretrained(model.location, **self.source)
        self.config: PreTrainedConfig = config
        known = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
        own_code = model.trust_remote_code and getattr(config, "auto_map", None)
        if type(config) not in known[config.is_encoder_decoder] and not own_code:
            raise ValueError(
                f"{model.named}: transformers has no {auto_model(config).__name__} of the type "
                f"{config.model_type}: give a model that reads and writes text alone"
            )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        remedy = "save the tokenizer into the folder with save_pretrained"
        with refusing(self.model, "no usable tokenizer", remedy):
            tokenizer = AutoTokenizer.from_pretrained(self.model.location, **self.source)
        assert tokenizer is not None
        return tokenizer

    @cached_property
    def generation(self) -> GenerationConfig:
        """How it generates: in a file of its own, or in its configuration."""
        try:
            revision = self.model.revision or "main"
            return GenerationConfig.from_pretrained(self.model.location, revision=revision)
        except OSError:  # it has no such file
            return GenerationConfig.from_model_config(self.config)

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end its texts."""
        return end_of_text_ids(self.generation, self.tokenizer)

    @property
    def start(self) -> int | None:
        """The id that begins a decoder's text; None for a decoder-only model."""
        return start_token(self.config, self.generation)
