"""Models of random weights and texts of random tokens, where only speed is of interest.

Plain decoding reads every weight once a token, whatever it is: a shape is enough, and nothing has
to be downloaded. An 8 B shape and two drafters for it are what a GPU is measured with.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftkit.config import HardwareConfig, PretrainConfig
from draftkit.models.adapter import CausalAdapter
from draftkit.models.attention import fit_to_device
from draftkit.models.devices import resolve_device, resolve_dtype

GROUP = 4  # query heads that share a key head, as in Llama 3
VOCAB_SIZE = 128_256


def shape(layers: int, hidden: int, inner: int, heads: int, positions: int) -> PretrainConfig:
    """The shape of a Llama-type model."""
    return PretrainConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        max_position_embeddings=positions,
    )


# Named by how many weights they have.
TARGET = ("8B", shape(32, 4096, 14336, 32, 4096))
DRAFTERS = {"1B": shape(16, 2048, 8192, 32, 4096), "0.15B": shape(6, 768, 3072, 12, 4096)}


def random_texts(count: int, tokens: int, *, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` texts of `tokens` random ids each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, tokens), generator=generator).tolist()


def random_model(
    shape: PretrainConfig,
    hardware: HardwareConfig,
    *,
    vocab_size: int,
    seed: int,
    trains: bool = False,
) -> CausalAdapter:
    """A Llama-type model of random weights, that ends no text; frozen unless it `trains`.

    Made where and in which precision `hardware` says. Embeddings are tied to the head, so
    that a step reads all of `weight_bytes`.
    """
    device, heads = resolve_device(hardware), shape.num_attention_heads
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // GROUP if heads % GROUP == 0 else heads,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype(hardware, device))
    model = fit_to_device(model.eval().requires_grad_(trains))
    return CausalAdapter(model, vocab_size=vocab_size)
