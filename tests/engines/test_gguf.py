"""What a GGUF holds is what the folder holds, in the order and by the names of llama.cpp."""

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftkit.config import ModelConfig
from tests.engines import making
from tests.engines.gguf import KINDS, rope_factors, write_gguf
from tests.engines.making import REAL

LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA_3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_in_file(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{PARTS[part]}.{suffix}"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Row by row: 2 i + j of a head is its row j d / 2 + i."""
    size = weight.shape[0] // heads
    order = [
        head * size + j * size // 2 + i
        for head in range(heads)
        for i in range(size // 2)
        for j in (0, 1)
    ]
    return weight[order]


def written(folder: Path, made: Any, kind: str = "f32") -> tuple[Path, Any]:
    model = making.saved(made, folder / "model")
    path = folder / f"model-{kind}.gguf"
    write_gguf(model, path, kind=kind, key="draft")
    return path, gguf.GGUFReader(path)


def values(reader: Any) -> dict[str, np.ndarray]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}


def key(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
        ("qwen2", {"vocab_size": REAL + 13}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_every_weight_is_read_back_as_the_folder_has_it(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    made = making.model(architecture, **changes)
    _, reader = written(tmp_path, made)
    stored, config = load_file(tmp_path / "model" / "model.safetensors"), made.config
    expected = {}
    for name, weight in stored.items():
        if architecture == "llama" and ".q_proj." in name:
            weight = interleaved(weight, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            weight = interleaved(weight, config.num_key_value_heads)
        expected[name_in_file(name)] = weight.numpy()
    read = values(reader)
    assert read.keys() == expected.keys()
    for name, weight in expected.items():
        assert np.array_equal(read[name].reshape(weight.shape), weight), name


def test_the_shapes_are_those_of_the_configuration(tmp_path: Path) -> None:
    made = making.model("qwen3", rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    _, reader = written(tmp_path, made)
    shape = {
        "vocab_size": REAL,
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": pytest.approx(made.config.rms_norm_eps),
        "rope.dimension_count": 16,
        "rope.freq_base": 5e5,
    }
    assert key(reader, "general.architecture") == "qwen3"
    assert {name: key(reader, f"qwen3.{name}") for name in shape} == shape


def test_the_tokenizer_is_that_of_the_folder(tmp_path: Path) -> None:
    rows, tokenizer = REAL + 2, making.tokenizer()
    _, reader = written(tmp_path, making.model(vocab_size=rows))
    tokens = key(reader, "tokenizer.ggml.tokens")
    assert tokens[:REAL] == tokenizer.convert_ids_to_tokens(range(REAL))
    assert len(tokens) == len(set(tokens)) == rows
    types = key(reader, "tokenizer.ggml.token_type")
    assert types == [3] + [1] * (REAL - 1) + [5] * 2
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    assert key(reader, "tokenizer.ggml.merges") == merges
    assert key(reader, "tokenizer.ggml.pre") == "gpt-2"
    for name in ("bos", "eos", "padding"):
        assert key(reader, f"tokenizer.ggml.{name}_token_id") == 0
    assert key(reader, "tokenizer.ggml.add_bos_token") is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_keeps_what_its_bits_hold(tmp_path: Path, kind: str) -> None:
    made = making.model().bfloat16()
    path, reader = written(tmp_path, made, kind)
    exact = load_file(tmp_path / "model" / "model.safetensors")
    weight = exact["model.layers.0.mlp.down_proj.weight"].float().numpy()
    tensor = next(t for t in reader.tensors if t.name == "blk.0.ffn_down.weight")
    norm = next(t for t in reader.tensors if t.name == "output_norm.weight")
    read = gguf.dequantize(tensor.data, tensor.tensor_type)
    blocks = np.abs(weight.reshape(64, -1, 32)).max(-1, keepdims=True).repeat(32, -1)
    error = np.abs(read - weight).reshape(64, -1, 32)
    bound = {"f32": 0, "bf16": 0, "f16": 2**-11, "q8_0": 1 / 254 + 2**-11}[kind]
    assert tensor.tensor_type.name == KINDS[kind][0]
    assert norm.tensor_type.name == "F32"
    assert (error <= bound * blocks).all()
    bits = {"f32": 32, "bf16": 16, "f16": 16, "q8_0": 8.5}[kind]
    assert tensor.n_bytes == weight.size * bits / 8
    assert path.stat().st_size > sum(t.n_bytes for t in reader.tensors)


def test_rows_that_are_no_whole_blocks_stay_in_half_precision(tmp_path: Path) -> None:
    made = making.model(hidden_size=48, num_attention_heads=4, head_dim=16)
    _, reader = written(tmp_path, made, "q8_0")
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["token_embd.weight"] == "F16"
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"


def test_the_frequencies_of_llama_3_are_those_of_transformers(tmp_path: Path) -> None:
    made = making.model(rope_parameters=LLAMA_3, head_dim=32, max_position_embeddings=256)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](made.config, torch.device("cpu"))
    plain = 1 / 1e4 ** (torch.arange(0, 32, 2).float() / 32)
    factors = rope_factors(made.config)
    assert factors is not None
    assert torch.allclose(plain / factors, scaled, rtol=1e-6)
    assert 1 < len(set(factors.tolist())) <= 16
    _, reader = written(tmp_path, made)
    assert np.array_equal(values(reader)["rope_freqs.weight"], factors.numpy())


def test_linear_scaling_is_written(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    _, reader = written(tmp_path, making.model(rope_parameters=rope))
    assert key(reader, "llama.rope.scaling.type") == "linear"
    assert key(reader, "llama.rope.scaling.factor") == 4.0


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("gpt2", {}, "GGUF of gpt2, not of llama, qwen2, qwen3"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "yarn",
        ),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8}, "sliding attention"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"^draft\.path: .*{reason}.*convert_hf_to_gguf"):
        written(tmp_path, making.model(architecture, **changes))
    assert not list(tmp_path.glob("*.gguf"))


def test_a_chat_template_goes_along(tmp_path: Path) -> None:
    model = making.saved(making.model(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    write_gguf(ModelConfig(path=model.path), tmp_path / "a.gguf", kind="f32", key="draft")
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert key(reader, "tokenizer.chat_template") == "{{ messages[0].content }}"
    loaded = AutoModelForCausalLM.from_pretrained(str(model.path))
    size = sum(p.numel() for p in loaded.parameters())
    assert sum(math.prod(t.shape) for t in reader.tensors) == size
