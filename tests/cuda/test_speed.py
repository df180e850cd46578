"""What only a card can decide, printed: code of units, attention, the making of a large model.

On the CPU the same code runs in small, and measures nothing.
"""

import time
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from draftkit.models.adapter import CausalAdapter
from draftkit.models.attention import (
    fit_to_device,
    grouped_attention,
    plain_attention,
    sdpa_attention_forward,
)
from tests.cuda.card import milliseconds, on_devices

# Layers, hidden and inner size, heads, ids.
EIGHT_BILLION, SMALL = (32, 4096, 14336, 32, 128_256), (2, 32, 32, 4, 256)


def llama(device: torch.device) -> CausalAdapter:
    """A model of 8 B random weights in bfloat16 on a card, of small sizes on the CPU."""
    layers, hidden, inner, heads, ids = EIGHT_BILLION if device.type == "cuda" else SMALL
    config = LlamaConfig(
        vocab_size=ids,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,  # as in Llama 3
        tie_word_embeddings=True,
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return CausalAdapter(fit_to_device(model.eval()), vocab_size=ids)


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
    target = llama(device)
    assert target.device.type == device.type
    if on_cuda:
        torch.cuda.synchronize(device)
        assert time.perf_counter() - started < 20
        assert target.weight_bytes > 14e9
        assert torch.cuda.max_memory_allocated(device) < 1.1 * target.weight_bytes
