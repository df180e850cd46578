"""What a GGUF file says of its model is what is built, or one line names what is not understood."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftkit.config import TargetConfig
from draftkit.models.gguf_config import config_of
from draftkit.models.gguf_files import convert
from draftkit.models.loading import load_model
from tests.engines import making
from tests.engines.gguf import llama3_factors
from tests.models.written import changed, written


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("unchanged"), rope_parameters={"rope_theta": 10_000.0})


def assert_logits_are_the_folders(folder: Path, **tolerance: float) -> None:
    """What was read has those of what the file was written from, at 16 and at 400 tokens."""
    read, model = (
        load_model(
            TargetConfig(path=str(folder / name)), dtype=torch.float32, device=torch.device("cpu")
        )
        for name in ("read", "model")
    )
    for length in (16, 400):
        ids = torch.randint(1, making.REAL, (1, length), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            torch.testing.assert_close(read(ids).logits, model(ids).logits, **tolerance)


THETA = {"rope_theta": 500_000.0}
LLAMA_3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= THETA | {"original_max_position_embeddings": 8192}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"head_dim": 64, "rope_parameters": LLAMA_3}),
        ("llama", {"rope_parameters": LLAMA_3 | {"original_max_position_embeddings": 64}}),
        ("llama", {"rope_parameters": LLAMA_3 | {"low_freq_factor": 3.3, "factor": 5.0}}),
        ("llama", {"rope_parameters": THETA | {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"head_dim": 32, "rope_parameters": YARN}),
        ("qwen2", {"head_dim": 32, "rope_parameters": YARN}),
        (
            "qwen3",
            {
                "rope_parameters": YARN
                | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0}
            },
        ),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"attention_bias": True, "head_dim": 24}),
    ],
)
def test_positions_and_biases_are_those_of_the_folder(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    path = written(tmp_path, architecture, max_position_embeddings=512, **changes)
    convert(path, tmp_path / "read", "target")
    assert_logits_are_the_folders(tmp_path, rtol=0, atol=1e-3)


LLAMA = {  # what `config_of` asks of every file, beside the number of heads and the base
    "general.architecture": "llama",
    "llama.context_length": 131_072,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.attention.head_count": 1,
    "llama.vocab_size": 300,
}


def test_llama_3s_positions_are_found_from_their_factors_alone() -> None:
    draw = random.Random(0)
    for _ in range(60):
        low = draw.choice([1.0, draw.uniform(0.5, 3)])
        rope = {
            "rope_type": "llama3",
            "rope_theta": draw.choice([10_000.0, 500_000.0]),
            "factor": draw.choice([8.0, 32.0, draw.uniform(1.5, 64)]),
            "low_freq_factor": low,
            "high_freq_factor": low * draw.choice([1.5, 4.0, draw.uniform(1.2, 20)]),
            "original_max_position_embeddings": draw.choice([64, 512, 4096, 8192]),
        }
        size = draw.choice([16, 64, 128])
        made = LlamaConfig(hidden_size=size, num_attention_heads=1, rope_parameters=rope)
        keys = LLAMA | {"llama.embedding_length": size, "llama.rope.freq_base": rope["rope_theta"]}
        found = config_of(keys, (), llama3_factors(made), "target.path x")
        for one, other in zip(
            *(ROPE_INIT_FUNCTIONS["llama3"](config, "cpu") for config in (found, made)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


# Llama 3.2 1B Instruct, as it was released: github.com/ggml-org/llama.cpp/issues/10176.
RELEASED = {
    "general": "architecture type name finetune basename size_label tags languages file_type "
    "quantization_version",
    "llama": "block_count context_length embedding_length feed_forward_length attention.head_count "
    "attention.head_count_kv rope.freq_base attention.layer_norm_rms_epsilon attention.key_length "
    "attention.value_length vocab_size rope.dimension_count",
    "tokenizer": "ggml.model ggml.pre ggml.tokens ggml.token_type ggml.merges ggml.bos_token_id "
    "ggml.eos_token_id chat_template",
}
ABOUT = {
    **{f"general.{name}": "Llama" for name in ("name", "finetune", "basename", "size_label")},
    **{f"general.{name}": ["en", "de"] for name in ("tags", "languages")},
}


def test_the_keys_of_a_released_file_are_all_understood(tmp_path: Path) -> None:
    path = written(tmp_path, head_dim=64, rope_parameters=LLAMA_3, tie_word_embeddings=True)
    changed(path, ABOUT | {"tokenizer.ggml.add_bos_token": None})
    reader = gguf.GGUFReader(path)
    keys = {f"{group}.{key}" for group, named in RELEASED.items() for key in named.split()}
    assert {name for name in reader.fields if not name.startswith("GGUF.")} == keys
    assert "rope_freqs.weight" in {one.name for one in reader.tensors}
    convert(path, tmp_path / "read", "target")
    config = json.loads((tmp_path / "read" / "config.json").read_text())
    assert config["rope_parameters"] == LLAMA_3
    assert config["tie_word_embeddings"]


FACTORS = np.linspace(1, 5, 4, dtype=np.float32)  # of heads of eight numbers
KEYS: list[tuple[dict[str, Any], str]] = [
    ({"general.architecture": "mamba"}, "its architecture mamba is none of llama"),
    ({"general.type": "adapter"}, r"general\.type is adapter, which is not under"),
    ({"llama.embedding_length": None}, r"no number as its llama\.embedding_length"),
    ({"llama.attention.head_count": [4, 2]}, r"its llama\.attention\.head_count"),
    ({"llama.attention.head_count_kv": 4}, "no tensor of their shape.*k_proj"),
    ({"llama.attention.head_count": 3}, "its shape fits no llama"),
    ({"llama.block_count": 1.5}, "its shape fits no llama"),
    ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale is 0\.5, which"),
    ({"llama.attention.sliding_window": 64}, r"sliding_window is 64, which"),
    ({"llama.attention.value_length": 4}, r"value_length is 4, which"),
    ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count is 4, which"),
    ({"llama.final_logit_softcapping": 30.0}, r"softcapping is 30\.0, which"),
    ({"llama.expert_count": 8}, r"llama\.expert_count is 8, which"),
    ({"llama.rope.scaling.type": "longrope"}, r"scaling\.type is longrope, which"),
    ({"llama.rope.scaling.attn_factor": 1.2}, r"attn_factor is 1\.2\d*, which"),
    ({"llama.rope.scaling.yarn_log_multiplier": 0.1}, r"multiplier is 0\.1"),
    ({"somebodys.scale": 2.0}, r"somebodys\.scale is 2\.0, which"),
]
TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"rope_factors_long.weight": FACTORS}, r"place.*rope_factors_long\.weight"),
    ({"blk.1.attn_norm.weight": FACTORS}, r"place.*blk\.1\.attn_norm\.weight"),
    ({"blk.0.attn_v.bias": FACTORS}, r"place.*blk\.0\.attn_v\.bias"),
    ({"blk.0.attn_q.bias": np.ones(32, np.float32)}, r"no tensor of their shape.*k_proj\.bias"),
    ({"rope_freqs.weight": FACTORS[:3]}, r"rope_freqs\.weight holds factors"),
    ({"rope_freqs.weight": FACTORS}, r"rope_freqs\.weight holds factors"),
    ({"blk.0.attn_output.bias": np.ones(32, np.float32)}, r"place.*attn_output\.bias"),
    ({"blk.0.ffn_up.weight": None}, r"1 weights have no tensor.*up_proj"),
]


@pytest.mark.parametrize(
    ("keys", "tensors", "refusal"),
    [
        *((keys, {}, refusal) for keys, refusal in KEYS),
        *(({}, tensors, refusal) for tensors, refusal in TENSORS),
        ({"llama.rope.scaling.factor": 2.0}, {"rope_freqs.weight": FACTORS}, "rope_freqs"),
    ],
)
def test_what_would_make_it_another_model_is_refused_by_its_name(
    tmp_path: Path, unchanged: Path, keys: dict[str, Any], tensors: dict[str, Any], refusal: str
) -> None:
    path = changed(Path(shutil.copy(unchanged, tmp_path)), keys, tensors)
    with pytest.raises(
        ValueError, match=rf"^target\.path {path}: .*{refusal}.*own folder"
    ) as error:
        convert(path, tmp_path / "read", "target")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "read").exists()


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.rope.scaling.finetuned": True, "llama.rope.scaling.attn_factor": 1.0},
        {"llama.rope.scaling.type": "none", "llama.rope.scaling.original_context_length": 64},
        {"llama.expert_count": 0, "llama.attention.causal": True, "quantize.imatrix.file": "x"},
        {f"llama.{key}": None for key in ("attention.key_length", "rope.freq_base", "vocab_size")},
    ],
)
def test_keys_that_change_nothing_are_let_through(
    tmp_path: Path, unchanged: Path, keys: dict[str, Any]
) -> None:
    path = changed(Path(shutil.copy(unchanged, tmp_path)), keys)
    convert(path, tmp_path / "read", "target")
    read, model = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "read", unchanged.parent / "model")
    )
    assert all(torch.equal(read[name], model[name]) for name in model)
    config = json.loads((tmp_path / "read" / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 10_000.0, "rope_type": "default"}
