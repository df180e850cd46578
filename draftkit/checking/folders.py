"""What a model's files say of it before its weights are loaded.

Reads `config.json`, `generation_config.json`, the tokenizer and the headers of safetensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file

from draftkit.artifacts import first_line, read_json
from draftkit.config import Config, ModelConfig
from draftkit.models.adapter import context_of
from draftkit.models.files import KEPT_IDS
from draftkit.models.loading import llama_config, load_tokenizer, model_config

ADAPTER = "adapter_config.json"
TOKENIZER_FILES = {"tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt"}


@dataclass(frozen=True)
class Folder:
    """A model as its files describe it.

    generation: `generation_config.json` as it stands. tensors: shapes by name; None where weights
    do not lie in a folder of this machine. names: of the files; None for a hub name and for a
    drafter that is yet to be made. tokenizer: None where the folder has none.
    """

    key: str  # target or draft
    shape: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase | None
    generation: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, ...]] | None = None
    names: frozenset[str] | None = None
    keeps_ids: bool = False  # it proposes the ids of a list alone

    @property
    def text(self) -> PreTrainedConfig:
        """The shapes of the language model."""
        return self.shape.get_text_config()

    @property
    def model(self) -> type[PreTrainedModel] | None:
        """What transformers loads it with; None for what is no causal language model."""
        kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self.shape), None)
        return kinds[0] if isinstance(kinds, tuple) else kinds

    @property
    def architecture(self) -> str:
        """As `config.json` names it."""
        named = self.shape.architectures or []
        return named[0] if named else getattr(self.model, "__name__", self.shape.model_type)

    @property
    def rows(self) -> int:
        """Ids that logits are computed of, those without a meaning included."""
        return self.text.vocab_size

    @property
    def context(self) -> int:
        """Tokens of the longest text."""
        return context_of(self.shape)

    @property
    def rotates(self) -> bool:
        """Whether positions are rotations, and no rows of a table that ends."""
        return getattr(self.text, "rope_parameters", None) is not None

    @property
    def rotates_by_layer(self) -> bool:
        """Whether each kind of layers has rotations of its own."""
        given: Mapping[str, Any] = getattr(self.text, "rope_parameters", None) or {}
        return any(isinstance(one, Mapping) for one in given.values())

    @property
    def rope_types(self) -> set[str]:
        """How rotations are scaled, of all kinds of layers."""
        given: Mapping[str, Any] = getattr(self.text, "rope_parameters", None) or {}
        parts = [one for one in given.values() if isinstance(one, Mapping)] or [given]
        return {part.get("rope_type", "default") for part in parts}

    @property
    def heads(self) -> int | None:
        """Of attention; None where there is none."""
        return getattr(self.text, "num_attention_heads", None)

    @property
    def kv_heads(self) -> int | None:
        """Heads of keys and values."""
        return getattr(self.text, "num_key_value_heads", None) or self.heads

    @property
    def head_size(self) -> int | None:
        """Numbers of a head."""
        given = getattr(self.text, "head_dim", None)
        return given or (self.text.hidden_size // self.heads if self.heads else None)

    @property
    def layer_types(self) -> set[str]:
        """Kinds of attention, where there are several or another than the full one."""
        types = {*(getattr(self.text, "layer_types", None) or ())}
        window = getattr(self.text, "sliding_window", None)
        return types or ({"sliding_attention"} if window else set())

    @property
    def end(self) -> Any:
        """The id, or ids, that end its texts by its own files; None where none says so."""
        own = getattr(self.tokenizer, "eos_token_id", None)
        declared = (self.generation.get("eos_token_id"), self.shape.eos_token_id, own)
        return next((one for one in declared if one is not None), None)

    @property
    def quantization(self) -> str | None:
        """The method its weights are packed by."""
        given = getattr(self.shape, "quantization_config", None) or {}
        given = given if isinstance(given, Mapping) else given.to_dict()
        return given.get("quant_method") and str(given["quant_method"])

    def rows_of(self, *endings: str) -> int | None:
        """Rows of the matrix whose name ends so; None where it is not among `tensors`."""
        for name, shape in (self.tensors or {}).items():
            if name.endswith(endings):
                return shape[0]
        return None


def read_folder(model: ModelConfig, key: str) -> Folder:
    """Read a folder, or of a hub name the small files.

    Raises ValueError naming `key` for what cannot be read at all, and the file that is damaged.
    """
    shape, path = model_config(model, key), Path(model.location)
    if not path.is_dir():
        tokenizer, generation = load_tokenizer(model, key), _of_hub(model, "generation_config.json")
        kept = _of_hub(model, KEPT_IDS) is not None
        given = read_json(generation) if generation else {}
        return Folder(key, shape, tokenizer, given, keeps_ids=kept)
    names = frozenset(file.name for file in path.iterdir())
    generation = path / "generation_config.json"
    return Folder(
        key,
        shape,
        load_tokenizer(model, key) if names & TOKENIZER_FILES else None,
        read_json(generation) if generation.is_file() else {},
        _tensors(path),
        names,
        KEPT_IDS in names,
    )


def _of_hub(model: ModelConfig, name: str) -> Path | None:
    try:
        path = cached_file(
            model.location,
            name,
            revision=model.revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except OSError:
        return None
    return None if path is None else Path(path)


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name.startswith("adapter_"):
            continue
        try:
            with safe_open(path, "numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{path} is no safetensors file ({first_line(error)}): write it again"
            ) from error
    return shapes


def read_pair(config: Config) -> tuple[Folder, Folder] | None:
    """Target and draft of `config`; of a drafter that is yet to be made, what it will be.

    None where the target itself is yet to be made. Raises ValueError as `read_folder` does.
    """
    if config.target.path is None:
        return None
    target, draft = read_folder(config.target, "target"), config.draft
    if draft.path is not None:
        return target, read_folder(draft, "draft")
    assert target.tokenizer is not None
    special = {"eos_token_id": target.tokenizer.eos_token_id}
    shape: PreTrainedConfig = llama_config(draft.pretrain, len(target.tokenizer), special)
    if draft.shrink.layers:
        shape = target.shape
    return target, Folder("draft", shape, target.tokenizer, keeps_ids=bool(draft.shrink.vocabulary))
