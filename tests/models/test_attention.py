"""Plain attention equals the fused kernel, and stands in for it only where it shall."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from draftkit.models import attention as module
from draftkit.models.adapter import CausalAdapter, Packing
from draftkit.models.attention import (
    FEW,
    LONGEST,
    MANY,
    NAME,
    attention,
    fit_to_device,
    grouped_attention,
    plain_attention,
)
from tests import tiny

KEEP = torch.ones(2, 12, dtype=torch.bool)


def states_of(heads: int, shared: int, length: int = 7) -> list[Tensor]:
    """Random query, key and value in float64 that want a gradient."""
    generator = torch.Generator().manual_seed(heads + shared)
    return [
        torch.randn(2, count, length, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for count in (heads, shared, shared)
    ]


def causal(length: int = 7) -> Tensor:
    """[T, T] bool."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def added() -> Tensor:
    """[2, 1, T, T] float64: causal, and two texts a row."""
    text = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1]])
    seen = causal() & (text[:, None, :, None] == text[:, None, None, :])
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e300)


@pytest.mark.parametrize(
    "mask",
    [causal()[None, None], added() == 0, added(), None],
    ids=["one", "bool", "added", "none"],
)
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (3, 1), (8, 2)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_equal_to_the_fused_kernel(
    heads: int, shared: int, mask: Tensor | None, scaling: float | None
) -> None:
    query, key, value = states = states_of(heads, shared)
    expected = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), states)
    outputs = [plain_attention(query, key, value, mask=mask, scaling=scaling)]
    if mask is not None:
        outputs.append(grouped_attention(query, key, value, mask=mask, scaling=scaling))
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        mine = torch.autograd.grad((output * weights).sum(), states)
        torch.testing.assert_close(mine, gradients, rtol=1e-11, atol=1e-12)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which of both a call takes, in order."""
    calls: list[str] = []

    def spy(name: str) -> None:
        function: Callable[..., object] = getattr(module, name)

        def run(*arguments: object, **named: object) -> object:
            calls.append(name)
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, run)

    spy("plain_attention")
    spy("grouped_attention")
    spy("sdpa_attention_forward")
    return calls


class OnCuda(Tensor):
    """A tensor that says it is on a CUDA device."""

    @property
    def is_cuda(self) -> bool:  # pyrefly: ignore[bad-override]
        return True


@dataclass(frozen=True)
class Call:
    """What a layer asks for; keys: 32 and a mask, or None: as many as queries, and causal."""

    rows: int = 2
    heads: int = 4
    shared: int = 2
    tokens: int = 7
    keys: int | None = 32
    learns: bool = False
    dtype: torch.dtype = torch.bfloat16
    on_cuda: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


def text(tokens: int = 7, **others: Any) -> Call:
    """A whole text."""
    return Call(tokens=tokens, keys=None, **others)


PLAIN, GROUPED, FUSED = "plain_attention", "grouped_attention", "sdpa_attention_forward"
BIAS = {"position_bias": torch.zeros(1, 4, 7, 7)}
TAKEN = [
    # Short texts in half precision that learn, and very short ones.
    (text(learns=True), PLAIN),
    (text(LONGEST, learns=True), PLAIN),
    (text(LONGEST + 1, learns=True), FUSED),
    (text(FEW), PLAIN),
    (text(FEW + 1), FUSED),
    (text(dtype=torch.float32), FUSED),
    (text(dtype=torch.float32, learns=True), FUSED),
    (text(learns=True, options={"dropout": 0.1}), FUSED),
    (text(learns=True, options=BIAS), FUSED),
    # Rounds: heads that share keys, and many rows where there are no matrix units.
    (Call(rows=1, shared=4, tokens=1), FUSED),
    (Call(rows=MANY // 4 - 1, shared=4, tokens=1), FUSED),
    (Call(rows=MANY // 4, shared=4, tokens=1), PLAIN),
    (Call(rows=MANY // 4, shared=4, tokens=5), FUSED),
    (Call(rows=5 * MANY // 4, shared=4, tokens=5), PLAIN),
    (Call(rows=1, tokens=1), PLAIN),
    (Call(rows=1, tokens=FEW), PLAIN),
    (Call(rows=1, tokens=FEW + 1), FUSED),
    (Call(rows=9, shared=4, tokens=FEW + 1), FUSED),
    # On CUDA rounds repeat no keys, and all else is as it was.
    (Call(rows=40, tokens=1, on_cuda=True), GROUPED),
    (Call(rows=40, tokens=FEW, on_cuda=True), GROUPED),
    (Call(rows=40, tokens=FEW + 1, on_cuda=True), FUSED),
    (Call(rows=40, shared=4, tokens=1, on_cuda=True), FUSED),
    (Call(rows=40, tokens=1, on_cuda=True, learns=True), FUSED),
]


@pytest.mark.parametrize("matrix_units", [False, True])
@pytest.mark.parametrize(("call", "way"), TAKEN)
def test_each_call_takes_the_way_that_is_fast_for_it(
    taken: list[str], monkeypatch: pytest.MonkeyPatch, call: Call, way: str, matrix_units: bool
) -> None:
    monkeypatch.setattr(module, "HAS_MATRIX_UNITS", matrix_units)
    if matrix_units and call.heads == call.shared:
        way = FUSED
    generator = torch.Generator().manual_seed(call.rows)
    keys = call.keys or call.tokens
    query, key, value = (
        torch.randn(call.rows, heads, length, 8, generator=generator).to(call.dtype)
        for heads, length in ((call.heads, call.tokens), (call.shared, keys), (call.shared, keys))
    )
    mask = None if call.keys is None else torch.rand(call.rows, 1, call.tokens, keys) < 0.5
    if mask is not None:
        mask[..., 0] = True
    layer = torch.nn.Module()
    layer.num_key_value_groups = call.heads // call.shared
    states = [query.requires_grad_(call.learns), key, value]
    if call.on_cuda:
        states = [one.as_subclass(OnCuda) for one in states]
    output, _ = attention(layer, *states, mask, **call.options)
    assert taken == [way]
    assert output.shape == (call.rows, call.tokens, call.heads, 8)
    if call.on_cuda or call.options:
        return
    seen = causal(call.tokens) if mask is None else mask
    expected = functional.scaled_dot_product_attention(
        *(one.detach().double() for one in states), attn_mask=seen, enable_gqa=True
    )
    torch.testing.assert_close(output.double(), expected.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_without_a_mask_nobody_says_what_a_few_queries_see(taken: list[str]) -> None:
    states = [torch.randn(9, 4, length, 8).bfloat16() for length in (1, 32, 32)]
    attention(torch.nn.Module(), *states, None)
    assert taken == ["sdpa_attention_forward"]


def test_a_layer_that_is_not_causal_sees_what_comes_later(taken: list[str]) -> None:
    states = [s.detach().bfloat16().requires_grad_() for s in states_of(4, 4)]
    output, _ = attention(torch.nn.Module(), *states, None, is_causal=False)
    query, key, value = (s.detach().double() for s in states)
    expected = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    torch.testing.assert_close(output.double(), expected, rtol=2e-2, atol=2e-2)
    assert taken == ["plain_attention"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "gpt_neox", "gemma"])
def test_a_model_learns_the_same_and_scores_as_before(
    taken: list[str], architecture: str, packed: bool
) -> None:
    """Under autocast, as trainers run: gradients agree to rounding, and texts do not mix."""
    model = tiny.model(architecture)
    adapter = CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE)
    tokens = torch.randint(0, adapter.vocab_size, (2, 12), generator=torch.manual_seed(0))
    packing = None
    if packed:
        places = torch.tensor([*range(5), *range(7)]).expand(2, 12)
        packing = Packing(places, torch.tensor([1] * 5 + [2] * 7).expand(2, 12))

    def gradient() -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            states = adapter.states(tokens, KEEP, packing)
        (states.float() ** 2).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    fused = gradient()
    before = adapter.score(tokens, KEEP)
    assert model.config._attn_implementation == "sdpa"
    fit_to_device(model)
    assert model.config._attn_implementation == NAME
    plain = gradient()
    assert taken == ["plain_attention"] * model.config.num_hidden_layers
    assert (plain - fused).norm() < 0.03 * fused.norm()
    with torch.no_grad():
        assert torch.equal(adapter.score(tokens, KEEP), before)


def test_a_model_with_an_attention_of_its_choice_keeps_it() -> None:
    model = tiny.model()
    model.set_attn_implementation("eager")
    fit_to_device(model)
    assert model.config._attn_implementation == "eager"


def test_what_is_saved_does_not_know_of_it(tmp_path: Path) -> None:
    model = tiny.model()
    fit_to_device(model)
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config._attn_implementation == "sdpa"
