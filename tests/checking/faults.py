"""Good tiny pairs on disk, and faults planted into them: what rule must name each, for whom."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Lfm2Config

from draftkit.artifacts import read_json, write_json
from draftkit.checking.engines import ENGINES
from draftkit.models.loading import save_model
from tests import tiny
from tests.pairs import swap_ids
from tests.tiny import VOCAB_SIZE, byte_tokenizer

# Heads of 32, the smallest that vLLM has kernels for on a CPU.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    "gpt_neox": {"num_attention_heads": 2},
}
# Its kinds of layers have rotations of their own, even where there is one kind.
GEMMA = {"num_attention_heads": 2, "head_dim": 32, "layer_types": ["full_attention"] * 2}
END = VOCAB_SIZE - 2
EVERY = frozenset(ENGINES)
CPU = frozenset({"vllm_cpu"})
VLLM = frozenset({"vllm", "vllm_cpu"})


def save_good(folder: Path, architecture: str = "llama", **changes: Any) -> Path:
    """A pair of that architecture below `folder`, good for the engines that have code for it."""
    shape = SHAPES.get(architecture, {}) | {"eos_token_id": END} | changes
    target = tiny.model(architecture, **shape)
    save_model(target, byte_tokenizer(), folder / "target")
    save_model(tiny.related(target), byte_tokenizer(), folder / "draft")
    return folder


def edit(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = {**(read_json(path) if path.exists() else {}), **values}
    write_json(path, {key: value for key, value in content.items() if value is not None})


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a model's file by name."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def resize(folder: Path, rows: int) -> None:
    """Pad or cut embeddings and head in the file; config.json stays."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            full = torch.zeros(rows, tensors[name].shape[1])
            kept = min(rows, len(tensors[name]))
            full[:kept] = tensors[name][:kept]
            tensors[name] = full

    edit_weights(folder, change)


def padded(pair: Path, rows: int) -> None:
    resize(pair / "draft", rows)
    edit(pair / "draft/config.json", vocab_size=rows)


def without_tokenizer(pair: Path) -> None:
    for path in (pair / "draft").glob("tokenizer*"):
        path.unlink()


def pickled(pair: Path) -> None:
    path = pair / "draft/model.safetensors"
    torch.save(load_file(path), pair / "draft/pytorch_model.bin")
    path.unlink()


def as_adapter(pair: Path) -> None:
    edit(pair / "draft/adapter_config.json", peft_type="LORA", base_model_name_or_path="base")
    (pair / "draft/model.safetensors").unlink()
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    matrices = {f"{layer}.lora_A.weight": torch.zeros(2, 64)}
    matrices[f"{layer}.lora_B.weight"] = torch.zeros(64, 2)
    save_file(matrices, pair / "draft/adapter_model.safetensors", {"format": "pt"})


def never_ending(pair: Path) -> None:
    for model in ("target", "draft"):
        path = pair / model / "config.json"
        write_json(path, read_json(path) | {"eos_token_id": None})  # absent, Llama's is 2
        edit(pair / model / "generation_config.json", eos_token_id=None)
        edit(pair / model / "tokenizer_config.json", eos_token=None)


def adding_an_end(pair: Path) -> None:
    """A tokenizer that puts the end behind every text, as some of released models do."""
    one = {"SpecialToken": {"id": tiny.END, "type_id": 0}}
    template = [{"Sequence": {"id": "A", "type_id": 0}}, one]
    special = {tiny.END: {"id": tiny.END, "ids": [END], "tokens": [tiny.END]}}
    edit(
        pair / "draft/tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": template,
            "pair": [*template, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": special,
        },
    )


def headless(pair: Path) -> None:
    edit_weights(pair / "draft", lambda tensors: tensors.pop("lm_head.weight"))


