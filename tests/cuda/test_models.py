"""Models on a CUDA device: no plan for each shape, finite gradients, sums in chunks."""

import time

import pytest
import torch

from draftkit.config import HardwareConfig, SamplingConfig
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.generation import finish
from draftkit.models.adapter import CausalAdapter, Packing
from draftkit.models.attention import fit_to_device
from draftkit.models.devices import resolve_device
from pipelines.benchmarks import training
from tests import tiny
from tests.cuda.card import on_devices
from tests.decoding.driving import request


@pytest.fixture
def chosen(device: torch.device) -> torch.device:
    """`device`, after what every command does before it loads a model."""
    assert resolve_device(HardwareConfig(device=device.type)).type == device.type
    if device.type == "cuda":
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    return device


@on_devices
def test_prompts_of_new_lengths_take_no_plans(chosen: torch.device) -> None:
    """In milliseconds each, after the first: attention by cuDNN, off here, plans each new shape."""
    model = tiny.model(max_position_embeddings=4096, hidden_size=512, intermediate_size=512)
    adapter = CausalAdapter(model.to(chosen, torch.bfloat16), vocab_size=tiny.VOCAB_SIZE)
    count = 30 if chosen.type == "cuda" else 3
    seconds = []
    for number in range(count + 1):
        decoder = Decoder(adapter, slots=1, capacity=2304)
        length = 100 + 61 * number
        wanted = request([1 + n % 99 for n in range(length)], new=1, gamma=0)
        started = time.perf_counter()
        finish(decoder, [wanted])
        seconds.append(time.perf_counter() - started)
    if chosen.type == "cuda":
        assert sorted(seconds[1:])[-2] < 0.1, seconds  # a plan takes 20 ms in each of 16 passes
        assert sum(seconds[1:]) / count < 0.03, seconds


@on_devices
def test_a_packed_step_has_a_finite_gradient(chosen: torch.device) -> None:
    """192 tokens of two texts, and scores far below zero: cuDNN's gradient had NaN in it there.

    pytorch#196678; also failures on an H200 (pytorch#190321), and masks of another dtype misread
    (pytorch#191612).
    """
    model = tiny.model(hidden_size=256, num_attention_heads=4, max_position_embeddings=256)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(8)
            layer.self_attn.k_proj.weight.mul_(8)
    adapter = CausalAdapter(fit_to_device(model.to(chosen)), vocab_size=tiny.VOCAB_SIZE)
    tokens = torch.randint(0, 256, (2, 192), generator=torch.manual_seed(0)).to(chosen)
    places = torch.tensor([*range(96)] * 2, device=chosen).expand(2, 192)
    segments = torch.tensor([1] * 96 + [2] * 96, device=chosen).expand(2, 192)
    keep = torch.ones_like(tokens, dtype=torch.bool)
    with torch.autocast(chosen.type, torch.bfloat16):
        states = adapter.states(tokens, keep, Packing(places, segments))
    states.float().square().mean().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert len(gradients) > 10
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@on_devices
def test_a_loss_in_chunks_is_the_whole_loss_in_a_quarter_of_its_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cuda = device.type == "cuda"
    if not on_cuda:
        small = {"LOSS_TOKENS": 700, "LOSS_VOCAB_SIZE": 512, "LOSS_WIDTHS": (16, 16)}
        for name, size in small.items():
            monkeypatch.setattr(training, name, size)
    found = training.chunked_costs(divergence="forward_kl", device=device, seed=0)
    assert found["chunked_gradient_error"] < 1e-3
    assert found["chunked_time_ratio"] > 0
    if on_cuda:
        assert found["chunked_peak_fraction"] <= 0.25, found


@on_devices
def test_a_model_on_the_device_scores_as_on_the_cpu(chosen: torch.device) -> None:
    model = tiny.model("qwen2")
    adapter = CausalAdapter(fit_to_device(model), vocab_size=tiny.VOCAB_SIZE)
    tokens = torch.randint(0, 256, (3, 40), generator=torch.manual_seed(0))
    keep = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        expected = adapter.score(tokens, keep)
        adapter.to(chosen)
        found = adapter.score(tokens.to(chosen), keep.to(chosen)).cpu()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    greedy = SamplingConfig(temperature=0.0)
    decoder = Decoder(adapter, slots=2, capacity=64)
    answers = finish(decoder, [request([1, 2, row], gamma=0, sampling=greedy) for row in range(2)])
    assert [len(answer.output_ids) for answer in answers] == [10, 10]
