"""What a GGUF file says of its model, as the configuration that transformers builds it from.

transformers reads some keys and passes over all others: a file of scaled positions would become
another model. Here every key is taken or changes nothing, or the file is refused by the key's name.
Names and defaults are llama.cpp's, which writes such files (`conversion/base.py`, `llama.py`) and
runs them (`llama-model.cpp`, `llama-context.cpp`).
"""

import math
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

REMEDY = "give the model's own folder, as save_pretrained writes it, or its name on the hub"
ROPE_FREQS = "rope_freqs.weight"  # what Llama 3 divides the frequencies of its positions by
ARCHITECTURES = ("llama", "qwen2", "qwen3")  # of the same name in transformers
SHAPES = {  # keys of an architecture, by transformers' names
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
SCALINGS: dict[str, dict[str, str]] = {  # by `rope.scaling.type`: the keys of each beside it
    "none": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
}
SPECIAL = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # tokens
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
NEUTRAL = {  # keys that change nothing if they have this value
    "general.type": "model",
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "tokenizer.ggml.add_sep_token": False,
}
IDLE = (  # keys that change nothing, or that the tokenizer is built from (`gguf_files.py`)
    *("GGUF.*", "general.*", "split.*", "quantize.*", "mradermacher.*", "tensor_data_layout"),
    *("rope.scaling.finetuned", "rope.scaling.original_context_length"),  # yarn has the latter
    *(f"tokenizer.ggml.{one}" for one in ("model", "pre", "tokens", "token_type", "scores")),
    *(f"tokenizer.ggml.{one}" for one in ("merges", "add_[be]os_token", "add_space_prefix")),
    *("tokenizer.ggml.*_token_id", "tokenizer.chat_template*"),
)


def config_of(
    metadata: Mapping[str, Any], tensors: Collection[str], factors: Tensor | None, where: str
) -> PreTrainedConfig:
    """The configuration of a file's model.

    `metadata` is every key of the file, `tensors` the names of its weights and `factors` [d / 2]
    what its `ROPE_FREQS` holds, for heads of d numbers.

    Raises ValueError, one line that begins with `where`, for an architecture that is not known
    here, a key that is not understood, and positions that transformers cannot turn so.
    """
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{where}: its architecture {name} is none of {known}: {REMEDY}")
    keys = {key[len(name) + 1 :]: metadata[key] for key in metadata if key.startswith(f"{name}.")}
    keys.setdefault("attention.head_count_kv", keys.get("attention.head_count"))
    keys.setdefault("rope.freq_base", 10_000.0)
    keys.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())))
    shape: dict[str, Any] = {here: keys.pop(key, None) for key, here in SHAPES.items()}
    odd = [key for key, here in SHAPES.items() if not _positive(shape[here])]
    if odd:
        raise ValueError(f"{where}: it has no number as its {name}.{odd[0]}: {REMEDY}")
    stated: Any = keys.get("attention.key_length")
    head = stated if _positive(stated) else shape["hidden_size"] // shape["num_attention_heads"]
    rope = _scaling(keys) | {"rope_theta": shape.pop("rope_theta")}
    heads = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    neutral = NEUTRAL | dict.fromkeys(heads, head)
    for full, value in metadata.items():
        key = full.removeprefix(f"{name}.")
        if key in keys or key == full:
            idle = any(fnmatchcase(key, pattern) for pattern in IDLE)
            if not (value == neutral[key] if key in neutral else idle):
                raise ValueError(
                    f"{where}: {full} is {str(value)[:40]}, which is not understood here and may "
                    f"make it another model: {REMEDY}"
                )
    ids = {
        f"{SPECIAL[one]}_token_id": metadata.get(f"tokenizer.ggml.{one}_token_id")
        for one in SPECIAL
    }
    try:
        config = AutoConfig.for_model(
            name,
            **shape,
            **ids,
            head_dim=head,
            rope_parameters=rope,
            tie_word_embeddings="output.weight" not in tensors,
        )
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: its shape fits no {name} ({reason}): {REMEDY}") from error
    for switch, bias in BIASES.items():
        if hasattr(config, switch):
            setattr(config, switch, bias in tensors)
    if factors is not None and not _takes_factors(config, factors.double(), head):
        raise ValueError(f"{where}: {ROPE_FREQS} holds factors that Llama 3 has not: {REMEDY}")
    return config


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _scaling(keys: dict[str, Any]) -> dict[str, Any]:
    """How positions are scaled, taken out of `keys`; what is not understood stays there."""
    if "rope.scale_linear" in keys:  # as files of 2023 have it
        keys.setdefault("rope.scaling.factor", keys.pop("rope.scale_linear"))
    kind = str(keys.get("rope.scaling.type", "linear"))
    if kind not in SCALINGS:
        return {}
    keys.pop("rope.scaling.type", None)
    stated = {
        here: keys.pop(f"rope.scaling.{key}")
        for key, here in SCALINGS[kind].items()
        if _positive(keys.get(f"rope.scaling.{key}"))
    }
    return {"rope_type": kind, **stated} if "factor" in stated else {"rope_type": "default"}


def _takes_factors(config: PreTrainedConfig, factors: Tensor, head: int) -> bool:
    """Whether `config` could be given positions whose frequencies `factors` [d / 2] divide.

    Llama 3 has 1 / factor rise linearly with the frequency from `low` to `high` turns in so many
    tokens, and keeps it beyond. Two factors in between tell the line. With fewer, the steepest step
    between neighbours lies on one that gives the same factors.
    """
    rope = dict(config.rope_parameters)
    if rope["rope_type"] != "default" or factors.shape != (head // 2,):
        return False
    plain = rope["rope_theta"] ** (-torch.arange(0, head, 2).double() / head)
    turns = plain / (2 * math.pi) * 8192  # in as many tokens as llama.cpp's converter takes
    largest = factors.max()
    share = (1 / factors - 1 / largest) / (1 - 1 / largest)
    between = ((share > 0) & (share < 1)).nonzero().flatten()
    if len(between) < 2:
        between = int((share.diff() / turns.diff()).argmax()) + torch.arange(2)
    (upper, lower), (most, least) = (
        turns[between[[0, -1]]].tolist(),
        share[between[[0, -1]]].tolist(),
    )
    width = (upper - lower) / (most - least) if most > least else math.inf
    tried = {}
    for digits in (6, 12):  # six where they do: the numbers of who made the model are short
        config.rope_parameters = rope | {
            "rope_type": "llama3",
            "factor": float(largest),
            "original_max_position_embeddings": 8192,
            "low_freq_factor": float(f"{lower - least * width:.{digits}g}"),
            "high_freq_factor": float(f"{lower + (1 - least) * width:.{digits}g}"),
        }
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        error = float((scaled.double() * factors / plain - 1).abs().max())
        tried.setdefault(error, config.rope_parameters)
    config.rope_parameters = tried[min(tried)]
    return min(tried) < 1e-5
