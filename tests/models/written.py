"""Random models as GGUF files, and such files with other keys and tensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from draftkit.config import TargetConfig
from draftkit.models.loading import save_model
from tests import tiny
from tests.engines import making
from tests.engines.gguf import write_gguf

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
SMALL = {"vocab_size": making.REAL, "eos_token_id": 0, "hidden_size": 32, "num_hidden_layers": 1}


def written(folder: Path, architecture: str = "llama", kind: str = "f32", **changes: Any) -> Path:
    """A GGUF file of a random model, whose folder lies beside it as `model`."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(_kept(folder))
    tokenizer.chat_template = TEMPLATE
    made = tiny.model(architecture, **SMALL | changes)
    save_model(made, tokenizer, folder / "model")
    path = folder / "named.gguf"
    write_gguf(TargetConfig(path=str(folder / "model")), path, kind=kind, key="target")
    return path


def _kept(folder: Path) -> Path:
    making.tokenizer().save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def changed(
    path: Path,
    keys: dict[str, Any],
    tensors: dict[str, Any] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """The file with other `keys`, and other `tensors` of a `kind`; None takes one away."""
    reader = gguf.GGUFReader(path)
    arrays = {one.name: (np.array(one.data), one.tensor_type) for one in reader.tensors}
    arrays |= {name: (array, kind) for name, array in (tensors or {}).items()}
    fields = {name: (one.contents(), one.types) for name, one in reader.fields.items()}
    fields |= {
        name: (value, [gguf.GGUFValueType.get_type(value), None])
        for name, value in keys.items()
        if value is not None
    }
    architecture, _ = fields.pop("general.architecture")
    writer = gguf.GGUFWriter(path, architecture)
    for name, (value, types) in fields.items():
        if not name.startswith("GGUF.") and keys.get(name, value) is not None:
            writer.add_key_value(name, value, types[0], sub_type=types[-1])
    for name, (array, type_) in arrays.items():
        if array is not None:
            writer.add_tensor(name, array, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
