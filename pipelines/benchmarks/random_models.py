"""Models of random weights and texts of random tokens, where only speed is of interest.

Plain decoding reads every weight once a token, whatever it is: a shape is enough, and nothing has
to be downloaded. An 8 B shape and two drafters for it are what a GPU is measured with.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftkit.config import HardwareConfig
from draftkit.models.adapter import CausalAdapter
from draftkit.models.attention import fit_to_device
from draftkit.models.devices import resolve_device, resolve_dtype


def shape(
    layers: int, hidden: int, inner: int, heads: int, *, vocab_size: int = 128_256
) -> LlamaConfig:
    """A Llama-type model that ends no text. A step reads all weights: the head is tied."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,  # as in Llama 3
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


# Named by how many weights they have.
TARGET = ("8B", shape(32, 4096, 14336, 32))
DRAFTERS = {"1B": shape(16, 2048, 8192, 32), "0.15B": shape(6, 768, 3072, 12)}
LIKELY_ALPHA = 0.8  # for which the measured costs of random models are turned into a speed-up


def random_texts(count: int, tokens: int, *, vocab_size: int, seed: int) -> list[list[int]]:
    """`count` texts of `tokens` random ids each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, tokens), generator=generator).tolist()


def random_model(
    shape: LlamaConfig, hardware: HardwareConfig, *, seed: int, trains: bool = False
) -> CausalAdapter:
    """A model of random weights, made where and in which precision `hardware` says.

    Frozen unless it `trains`.
    """
    device = resolve_device(hardware)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(shape, dtype=resolve_dtype(hardware, device))
    model = fit_to_device(model.eval().requires_grad_(trains))
    return CausalAdapter(model, vocab_size=shape.vocab_size)
