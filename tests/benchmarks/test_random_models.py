"""Models for speed alone have the shape that was asked for."""

import torch

from draftkit.config import HardwareConfig
from pipelines.benchmarks.random_models import random_model, shape


def make(seed=0):
    hardware = HardwareConfig(device="cpu", dtype="bfloat16")
    return random_model(shape(2, 32, 64, 4, vocab_size=50), hardware, seed=seed)


def test_a_random_model_has_the_shape_and_precision_that_were_asked_for():
    model = make()
    assert model.dtype == torch.bfloat16
    assert model.vocab_size == 50
    assert model.is_constant
    assert model.model.generation_config.eos_token_id is None
    layer = 32 * 32 * 2 + 32 * 8 * 2 + 3 * 32 * 64 + 2 * 32  # four query heads a key head
    parameters = sum(p.numel() for p in model.model.parameters())
    assert parameters == 50 * 32 + 2 * layer + 32  # the head is tied
    assert model.weight_bytes >= 2 * parameters


def test_a_random_model_repeats_by_seed():
    first, again, other = make(), make(), make(seed=1)
    weights = [m.model.get_input_embeddings().weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
