"""How far the draft is from the target, per token and over the whole vocabulary, in nats.

P = target, Q = draft, q = softmax(z) with z the draft logits, alpha = sum_x min(p, q):

    forward_kl     KL(P||Q)
    reverse_kl     KL(Q||P)
    jsd            beta KL(P||M) + (1-beta) KL(Q||M), M = beta P + (1-beta) Q   (GKD, 2306.13649)
    tvd            1/2 sum |p - q| = 1 - alpha                          (DistillSpec, 2310.08461)
    neg_log_alpha  -log alpha                                           (LK losses, 2602.23881)
    lk_hybrid      w KL(P||Q) + (1-w) TVD, w = exp(-3 alpha) held constant      (2602.23881)
    ce_argmax      -log q(argmax p): what drafts pay that propose their argmax
    next_token     -log q(x) of the token that follows: plain training, the control

All have one signature: `target_logits`, `draft_logits` [..., V] and `token_ids` [...] give [...].
The sums over the vocabulary are exact; sampled estimates have no place here. Logits are used as
they come: warp them first to train for a warped distribution. There is no T^2 factor.

Impossible tokens (logit -inf, after top-k or top-p) count as e^LOG_FLOOR, so that values and
gradients stay finite when the supports differ. For tokens that are merely unlikely nothing is
clamped. This module knows no models, no positions, no masks but the one it averages over.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from draftkit.theory.warping import promote

ETA = 3.0  # of lk_hybrid: how fast its weight moves from KL to TVD as alpha grows
LOG_FLOOR = -100.0  # e^-100 = 4e-44: nothing beside any float32 probability, yet finite


class Settings(Protocol):
    """What the divergences read of `config.DivergenceConfig`."""

    beta: float  # jsd: weight of the target in the mixture, inside (0, 1)


class Divergence(Protocol):
    """The face of every divergence; per-token nats, differentiable in `draft_logits`."""

    def __call__(
        self,
        *,
        target_logits: Tensor | None,
        draft_logits: Tensor,
        token_ids: Tensor,
        settings: Settings,
    ) -> Tensor: ...


def _floored(log_probs: Tensor) -> Tensor:
    return log_probs.masked_fill(log_probs == -torch.inf, LOG_FLOOR)


def _log_probs(logits: Tensor | None) -> Tensor:
    """log softmax in at least float32, with LOG_FLOOR for impossible tokens."""
    assert logits is not None, "only next_token does without target logits"
    return _floored(promote(logits).log_softmax(-1))


def _kl(log_first: Tensor, log_second: Tensor) -> Tensor:
    """KL(first||second), summed over the vocabulary."""
    return (log_first.exp() * (log_first - log_second)).sum(-1)


def forward_kl(
    *, target_logits: Tensor | None, draft_logits: Tensor, token_ids: Tensor, settings: Settings
) -> Tensor:
    """KL(P||Q) = sum p log(p/q). Gradient in z: q - p."""
    return _kl(_log_probs(target_logits), _log_probs(draft_logits))


def reverse_kl(
    *, target_logits: Tensor | None, draft_logits: Tensor, token_ids: Tensor, settings: Settings
) -> Tensor:
    """KL(Q||P) = sum q log(q/p). Gradient in z: q (log(q/p) - KL(Q||P))."""
    return _kl(_log_probs(draft_logits), _log_probs(target_logits))


def jsd(
    *, target_logits: Tensor | None, draft_logits: Tensor, token_ids: Tensor, settings: Settings
) -> Tensor:
    """beta KL(P||M) + (1-beta) KL(Q||M) with M = beta P + (1-beta) Q; at most the entropy of beta.

    Divided by beta it tends to KL(P||Q) as beta falls to 0; by 1-beta, to KL(Q||P) at 1. Gradient
    in z: (1-beta) q (log(q/m) - KL(Q||M)).
    """
    target, draft = _log_probs(target_logits), _log_probs(draft_logits)
    beta = settings.beta
    mixture = torch.logaddexp(target + math.log(beta), draft + math.log1p(-beta))
    return beta * _kl(target, mixture) + (1 - beta) * _kl(draft, mixture)


def _total_variation(log_first: Tensor, log_second: Tensor) -> Tensor:
    return 0.5 * (log_first.exp() - log_second.exp()).abs().sum(-1)


def tvd(
    *, target_logits: Tensor | None, draft_logits: Tensor, token_ids: Tensor, settings: Settings
) -> Tensor:
    """1/2 sum |p - q| = 1 - alpha. Gradient in z: -q (1[q<p] - sum_j q_j 1[q_j<p_j])."""
    return _total_variation(_log_probs(target_logits), _log_probs(draft_logits))


def neg_log_alpha(
    *, target_logits: Tensor | None, draft_logits: Tensor, token_ids: Tensor, settings: Settings
) -> Tensor:
    """-log sum min(p, q), exact in log space. Gradient in z: that of tvd divided by alpha."""
    overlap = torch.minimum(_log_probs(target_logits), _log_probs(draft_logits))
    return -overlap.logsumexp(-1)


def lk_hybrid(
    *, target_logits: Tensor | None, draft_logits: Tensor, token_ids: Tensor, settings: Settings
) -> Tensor:
    """w KL(P||Q) + (1-w) TVD, w = exp(-ETA alpha) of each token and constant for the gradient.

    A far draft (alpha 0) follows the KL, whose gradient does not vanish there; a close one TVD.
    """
    target, draft = _log_probs(target_logits), _log_probs(draft_logits)
    variation = _total_variation(target, draft)
    weight = torch.exp(-ETA * (1 - variation.detach()))
    return weight * _kl(target, draft) + (1 - weight) * variation


def _cross_entropy(draft_logits: Tensor, token_ids: Tensor) -> Tensor:
    """-log q(token) of each position."""
    log_probs = promote(draft_logits).log_softmax(-1)
    return -_floored(log_probs.gather(-1, token_ids[..., None])[..., 0])


def ce_argmax(
    *, target_logits: Tensor | None, draft_logits: Tensor, token_ids: Tensor, settings: Settings
) -> Tensor:
    """-log q(argmax p). Gradient in z: q - onehot(argmax p)."""
    assert target_logits is not None, "only next_token does without target logits"
    return _cross_entropy(draft_logits, target_logits.argmax(-1))


def next_token(
    *, target_logits: Tensor | None, draft_logits: Tensor, token_ids: Tensor, settings: Settings
) -> Tensor:
    """-log q(token_ids): plain language-model training; reads no target, which may be None."""
    return _cross_entropy(draft_logits, token_ids)


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "neg_log_alpha": neg_log_alpha,
    "lk_hybrid": lk_hybrid,
    "ce_argmax": ce_argmax,
    "next_token": next_token,
}
