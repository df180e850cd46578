"""A model folder as GGUF, as llama.cpp's own converter writes released ones.

Llama, Qwen2 and Qwen3 with byte-level BPE, key by key and tensor by tensor (`set_gguf_parameters`
of `conversion/base.py`, `conversion/llama.py`). Rotary positions turn the two halves
of a head against each other in Hugging Face; llama.cpp does so for Qwen, and turns neighbours for
Llama, whose `q_proj` and `k_proj` are therefore stored in another order of rows:

    row 2 i + j of a head in the file = row j d / 2 + i of the folder        i < d / 2, j in {0, 1}
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from draftkit.config import TargetConfig
from draftkit.models.files import ModelFolder
from draftkit.models.gguf_files import BYTES, CONTROL, DIGITS, GPT_2, SPLITTERS, USER_DEFINED
from draftkit.models.loading import load_model
from draftkit.models.shapes import context_of

TYPES = {"f32": "F32", "q8_0": "Q8_0"}  # of matrices; vectors are float32
NORMAL, UNUSED = 1, 5  # types of tokens
TURNED = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")


@dataclass(frozen=True)
class Vocabulary:
    """What the file says of its tokenizer, in the words of its keys."""

    splitter: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    add_bos: bool


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, *, rows: int) -> Vocabulary:
    """The vocabulary of a byte-level `tokenizer` for a model of so many `rows`."""
    backend: Any = tokenizer
    spec = json.loads(backend.backend_tokenizer.to_str())
    names = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    types = [NORMAL if row in names else UNUSED for row in range(rows)]
    for one in spec["added_tokens"]:
        types[one["id"]] = CONTROL if one["special"] else USER_DEFINED
    steps = spec["pre_tokenizer"]
    steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    rule = tuple(map(step, steps)), bool(spec["model"].get("ignore_merges"))
    return Vocabulary(
        splitter=next(name for name, one in SPLITTERS.items() if one[:2] == rule),
        tokens=[names.get(row, f"[PAD{row}]") for row in range(rows)],
        types=types,
        merges=[" ".join(merge) for merge in spec["model"]["merges"]],
        add_bos=tokenizer.encode("a")[0] == tokenizer.bos_token_id,
    )


def step(part: Mapping[str, Any]) -> str:
    """One step of splitting, in the words of `SPLITTERS`."""
    if part["type"] == "ByteLevel":
        return GPT_2 if part["use_regex"] else BYTES
    return DIGITS if part["type"] == "Digits" else part["pattern"]["Regex"]


def write_gguf(model: TargetConfig, path: Path, *, kind: str, key: str) -> None:
    """Write the folder of `model` (the `key`: target or draft) to the file `path`, as `TYPES`."""
    folder = ModelFolder(model)
    config, tokenizer = folder.config, folder.tokenizer
    loaded = load_model(model, dtype="auto", device=torch.device("cpu"))
    tensors = dict(tensors_of(loaded.state_dict(), config))
    writer = gguf.GGUFWriter(path, config.model_type)
    write_shapes(writer, config)
    write_vocabulary(writer, tokenizer, rows=config.vocab_size)
    for name, tensor in tensors.items():
        types = gguf.GGMLQuantizationType
        stored = types.F32 if tensor.dim() == 1 else types[TYPES[kind]]
        packed = gguf.quants.quantize(tensor.float().contiguous().numpy(), stored)
        writer.add_tensor(name, packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", llama3_factors(config)


def llama3_factors(config: PreTrainedConfig) -> Tensor:
    """What the frequencies are divided by [d / 2], as `generate_extra_tensors` of Llama has it."""
    rope, head = config.rope_parameters, head_of(config)
    factor, low, high = (rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = rope["original_max_position_embeddings"]
    factors = []
    for frequency in 1.0 / rope["rope_theta"] ** (torch.arange(0, head, 2).float() / head):
        length = 2 * math.pi / frequency
        smooth = (context / length - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if smooth > 1 else factor if smooth < 0 else between)
    return torch.tensor(factors, dtype=torch.float32)


def head_of(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def turned(weight: Tensor, heads: int) -> Tensor:
    """Rows of `weight` [heads d, ...] with the halves of each head interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_shapes(writer: Any, config: PreTrainedConfig) -> None:
    """The keys of the architecture, and how its positions are scaled."""
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(context_of(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    rope = config.rope_parameters
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if hasattr(config, "head_dim"):
        writer.add_key_length(head_of(config))
        writer.add_value_length(head_of(config))
    writer.add_file_type(gguf.LlamaFileType.GUESSED)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if config.model_type == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_of(config))


def write_vocabulary(writer: Any, tokenizer: PreTrainedTokenizerBase, *, rows: int) -> None:
    """The keys of the tokenizer, and the chat template where there is one.

    Without a token that begins a text the end's stands for it: llama.cpp would take id 11.
    """
    vocabulary = vocabulary_of(tokenizer, rows=rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.splitter)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    end: Any = tokenizer.eos_token_id
    begin: Any = tokenizer.bos_token_id
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end if begin is None else begin)
    writer.add_add_bos_token(vocabulary.add_bos)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
