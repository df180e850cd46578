"""A distribution known by its most likely tokens and the mass of all others.

Storing a target's distributions whole would take the vocabulary for every token. Its k most likely
ids, their log-probabilities at temperature 1 and the mass outside them at the temperatures that
will be asked for tell it exactly up to how that mass is spread. Compared with a draft over k + 1
outcomes, the kept ids and "another token", every divergence is at most what it is over the
vocabulary (data processing), and alpha within `alpha_bounds`.

Shapes: M tokens, k kept ids, V vocabulary. Probabilities in nats; at least float32.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from draftkit.theory.warping import promote, tempered

ROUNDING = 1e-6  # of a sum of probabilities in float32


def most_likely(
    logits: Tensor, k: int, temperatures: Sequence[float]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The k most likely ids [M, k], descending, of `logits` [M, V], and what is outside them.

    Returns them with their log-probabilities [M, k] at temperature 1, and for each temperature the
    mass [M] of all other ids.
    """
    assert 0 < k < logits.shape[-1], (k, logits.shape)
    log_probs = promote(logits).log_softmax(-1)
    kept, ids = log_probs.topk(k)
    tails = [_outside(tempered(log_probs, t).log_softmax(-1), ids).exp() for t in temperatures]
    return ids, kept, tails


def most_likely_served(
    logits: Tensor,
    k: int,
    *,
    log_sum_exp: Tensor,
    temperature: Tensor,
    served_log_sum_exp: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`most_likely` of `logits` [..., V] where their log-sum-exps [...] are already known.

    Returns ids and log-probabilities [..., k] at temperature 1, and the mass [...] of all other ids
    at `temperature` (broadcast to [...]; at temperature 1 where it is 0), to the precision of a sum
    of probabilities: what is less may come out as 0. `served_log_sum_exp` is taken at that same
    temperature.
    """
    assert 0 < k < logits.shape[-1], (k, logits.shape)
    largest, ids = promote(logits).topk(k)
    divisor = torch.where(temperature > 0, temperature, 1.0).to(largest.dtype)
    served = largest / divisor[..., None] - served_log_sum_exp[..., None]
    tail = (1 - served.exp().sum(-1)).clamp(min=0)
    return ids, largest - log_sum_exp[..., None], tail


def _outside(log_probs: Tensor, ids: Tensor) -> Tensor:
    """The log-mass [M] of all ids but `ids` [M, k], which must not be all there are."""
    return log_probs.scatter(-1, ids, -torch.inf).logsumexp(-1)


def tail_bounds(log_probs: Tensor, temperature: float, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The least and the most [M] that the mass outside k kept ids can be at `temperature`.

    log_probs: [M, k] of the most likely ids at temperature 1, descending. The others share the rest
    of the mass, each with at most the smallest of these. A sum of powers p^(1 / T) is extreme where
    they share it alike, and where as few as can be have all of it; at temperature 1 both are equal.
    """
    log_probs = log_probs.double()
    rest = (1 - log_probs.exp().sum(-1)).clamp(min=0)
    if temperature == 1:
        return rest, rest
    power, others = 1 / temperature, vocab_size - log_probs.shape[-1]
    largest = log_probs[:, :1]
    kept = (power * (log_probs - largest)).exp().sum(-1)
    smallest = log_probs.masked_fill(log_probs == -torch.inf, torch.inf).amin(-1)

    def ends(rest: Tensor) -> list[Tensor]:
        alike = power * (rest / others).log() + math.log(others)
        few = rest.log() + (power - 1) * smallest
        masses = [(one - power * largest[:, 0]).exp() for one in (alike, few)]
        return [one / (kept + one) for one in masses]

    # What is less than the rounding of a sum in float32 may be hidden by it.
    return torch.minimum(*ends(rest)), torch.maximum(*ends(rest.clamp(min=ROUNDING)))


def coarse_target(
    log_probs: Tensor,
    tail: Tensor,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    least: bool = False,
) -> Tensor:
    """Logits [M, k + 1] of the kept ids and of all others together, warped as served.

    log_probs: [M, k] at temperature 1, descending; tail: [M] at `temperature`. They are logs of
    parts of the whole mass, not normalised. A cut that reaches beyond the kept ids leaves the tail
    whole: how much of it would go is not known. With `least` such a cut takes all of the tail, and
    top-p its share of what is left: what is served lies between the two.
    """
    kept = tempered(log_probs, temperature).log_softmax(-1) + torch.log1p(-tail)[:, None]
    probs, mass = kept.exp(), torch.ones_like(tail)[:, None]
    smallest = torch.full_like(mass, -torch.inf)  # of the logits that stay, in [M, 1]
    tail_stays = torch.ones_like(mass, dtype=torch.bool)
    if 0 < top_k <= kept.shape[-1]:
        smallest = kept[:, top_k - 1, None]  # what equals it stays, as in `warped_logits`
        tail_stays = torch.zeros_like(tail_stays)
        mass = torch.where(kept >= smallest, probs, 0.0).sum(-1, keepdim=True)
    elif least and top_k > 0:
        mass = probs.sum(-1, keepdim=True)
    if top_p < 1:
        outside = probs.cumsum(-1) - probs >= top_p * mass
        smallest = torch.maximum(smallest, kept.masked_fill(outside, torch.inf).amin(-1, True))
        tail_stays = tail_stays & (probs.sum(-1, keepdim=True) < top_p * mass)
    if least and (top_k > 0 or top_p < 1):
        tail_stays = torch.zeros_like(tail_stays)
    rest = tail.log()[:, None].masked_fill(~tail_stays, -torch.inf)
    return torch.cat([kept.masked_fill(kept < smallest, -torch.inf), rest], dim=-1)


def coarse_draft(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [M, k + 1] of `ids` [M, k] and of all others together, of logits [M, V]."""
    log_probs = promote(logits).log_softmax(-1)
    return torch.cat([log_probs.gather(-1, ids), _outside(log_probs, ids)[:, None]], dim=-1)


def alpha_bounds(*, least: Tensor, most: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the most [M] that sum min(p, q) can be, of what is known of p.

    least, most: [M, k + 1], the two ends of `coarse_target`; draft_probs: [M, k] of the kept ids,
    as served. Of the other ids at most min(tail_p, tail_q) overlaps. Where top-k or top-p cut
    beyond the kept ids, p stays on the ids of `least` at least and of `most` at most, and the mass
    that it is divided by lies between theirs.
    """
    smaller, larger = (logits.logsumexp(-1, keepdim=True) for logits in (least, most))
    low = torch.minimum((least[:, :-1] - larger).exp(), draft_probs).sum(-1)
    high = torch.minimum((most[:, :-1] - smaller).exp(), draft_probs).sum(-1)
    tails = (most[:, -1] - larger[:, 0]).exp(), (1 - draft_probs.sum(-1)).clamp(min=0)
    return low, high + torch.minimum(*tails)
