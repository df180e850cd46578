"""Plain attention equals the fused kernel, and stands in for it only where it shall."""

from collections.abc import Callable
from pathlib import Path

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


@pytest.mark.parametrize("mask", [causal(), added(), None], ids=["bool", "added", "none"])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_equal_to_the_fused_kernel(
    heads: int, shared: int, mask: Tensor | None, scaling: float | None
) -> None:
    query, key, value = states_of(heads, shared)
    outputs = [
        plain_attention(query, key, value, mask=mask, scaling=scaling),
        functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
        ),
    ]
    weights = torch.linspace(-1, 1, outputs[0].numel(), dtype=torch.float64)
    grads = [
        torch.autograd.grad((output.flatten() * weights).sum(), (query, key, value))
        for output in outputs
    ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-11, atol=1e-12)


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


@pytest.mark.parametrize(
    ("dtype", "length", "wants", "options", "plain"),
    [
        (torch.bfloat16, 7, True, {}, True),
        (torch.bfloat16, LONGEST, True, {}, True),
        (torch.bfloat16, LONGEST + 1, True, {}, False),
        (torch.bfloat16, FEW, False, {}, True),
        (torch.bfloat16, FEW + 1, False, {}, False),
        (torch.float32, 7, False, {}, False),
        (torch.float32, 7, True, {}, False),
        (torch.bfloat16, 7, True, {"dropout": 0.1}, False),
        (torch.bfloat16, 7, True, {"position_bias": torch.zeros(1, 4, 7, 7)}, False),
    ],
)
def test_products_are_for_short_texts_in_half_precision_that_learn(
    taken: list[str],
    dtype: torch.dtype,
    length: int,
    wants: bool,
    options: dict[str, object],
    plain: bool,
) -> None:
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2
    states = [s.detach().to(dtype).requires_grad_(wants) for s in states_of(4, 2, length)]
    named = {"dropout": 0.0, **options}
    output, _ = attention(layer, *states, None, scaling=0.5, **named)
    assert taken == ["plain_attention" if plain else "sdpa_attention_forward"]
    if "dropout" in options or "position_bias" in options:
        return
    query, key, value = (s.detach().double() for s in states)
    expected = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=causal(length), scale=0.5, enable_gqa=True
    )
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        output.double(), expected.transpose(1, 2), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(
    ("rows", "heads", "shared", "tokens", "plain"),
    [
        (1, 4, 4, 1, False),
        (MANY // 4 - 1, 4, 4, 1, False),
        (MANY // 4, 4, 4, 1, True),
        (MANY // 4, 4, 4, 5, False),
        (5 * MANY // 4, 4, 4, 5, True),
        (1, 4, 2, 1, True),
        (1, 4, 2, FEW, True),
        (1, 4, 2, FEW + 1, False),
        (9, 4, 4, FEW + 1, False),
    ],
)
@pytest.mark.parametrize("matrix_units", [False, True])
def test_products_decode_heads_that_share_keys_and_without_matrix_units_many_rows(
    taken: list[str],
    monkeypatch: pytest.MonkeyPatch,
    matrix_units: bool,
    rows: int,
    heads: int,
    shared: int,
    tokens: int,
    plain: bool,
) -> None:
    monkeypatch.setattr(module, "HAS_MATRIX_UNITS", matrix_units)
    plain = plain and not (matrix_units and heads == shared)
    generator = torch.Generator().manual_seed(rows)
    query, key, value = (
        torch.randn(rows, count, length, 8, generator=generator)
        for count, length in ((heads, tokens), (shared, 32), (shared, 32))
    )
    mask = torch.rand(rows, 1, tokens, 32, generator=generator) < 0.5
    mask[..., 0] = True
    layer = torch.nn.Module()
    layer.num_key_value_groups = heads // shared
    states = [one.bfloat16() for one in (query, key, value)]
    output, _ = attention(layer, *states, mask)
    assert taken == ["plain_attention" if plain else "sdpa_attention_forward"]
    expected = functional.scaled_dot_product_attention(
        *(one.double() for one in states), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(output.double(), expected.transpose(1, 2), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (3, 1), (8, 2)])
@pytest.mark.parametrize("kind", ["bool", "added", "one for all"])
def test_heads_that_share_keys_may_be_queries_of_one_head(
    heads: int, shared: int, kind: str
) -> None:
    query, key, value = (one.detach() for one in states_of(heads, shared))
    masks = {"bool": added() == 0, "added": added(), "one for all": causal()[None, None]}
    for scaling in (None, 0.3):
        expected = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=masks[kind], scale=scaling, enable_gqa=True
        )
        found = grouped_attention(query, key, value, mask=masks[kind], scaling=scaling)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


class OnCuda(Tensor):
    """A tensor that says it is on a CUDA device."""

    @property
    def is_cuda(self) -> bool:  # pyrefly: ignore[bad-override]
        return True


@pytest.mark.parametrize(
    ("shared", "tokens", "wants", "grouped"),
    [
        (2, 1, False, True),
        (2, FEW, False, True),
        (2, FEW + 1, False, False),
        (4, 1, False, False),
        (2, 1, True, False),
    ],
)
def test_on_cuda_rounds_repeat_no_keys_and_all_else_is_as_it_was(
    taken: list[str], shared: int, tokens: int, wants: bool, grouped: bool
) -> None:
    query, key, value = (
        torch.randn(40, heads, length, 8).bfloat16().as_subclass(OnCuda)
        for heads, length in ((4, tokens), (shared, 32), (shared, 32))
    )
    mask = torch.ones(40, 1, tokens, 32, dtype=torch.bool)
    layer = torch.nn.Module()
    layer.num_key_value_groups = 4 // shared
    output, _ = attention(layer, query.requires_grad_(wants), key, value, mask)
    assert output.shape == (40, tokens, 4, 8)
    assert taken == ["grouped_attention" if grouped else "sdpa_attention_forward"]


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
            states = adapter(tokens, KEEP, packing)
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
