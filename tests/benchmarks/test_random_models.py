"""Models for speed alone have the shape that was asked for."""

import torch

from draftkit.config import HardwareConfig, PretrainConfig
from pipelines.benchmarks.random_models import random_model

SHAPE = PretrainConfig(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    max_position_embeddings=64,
)


def make(seed=0, dtype="float32"):
    hardware = HardwareConfig(device="cpu", dtype=dtype)
    return random_model(SHAPE, hardware, vocab_size=50, seed=seed)


def test_a_random_model_has_the_shape_and_precision_that_were_asked_for():
    model = make(dtype="bfloat16")
    config = model.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (2, 32, 50)
    assert config.num_key_value_heads == 1  # four query heads a key head
    assert model.dtype == torch.bfloat16
    assert model.vocab_size == 50
    layer = 32 * 32 * 2 + 32 * 8 * 2 + 3 * 32 * 64 + 2 * 32
    parameters = sum(p.numel() for p in model.model.parameters())
    assert parameters == 50 * 32 + 2 * layer + 32  # the head is tied
    assert model.weight_bytes >= 2 * parameters


def test_a_random_model_is_frozen_ends_no_text_and_repeats_by_seed():
    first, again, other = make(), make(), make(seed=1)
    assert first.is_constant
    assert first.model.generation_config.eos_token_id is None
    weights = [m.model.get_input_embeddings().weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_random_state_stays_as_it_was():
    state = torch.get_rng_state()
    make()
    assert torch.equal(torch.get_rng_state(), state)
