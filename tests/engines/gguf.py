"""A model folder as GGUF: the one file that llama.cpp, and what is built on it, loads.

Llama, Qwen2 and Qwen3, written tensor by tensor by the `gguf` library (the extra `engines`). Names
and shapes are llama.cpp's. Rotary positions turn the two halves of a head against each other in
Hugging Face; llama.cpp does so for Qwen, and turns neighbours for Llama, whose `q_proj` and
`k_proj` are therefore stored in another order of rows:

    row 2 i + j of a head in the file = row j d / 2 + i of the folder        i < d / 2, j in {0, 1}

Kinds: `f32`, and `bf16` of weights that are stored in it, are exact; `f16` rounds; `q8_0` keeps
blocks of 32 weights as bytes with one scale. Norms and biases are float32 in all of them.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from draftkit.artifacts import atomic_path
from draftkit.config import ModelConfig
from draftkit.engines.folder import FREE_ROPE, rope_types
from draftkit.models.adapter import context_of
from draftkit.models.loading import declared_ends, load_model, load_tokenizer, model_config
from tests.engines.gguf_tokenizer import Vocabulary, vocabulary_of

ARCHITECTURES = ("llama", "qwen2", "qwen3")
# By kind: the type of matrices in the file, and what the file is called as a whole.
KINDS = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
TURNED = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")


def check_gguf(config: PreTrainedConfig, key: str) -> None:
    """Raise ValueError naming `key` for a model whose weights are not written as GGUF here."""
    remedy = "convert it with llama.cpp's convert_hf_to_gguf.py, or leave llamacpp out"
    kinds = [kind for kind in rope_types(config) if kind not in FREE_ROPE]
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{key}.path: GGUF of {config.model_type}, not of {known}: {remedy}")
    if kinds or getattr(config, "use_sliding_window", False):
        why = f"rope scaling {kinds[0]}" if kinds else "sliding attention"
        raise ValueError(f"{key}.path: GGUF of a model with {why}: {remedy}")


def write_gguf(model: ModelConfig, path: Path, *, kind: str, key: str) -> None:
    """Write the folder of `model` to the file `path`, in one of `KINDS`.

    Raises ValueError naming `key` (`target` or `draft`) for a model or a tokenizer that llama.cpp
    is not known to compute alike.
    """
    config = model_config(model, key)
    check_gguf(config, key)
    tokenizer = load_tokenizer(model, key)
    ends = declared_ends(model, tokenizer)
    vocabulary = vocabulary_of(tokenizer, rows=config.vocab_size, ends=ends)
    loaded = load_model(model, key, dtype="auto", device=torch.device("cpu"))
    tensors = dict(tensors_of(loaded.state_dict(), config))
    kinds = {name: kind_of(tensor, kind) for name, tensor in tensors.items()}
    with atomic_path(path) as temporary:
        writer = gguf.GGUFWriter(temporary, config.model_type)
        writer.add_name(path.stem)
        writer.add_file_type(gguf.LlamaFileType[KINDS[kind][1]])
        write_shapes(writer, config)
        write_vocabulary(writer, vocabulary, tokenizer.chat_template)
        for name, tensor in tensors.items():
            rows = gguf.quants.quant_shape_to_byte_shape(tensor.shape, kinds[name])
            writer.add_tensor_info(name, rows, np.dtype(np.uint8), math.prod(rows), kinds[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            weights = tensor.to(torch.float32).contiguous().numpy()
            writer.write_tensor_data(gguf.quants.quantize(weights, kinds[name]))
        writer.close()


def kind_of(tensor: Tensor, kind: str) -> Any:
    """How `tensor` is stored: vectors in float32, rows of broken blocks in half precision."""
    types = gguf.GGMLQuantizationType
    if tensor.dim() == 1:
        return types.F32
    block, _ = gguf.GGML_QUANT_SIZES[types[KINDS[kind][0]]]
    return types.F16 if tensor.shape[-1] % block else types[KINDS[kind][0]]


def tensors_of(
    weights: dict[str, Tensor], config: PreTrainedConfig
) -> Iterator[tuple[str, Tensor]]:
    """The `weights` of a folder by llama.cpp's names, in its order of rows; a tied head once."""
    architecture = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in weights.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, f"{config.model_type} has no {name}"
        if config.model_type == "llama" and name.endswith(TURNED):
            count = "num_key_value_heads" if "k_proj" in name else "num_attention_heads"
            weight = turned(weight, getattr(config, count))
        yield known, weight
    if (factors := rope_factors(config)) is not None:
        yield "rope_freqs.weight", factors


def turned(weight: Tensor, heads: int) -> Tensor:
    """Rows of `weight` [heads d, ...] with the halves of each head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def rope_factors(config: PreTrainedConfig) -> Tensor | None:
    """By what Llama 3.1 divides each frequency [d / 2] of its positions; None for other models."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "llama3":
        return None
    size = head_size(config)
    lengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, size, 2).double() / size)
    turns = rope["original_max_position_embeddings"] / lengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).float()


def head_size(config: PreTrainedConfig) -> int:
    """The width d of a head."""
    own = getattr(config, "head_dim", None)
    return int(own or config.hidden_size // config.num_attention_heads)


def write_shapes(writer: Any, config: PreTrainedConfig) -> None:
    """The keys of the architecture."""
    rope, size = config.rope_parameters, head_size(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(context_of(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def write_vocabulary(writer: Any, vocabulary: Vocabulary, template: Any) -> None:
    """The keys of the tokenizer, and the chat template where there is one."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.splitter)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, token_id in vocabulary.ids.items():
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    if vocabulary.model == "llama":
        writer.add_add_space_prefix(vocabulary.add_prefix)
    if template:
        writer.add_chat_template(template)