def other_layers(pair: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    edit(pair / "draft/config.json", use_sliding_window=True, sliding_window=16, layer_types=kinds)


def recurrent(pair: Path) -> None:
    """A draft with a layer of convolution and one of attention, as LFM2 has them."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
        "max_position_embeddings": tiny.MAX_POSITIONS,
        "block_auto_adjust_ff_dim": False,
    }
    # Sizes that released models have in their configuration, and vLLM reads there.
    sizes = {"conv_dim": 64, "conv_dim_out": 64, "block_dim": 64, "block_ff_dim": 128}
    ids = {"vocab_size": VOCAB_SIZE, "eos_token_id": END, "bos_token_id": None}
    torch.manual_seed(0)
    draft = AutoModelForCausalLM.from_config(Lfm2Config(**shape, **sizes, **ids, pad_token_id=None))
    shutil.rmtree(pair / "draft")
    save_model(draft, byte_tokenizer(), pair / "draft")


@dataclass(frozen=True)
class Fault:
    """What is planted into a good pair, and the engines for which the rule must call it WRONG."""

    plant: Callable[[Path], object]
    rule: str
    engines: frozenset[str]
    architecture: str = "llama"
    tensor_parallel: int = 1


def draft_config(**values: Any) -> Callable[[Path], None]:
    return lambda pair: edit(pair / "draft/config.json", **values)


def target_sampling(**values: Any) -> Callable[[Path], None]:
    return lambda pair: edit(pair / "target/generation_config.json", **values)


def nothing(pair: Path) -> None:
    """The pair is good, and the way it is to be served is not."""


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FAULTS = {
    "a few rows of padding": Fault(
        lambda pair: padded(pair, 320), "vocabulary_size", EVERY - {"llamacpp", "mlx"}
    ),
    "many rows of padding": Fault(
        lambda pair: padded(pair, 448), "vocabulary_size", EVERY - {"mlx"}
    ),
    "other ids": Fault(lambda pair: swap_ids(pair / "draft/tokenizer.json"), "vocabulary", EVERY),
    "another end of texts": Fault(adding_an_end, "added_tokens", frozenset({"llamacpp"})),
    "no end": Fault(never_ending, "end_of_text", frozenset({"onnx"})),
    "a short context": Fault(
        draft_config(max_position_embeddings=32), "context", frozenset({"sglang", "onnx"})
    ),
    "rotary scaling that a builder refuses": Fault(
        draft_config(rope_parameters=DYNAMIC), "rope", frozenset({"onnx"}), architecture="qwen2"
    ),
    "rotary scaling that a builder leaves out": Fault(
        draft_config(rope_parameters=DYNAMIC | {"rope_type": "linear"}),
        "rope",
        frozenset({"onnx"}),
    ),
    "small heads": Fault(
        lambda pair: save_good(pair, num_attention_heads=4, num_key_value_heads=2),
        "head_size",
        CPU,
    ),
    "too many devices": Fault(
        nothing, "tensor_parallel", VLLM | {"sglang", "mlx"}, tensor_parallel=3
    ),
    "no output head": Fault(headless, "output_head", EVERY),
    "a cut table": Fault(lambda pair: resize(pair / "draft", 200), "embeddings", EVERY),
    "an adapter": Fault(as_adapter, "adapter", EVERY),
    "a pickle": Fault(pickled, "weights", frozenset({"mlx"})),
    "no weights": Fault(lambda pair: (pair / "draft/model.safetensors").unlink(), "weights", EVERY),
    "no tokenizer": Fault(
        without_tokenizer, "tokenizer_files", frozenset({"sglang", "llamacpp", "onnx", "mlx"})
    ),
    "packed weights": Fault(
        draft_config(quantization_config=BITS),
        "quantization",
        VLLM | {"llamacpp", "onnx", "mlx"},
    ),
    "two kinds of layers": Fault(other_layers, "window", VLLM | {"onnx"}, architecture="qwen2"),
    "min_p": Fault(target_sampling(min_p=0.1), "sampling", VLLM),
    "beams": Fault(target_sampling(num_beams=2), "sampling", frozenset({"transformers"})),
    "an unknown architecture": Fault(
        draft_config(architectures=["FutureForCausalLM"]),
        "architecture",
        EVERY - {"transformers", "mlx"},
    ),
    "a recurrent draft": Fault(recurrent, "stateful", frozenset({"vllm_cpu", "onnx", "mlx"})),
    "a rotation for each kind of layers": Fault(
        lambda pair: save_good(pair, "gemma3", **GEMMA), "rope", frozenset({"onnx"})
    ),
}


def plant(fault: Fault, good: Path, folder: Path) -> Path:
    """A copy of the pair `good` below `folder`, with the fault."""
    shutil.copytree(good, folder)
    fault.plant(folder)
    return folder
