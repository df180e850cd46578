"""Models for speed alone have the shape that was wanted, and repeat by seed."""

import torch

from draftkit.config import HardwareConfig
from pipelines.benchmarks.random_models import random_model, shape


def test_a_random_model_has_its_shape_and_precision_and_repeats_by_seed():
    hardware = HardwareConfig(device="cpu", dtype="bfloat16")
    one, again, other = (
        random_model(shape(2, 32, 64, 4, vocab_size=50), hardware, seed=seed) for seed in (0, 0, 1)
    )
    assert (one.dtype, one.vocab_size) == (torch.bfloat16, 50)
    assert one.is_constant
    assert one.model.generation_config.eos_token_id is None
    layer = 32 * 32 * 2 + 32 * 8 * 2 + 3 * 32 * 64 + 2 * 32  # four query heads a key head
    parameters = sum(p.numel() for p in one.model.parameters())
    assert parameters == 50 * 32 + 2 * layer + 32  # the head is tied
    assert one.weight_bytes >= 2 * parameters
    weights = [m.model.get_input_embeddings().weight for m in (one, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
