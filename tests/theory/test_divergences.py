"""Every divergence equals its formula in value and gradient, and stays finite at the edges."""

import pytest
import torch
from torch import Tensor

from draftkit.config import DivergenceConfig
from draftkit.theory.divergences import DIVERGENCES, LOG_FLOOR

SIZE = 12
SETTINGS = DivergenceConfig()
names = pytest.mark.parametrize("name", DIVERGENCES)


def random_pair(
    rows: int = 6, size: int = SIZE, spread: float = 1.5, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Target logits, draft logits and token ids."""
    generator = torch.Generator().manual_seed(17)
    target, draft = (
        spread * torch.randn(rows, size, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return target.to(dtype), draft.to(dtype), torch.randint(size, (rows,), generator=generator)


def value_of(
    name: str,
    target_logits: Tensor,
    draft_logits: Tensor,
    token_ids: Tensor | None = None,
    settings: DivergenceConfig = SETTINGS,
) -> Tensor:
    if token_ids is None:
        token_ids = torch.zeros(draft_logits.shape[:-1], dtype=torch.int64)
    return DIVERGENCES[name](
        target_logits=target_logits,
        draft_logits=draft_logits,
        token_ids=token_ids,
        settings=settings,
    )


def gradient_of(name: str, target: Tensor, draft: Tensor, **arguments: Tensor | float) -> Tensor:
    draft = draft.clone().requires_grad_()
    value_of(name, target, draft, **arguments).sum().backward()
    assert draft.grad is not None
    return draft.grad


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Straight from the definition."""
    return (first * (first / second).log()).sum(-1, keepdim=True)


def closed_forms(
    name: str, p: Tensor, q: Tensor, tokens: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Value [..., 1] and gradient in the draft logits [..., V], written from the papers."""
    alpha = torch.minimum(p, q).sum(-1, keepdim=True)
    m = beta * p + (1 - beta) * q
    below = (q < p).double()
    tvd_gradient = -q * (below - (q * below).sum(-1, keepdim=True))
    weight = torch.exp(-3 * alpha)

    def one_hot(ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids, p.shape[-1]).double()

    best = p.argmax(-1)
    return {
        "forward_kl": (kl(p, q), q - p),
        "reverse_kl": (kl(q, p), q * ((q / p).log() - kl(q, p))),
        "jsd": (
            beta * kl(p, m) + (1 - beta) * kl(q, m),
            (1 - beta) * q * ((q / m).log() - kl(q, m)),
        ),
        "tvd": (1 - alpha, tvd_gradient),
        "neg_log_alpha": (-alpha.log(), tvd_gradient / alpha),
        "lk_hybrid": (
            weight * kl(p, q) + (1 - weight) * (1 - alpha),
            weight * (q - p) + (1 - weight) * tvd_gradient,
        ),
        "ce_argmax": (-q.log().gather(-1, best[..., None]), q - one_hot(best)),
        "next_token": (-q.log().gather(-1, tokens[..., None]), q - one_hot(tokens)),
    }[name]


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
@names
def test_value_and_gradient_equal_the_closed_forms(name: str, beta: float) -> None:
    target, draft, tokens = random_pair()
    value, gradient = closed_forms(name, target.softmax(-1), draft.softmax(-1), tokens, beta=beta)
    arguments = {"token_ids": tokens, "settings": DivergenceConfig(beta=beta)}
    found = value_of(name, target, draft, **arguments)
    torch.testing.assert_close(found, value[..., 0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(
        gradient_of(name, target, draft, **arguments), gradient, rtol=1e-11, atol=1e-13
    )


@names
def test_leading_dimensions_are_kept_and_positions_are_independent(name: str) -> None:
    target, draft, tokens = random_pair()
    flat = value_of(name, target, draft, tokens)
    shaped = value_of(name, target.view(2, 3, -1), draft.view(2, 3, -1), tokens.view(2, 3))
    assert torch.equal(shaped.flatten(), flat)


def test_next_token_needs_no_target_and_the_others_say_that_they_do() -> None:
    target, draft, tokens = random_pair()
    arguments = {"draft_logits": draft, "token_ids": tokens, "settings": SETTINGS}
    without = DIVERGENCES["next_token"](target_logits=None, **arguments)
    assert torch.equal(without, value_of("next_token", target, draft, tokens))
    for name in DIVERGENCES:
        if name != "next_token":
            with pytest.raises(AssertionError, match="next_token"):
                DIVERGENCES[name](target_logits=None, **arguments)


# Edges


def cut(logits: Tensor, ids: slice) -> Tensor:
    masked = logits.clone()
    masked[..., ids] = -torch.inf
    return masked


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", ["target", "draft", "both alike", "overlapping", "disjoint"])
@names
def test_value_and_gradient_are_finite_with_half_the_support_cut(
    name: str, side: str, dtype: torch.dtype
) -> None:
    target, draft, tokens = random_pair(dtype=dtype)
    first, second, middle = slice(0, 6), slice(6, 12), slice(3, 9)
    cuts = {
        "target": (cut(target, first), draft),
        "draft": (target, cut(draft, first)),
        "both alike": (cut(target, first), cut(draft, first)),
        "overlapping": (cut(target, first), cut(draft, middle)),
        "disjoint": (cut(target, first), cut(draft, second)),
    }
    target, draft = cuts[side]
    value = value_of(name, target, draft, tokens)
    gradient = gradient_of(name, target, draft, token_ids=tokens)
    assert value.isfinite().all()
    assert (value >= 0).all()
    assert (value <= -LOG_FLOOR + 10).all()
    assert gradient.isfinite().all()


def test_within_a_common_support_nothing_notices_the_floor() -> None:
    target, draft, _ = random_pair()
    for name in ("forward_kl", "reverse_kl", "jsd", "tvd", "neg_log_alpha", "lk_hybrid"):
        kept = value_of(name, target[:, 6:], draft[:, 6:])
        masked = value_of(name, cut(target, slice(0, 6)), cut(draft, slice(0, 6)))
        torch.testing.assert_close(masked, kept, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@names
def test_value_and_gradient_are_finite_for_logits_of_ten_thousand(
    name: str, dtype: torch.dtype
) -> None:
    target, draft, tokens = random_pair(spread=1e4, dtype=dtype)
    assert value_of(name, target, draft, tokens).isfinite().all()
    assert gradient_of(name, target, draft, token_ids=tokens).isfinite().all()


def test_an_unlikely_token_is_not_clamped_so_its_gradient_keeps_pulling() -> None:
    target = torch.tensor([[1e4, 0.0, 0.0]], dtype=torch.float64)
    draft = torch.tensor([[0.0, 1e4, 0.0]], dtype=torch.float64)
    assert value_of("forward_kl", target, draft).item() == pytest.approx(1e4)
    expected = torch.tensor([[-1.0, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient_of("forward_kl", target, draft), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@names
def test_half_precision_logits_are_raised_to_float32(name: str, dtype: torch.dtype) -> None:
    target, draft, tokens = random_pair(dtype=dtype)
    value = value_of(name, target, draft, tokens)
    assert value.dtype == torch.float32
    assert torch.equal(value, value_of(name, target.float(), draft.float(), tokens))


@names
def test_divergences_compile_without_a_break(name: str) -> None:
    target, draft, tokens = random_pair(dtype=torch.float32)
    draft = draft.requires_grad_()
    compiled = torch.compile(
        lambda p, q, ids: value_of(name, p, q, ids), backend="eager", fullgraph=True
    )
    value = compiled(target, draft, tokens)
    assert torch.equal(value, value_of(name, target, draft, tokens))
    value.sum().backward()
    assert torch.equal(draft.grad, gradient_of(name, target, draft.detach(), token_ids=tokens))
