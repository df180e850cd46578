"""What only a card can decide, printed: code of units, attention, the making of a large model.

On the CPU the same code runs in small, and measures nothing.
"""

import time
from typing import Any

import pytest
import torch

from draftkit.config import HardwareConfig
from draftkit.models.adapter import CausalAdapter
from draftkit.models.attention import grouped_attention, plain_attention, sdpa_attention_forward
from pipelines.benchmarks.random_models import random_model, shape
from tests.cuda.card import milliseconds, on_devices

EIGHT_BILLION, DRAFT_SHAPE, SMALL = (4096, 14336, 32), (768, 3072, 12), (32, 32, 4)


def llama(
    device: torch.device, layers: int, sizes: tuple[int, int, int] = EIGHT_BILLION
) -> CausalAdapter:
    """A random model of `sizes` (hidden, inner, heads) on a card, of small ones on the CPU."""
    if device.type == "cuda":
        hardware = HardwareConfig(device="cuda", dtype="bfloat16")
        return random_model(shape(layers, *sizes), hardware, seed=0)
    hardware = HardwareConfig(device="cpu", dtype="float32")
    return random_model(shape(layers, *SMALL, vocab_size=256), hardware, seed=0)


@on_devices
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("slots", [256, 1024])
def test_ways_to_attend_to_keys_that_heads_share_agree(
    device: torch.device, rows: int, slots: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five queries of 32 heads on 8, in rows of a cache that holds more slots."""
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    query = torch.randn(rows, 32, 5, 128, device=device, dtype=half)
    cache = torch.randn(2, rows, 8, slots + 64, 128, device=device, dtype=half)
    key, value = cache[0, :, :, :slots], cache[1, :, :, :slots]
    mask = torch.zeros(rows, 1, 5, slots, device=device, dtype=half)
    mask[..., slots // 2 :] = torch.finfo(half).min
    layer = torch.nn.Module()
    layer.num_key_value_groups = 4

    def repeated() -> Any:
        return sdpa_attention_forward(layer, query, key, value, mask)[0].transpose(1, 2)

    ways = {
        "repeated": repeated,
        "grouped": lambda: grouped_attention(query, key, value, mask=mask, scaling=None),
        "plain": lambda: plain_attention(query, key, value, mask=mask, scaling=None),
    }
    expected = repeated().float()
    took = {}
    for name, way in ways.items():
        torch.testing.assert_close(way().float(), expected, atol=2e-2, rtol=2e-2)
        took[name] = milliseconds(device, way)
    if device.type == "cuda":
        with capsys.disabled():
            times = ", ".join(f"{name} {1000 * time:.0f} us" for name, time in took.items())
            print(f"\n{rows} rows, {slots} slots: {times}")  # noqa: T201
        assert took["grouped"] < 1.3 * took["repeated"]


@on_devices
def test_a_model_of_eight_billion_weights_is_made_where_it_stays(device: torch.device) -> None:
    """In seconds, and in little more memory than its weights."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    target = llama(device, 32 if on_cuda else 2)
    assert target.device.type == device.type
    if on_cuda:
        torch.cuda.synchronize(device)
        assert time.perf_counter() - started < 20
        assert target.weight_bytes > 14e9
        assert torch.cuda.max_memory_allocated(device) < 1.1 * target.weight_bytes
