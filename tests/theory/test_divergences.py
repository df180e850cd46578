"""Every divergence equals its formula in value and gradient, and stays finite at the edges."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from draftkit.config import DIVERGENCE_NAMES, DivergenceConfig
from draftkit.theory.divergences import DIVERGENCES, LOG_FLOOR

SIZE = 12
names = pytest.mark.parametrize("name", DIVERGENCES)


@dataclass
class Weights:
    """The settings that divergences read."""

    beta: float = 0.5


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
    beta: float = 0.5,
) -> Tensor:
    if token_ids is None:
        token_ids = torch.zeros(draft_logits.shape[:-1], dtype=torch.int64)
    return DIVERGENCES[name](
        target_logits=target_logits,
        draft_logits=draft_logits,
        token_ids=token_ids,
        settings=Weights(beta),
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


def test_the_dictionary_holds_exactly_the_names_that_the_configuration_offers() -> None:
    assert tuple(DIVERGENCES) == DIVERGENCE_NAMES


@names
def test_the_shipped_settings_are_what_the_divergences_read(name: str) -> None:
    target, draft, tokens = random_pair()
    value = DIVERGENCES[name](
        target_logits=target, draft_logits=draft, token_ids=tokens, settings=DivergenceConfig()
    )
    assert torch.equal(value, value_of(name, target, draft, tokens))


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
@names
def test_value_and_gradient_equal_the_closed_forms(name: str, beta: float) -> None:
    target, draft, tokens = random_pair()
    value, gradient = closed_forms(name, target.softmax(-1), draft.softmax(-1), tokens, beta=beta)
    arguments = {"token_ids": tokens, "beta": beta}
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


# Identities and bounds


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "tvd", "neg_log_alpha"])
def test_a_divergence_is_zero_between_equal_laws_and_positive_otherwise(name: str) -> None:
    target, draft, _ = random_pair()
    shifted = target + 3.0  # the same law
    assert value_of(name, target, shifted).abs().max() < 1e-14
    assert value_of(name, target, draft).min() > 1e-3
    assert gradient_of(name, target, target).abs().max() < 1e-15


def test_jsd_tends_to_the_forward_kl_at_zero_and_to_the_reverse_kl_at_one() -> None:
    target, draft, _ = random_pair()
    near = 1e-6
    low = value_of("jsd", target, draft, beta=near) / near
    torch.testing.assert_close(low, value_of("forward_kl", target, draft), rtol=1e-4, atol=0)
    high = value_of("jsd", target, draft, beta=1 - near) / near
    torch.testing.assert_close(high, value_of("reverse_kl", target, draft), rtol=1e-4, atol=0)


def test_jsd_is_asymmetric_away_from_one_half_and_mirrors_under_exchange() -> None:
    target, draft, _ = random_pair()
    here = value_of("jsd", target, draft, beta=0.3)
    assert (here - value_of("jsd", draft, target, beta=0.3)).abs().min() > 1e-4
    torch.testing.assert_close(here, value_of("jsd", draft, target, beta=0.7))
    torch.testing.assert_close(
        value_of("jsd", target, draft, beta=0.5), value_of("jsd", draft, target, beta=0.5)
    )


@pytest.mark.parametrize("beta", [0.1, 0.3, 0.5])
def test_jsd_is_at_most_the_entropy_of_beta(beta: float) -> None:
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    for spread in (1.0, 10.0, 1000.0):
        target, draft, _ = random_pair(rows=200, spread=spread)
        value = value_of("jsd", target, draft, beta=beta)
        assert value.max() <= entropy + 1e-12
    assert value.max() > entropy - 1e-6  # reached by disjoint laws


def test_the_gradient_of_tvd_raises_exactly_the_logits_where_the_draft_is_too_low() -> None:
    target, draft, _ = random_pair(rows=100)
    gradient = gradient_of("tvd", target, draft)
    is_below = draft.softmax(-1) < target.softmax(-1)
    assert (gradient[is_below] < 0).all()
    assert (gradient[~is_below] > 0).all()
    assert gradient.sum(-1).abs().max() < 1e-15


def test_tvd_obeys_pinsker_and_bretagnolle_huber() -> None:
    for spread in (0.1, 1.0, 5.0):
        target, draft, _ = random_pair(rows=500, spread=spread)
        variation = value_of("tvd", target, draft)
        divergence = value_of("forward_kl", target, draft)
        assert (variation <= (divergence / 2).sqrt() + 1e-12).all()
        assert (variation <= (1 - (-divergence).exp()).sqrt() + 1e-12).all()


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "next_token"])
def test_a_loss_is_the_exact_sum_and_does_not_look_at_the_sampled_token(name: str) -> None:
    target, draft, tokens = random_pair()
    first = value_of(name, target, draft, tokens)
    assert torch.equal(first, value_of(name, target, draft, (tokens + 1) % SIZE))


def test_next_token_needs_no_target_and_the_others_say_that_they_do() -> None:
    target, draft, tokens = random_pair()
    arguments = {"draft_logits": draft, "token_ids": tokens, "settings": Weights()}
    without = DIVERGENCES["next_token"](target_logits=None, **arguments)
    assert torch.equal(without, value_of("next_token", target, draft, tokens))
    for name in DIVERGENCES:
        if name != "next_token":
            with pytest.raises(AssertionError, match="next_token"):
                DIVERGENCES[name](target_logits=None, **arguments)


def test_log_probabilities_with_a_tail_bucket_are_as_good_as_logits() -> None:
    target, draft, _ = random_pair()
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    torch.testing.assert_close(
        value_of("forward_kl", log_p, log_q), value_of("forward_kl", target, draft)
    )


def test_two_hundred_steps_of_the_shipped_default_raise_alpha_from_a_cold_start() -> None:
    target, start, _ = random_pair(rows=8, size=2000, spread=3.0, dtype=torch.float32)

    def alpha_after(name: str) -> float:
        draft = start.clone().requires_grad_()
        optimizer = torch.optim.SGD([draft], lr=20.0)
        for _ in range(200):
            optimizer.zero_grad()
            value_of(name, target, draft).mean().backward()
            optimizer.step()
        return 1 - value_of("tvd", target, draft).mean().item()

    before = 1 - value_of("tvd", target, start).mean().item()
    assert before < 0.05
    assert alpha_after(DivergenceConfig().name) > before + 0.5
    assert alpha_after("tvd") < before + 0.1  # whose gradient vanishes where laws are disjoint


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


def test_alpha_from_bfloat16_logits_of_a_large_vocabulary_equals_float64_to_a_thousandth() -> None:
    target, noise, _ = random_pair(rows=4, size=150_000, dtype=torch.bfloat16)
    draft = (target.float() + 0.3 * noise.float()).bfloat16()
    exact = torch.minimum(target.double().softmax(-1), draft.double().softmax(-1)).sum(-1)
    half = torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1)
    from_tvd = 1 - value_of("tvd", target, draft)
    from_log = (-value_of("neg_log_alpha", target, draft)).exp()
    torch.testing.assert_close(from_tvd.double(), exact, rtol=0, atol=1e-3)
    torch.testing.assert_close(from_log.double(), exact, rtol=0, atol=1e-3)
    assert (half.double() - exact).abs().max() > 1e-3  # what the promotion is for


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
