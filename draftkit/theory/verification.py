"""Which proposals of a round are kept, and which token follows them.

Speculative sampling (Leviathan et al., arXiv 2211.17192, algorithm 1), block verification (Sun et
al., arXiv 2403.10444, algorithm 2), exact match with the target's sample (llama.cpp, TensorRT-LLM)
and the greedy rule. The first three return tokens that have exactly the target's law whatever the
draft; they differ in how many proposals they keep. Typical acceptance (Medusa, Cai et al., arXiv
2401.10774, section 2.3.2) does not: it keeps what the target might have said.

Noise enters as tensors, one uniform a proposal and one more a round, each independent of the
others and of the noise that made the proposals. This module knows no models, no caches, no EOS and
no warping: it is given the served distributions p (target) and q (draft), where q is the law that
each proposal was really sampled from.

Shapes: B rows, K proposed tokens (gamma), V vocabulary. target_probs[:, i] and draft_probs[:, i]
are the laws of the token after i accepted proposals, so draft_tokens[:, i] came from
draft_probs[:, i] and target_probs has one position more.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from draftkit.theory.noise import sample
from draftkit.theory.warping import promote


class Verification(NamedTuple):
    """The outcome of a round: `accepted` proposals of each row, then `next_token`."""

    accepted: Tensor  # [B] int64, 0..lengths
    next_token: Tensor  # [B] int64, the correction token, or the bonus if nothing was rejected


def residual(*, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(p - q, 0) normalised over the last dimension: the law of the correction token.

    Where it sums to zero (p nowhere above q, so that only rounding can have rejected) it is p.
    Against q = 0 it is p normalised: the law of the bonus token.
    """
    excess = (target_probs - draft_probs).clamp(min=0)
    total = excess.sum(-1, keepdim=True)
    return torch.where(total > 0, excess / torch.where(total > 0, total, 1), target_probs)


def _lengths(draft_tokens: Tensor, lengths: Tensor | None) -> Tensor:
    """The number of proposals of each row [B]: all K where `lengths` is None."""
    if lengths is None:
        return draft_tokens.new_full(draft_tokens.shape[:1], draft_tokens.shape[1])
    return lengths


def _up_to(lengths: Tensor, count: int) -> Tensor:
    """Which of `count` positions lie before `lengths` [B]: [B, count] bool."""
    return torch.arange(count, device=lengths.device) < lengths[:, None]


def _draft_law(
    draft_probs: Tensor | None, draft_tokens: Tensor, lengths: Tensor, *, like: Tensor
) -> Tensor:
    """q at every position of the round, as `like` [B, K + 1, V]; 0 from the end of proposals on.

    Proposals without draft_probs were not sampled: all their mass is on the proposed token. The
    zero makes the bonus token a residual like any other: p with nothing to subtract.
    """
    if draft_probs is None:
        one_hot = like.new_zeros(*draft_tokens.shape, like.shape[-1])
        draft_probs = one_hot.scatter(-1, draft_tokens[..., None], 1.0)
    padded = F.pad(promote(draft_probs), (0, 0, 0, 1))
    is_proposed = _up_to(lengths, padded.shape[1])
    return padded.masked_fill(~is_proposed[..., None], 0.0)


def _of_tokens(probs: Tensor, draft_tokens: Tensor) -> Tensor:
    """The probability of each proposal [B, K] under the first K positions of `probs`."""
    gamma = draft_tokens.shape[1]
    return probs[:, :gamma].gather(-1, draft_tokens[..., None])[..., 0]


def _at(values: Tensor, index: Tensor) -> Tensor:
    """The position `index` [B] of each row: [B, K + 1, V] to [B, V]."""
    rows = torch.arange(len(index), device=index.device)
    return values[rows, index]  # take_along_dim would look at an index for each of V


def _leading(flags: Tensor) -> Tensor:
    """How many flags of each row [B, K] are true before the first false one: [B]."""
    return flags.long().cumprod(-1).sum(-1)


def speculative_sampling(
    *,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    lengths: Tensor | None,
    accept_uniform: Tensor,
    next_uniform: Tensor,
) -> Verification:
    """Keep proposals while u < p(x)/q(x); then a token from the residual (2211.17192, alg. 1).

    target_probs: [B, K + 1, V]; draft_probs: [B, K, V], or None for proposals that were not
    sampled (n-grams, argmax); draft_tokens: [B, K]; lengths: [B] proposals of each row, None for
    K; accept_uniform: [B, K] and next_uniform: [B], independent in [0, 1).
    The test is u q(x) < p(x), strict: u can be 0, and a token with p(x) = 0 must never pass.
    """
    target_probs = promote(target_probs)
    lengths = _lengths(draft_tokens, lengths)
    draft_law = _draft_law(draft_probs, draft_tokens, lengths, like=target_probs)
    drawn = accept_uniform * _of_tokens(draft_law, draft_tokens)  # [B, K]
    passes = drawn < _of_tokens(target_probs, draft_tokens)
    accepted = _leading(passes & _up_to(lengths, draft_tokens.shape[1]))
    correction = residual(
        target_probs=_at(target_probs, accepted), draft_probs=_at(draft_law, accepted)
    )
    return Verification(accepted, sample(probs=correction, uniform=next_uniform))


def _prefix_likelihood(*, target_probs: Tensor, draft_law: Tensor, draft_tokens: Tensor) -> Tensor:
    """P_0 = 1, P_i = min(P_(i-1) p(x_i)/q(x_i), 1) for every prefix of the block: [B, K + 1]."""
    target_of = _of_tokens(target_probs, draft_tokens)
    draft_of = _of_tokens(draft_law, draft_tokens)
    divisor = torch.where(draft_of > 0, draft_of, 1.0)  # 0 only beyond `lengths`
    prefix = [torch.ones_like(target_probs[:, 0, 0])]
    for i in range(draft_tokens.shape[1]):
        prefix.append((prefix[-1] * target_of[:, i] / divisor[:, i]).clamp(max=1))
    return torch.stack(prefix, dim=1)


def block_verification(
    *,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    lengths: Tensor | None,
    accept_uniform: Tensor,
    next_uniform: Tensor,
) -> Verification:
    """Keep the longest prefix that passes its test, judging the block jointly (2403.10444, alg. 2).

    With S_i = sum_x max(P_i p(x) - q(x), 0) in the context after x_i, prefix i passes while
    u_i < S_i/(S_i + 1 - P_i), and every prefix is tested, whatever became of the shorter ones. The
    next token comes from max(P_n p - q, 0) normalised. After the last proposal q = 0, so the test
    becomes u < P and the residual p. Arguments as in `speculative_sampling`.
    """
    target_probs = promote(target_probs)
    lengths = _lengths(draft_tokens, lengths)
    draft_law = _draft_law(draft_probs, draft_tokens, lengths, like=target_probs)
    prefix = _prefix_likelihood(
        target_probs=target_probs, draft_law=draft_law, draft_tokens=draft_tokens
    )
    scaled = prefix[..., None] * target_probs  # [B, K + 1, V] P_i p
    surplus = (scaled - draft_law).clamp(min=0).sum(-1)[:, 1:]  # [B, K] S_i
    total = surplus + 1 - prefix[:, 1:]
    bound = torch.where(total > 0, surplus / torch.where(total > 0, total, 1.0), 1.0)
    passes = (accept_uniform < bound) & _up_to(lengths, draft_tokens.shape[1])
    index = torch.arange(1, draft_tokens.shape[1] + 1, device=draft_tokens.device)
    accepted = F.pad(passes * index, (1, 0)).amax(-1)  # the largest i that passes, else 0
    correction = residual(target_probs=_at(scaled, accepted), draft_probs=_at(draft_law, accepted))
    return Verification(accepted, sample(probs=correction, uniform=next_uniform))


def _agreement(*, choices: Tensor, draft_tokens: Tensor, lengths: Tensor | None) -> Verification:
    """Keep proposals while they equal the target's `choices` [B, K + 1], then add its next one."""
    gamma = draft_tokens.shape[1]
    is_proposed = _up_to(_lengths(draft_tokens, lengths), gamma)
    accepted = _leading((choices[:, :gamma] == draft_tokens) & is_proposed)
    return Verification(accepted, choices.gather(1, accepted[:, None])[:, 0])


def match_verification(
    *,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    lengths: Tensor | None,
    accept_uniform: Tensor,
    next_uniform: Tensor,
) -> Verification:
    """Sample the target at every position; keep proposals while they equal its samples.

    Every token is the target's own sample, the first that differs being the correction, so the law
    is exact and q has no part in it. A proposal is kept with probability p(x): sum_x p q if it was
    sampled, p(argmax q) if it is the draft's argmax. Arguments as in `speculative_sampling`;
    accept_uniform[:, i] samples position i and next_uniform position K, so a row with fewer than K
    proposals takes its bonus token with accept_uniform[:, lengths].
    """
    uniform = torch.cat([accept_uniform, next_uniform[:, None]], dim=1)  # [B, K + 1]
    choices = sample(probs=target_probs.flatten(0, 1), uniform=uniform.flatten()).view_as(uniform)
    return _agreement(choices=choices, draft_tokens=draft_tokens, lengths=lengths)


def greedy_verification(
    *, target_probs: Tensor, draft_tokens: Tensor, lengths: Tensor | None
) -> Verification:
    """Keep proposals while they are the target's most likely token, then add that token.

    The limit of every rule at temperature 0: no noise. Shapes as in `speculative_sampling`; any
    monotone function of the probabilities, such as logits, serves as well.
    """
    return _agreement(choices=target_probs.argmax(-1), draft_tokens=draft_tokens, lengths=lengths)


def typical_bound(*, target_probs: Tensor, epsilon: float) -> Tensor:
    """What a token's probability must exceed to be typical: min(epsilon, sqrt(epsilon) e^-H).

    H is the entropy of target_probs [..., V] in nats; returns [...]. The surer the target, the more
    is asked of a token.
    """
    entropy = torch.special.entr(promote(target_probs)).sum(-1)
    return (epsilon**0.5 * torch.exp(-entropy)).clamp(max=epsilon)


def typical_verification(
    *, target_probs: Tensor, draft_tokens: Tensor, lengths: Tensor | None, epsilon: float
) -> Verification:
    """Keep proposals while they are typical of the target, then add its most likely token.

    Lossy: neither part has the target's law, unless that leaves no choice, as at temperature 0.
    Shapes as in `speculative_sampling`.
    """
    bound = typical_bound(target_probs=target_probs, epsilon=epsilon)[:, :-1]
    proposed = _up_to(_lengths(draft_tokens, lengths), draft_tokens.shape[1])
    accepted = _leading((_of_tokens(promote(target_probs), draft_tokens) > bound) & proposed)
    return Verification(accepted, _at(target_probs, accepted).argmax(-1))


class Verifier(Protocol):
    """The face shared by the exact rules; `speculative_sampling` documents the arguments."""

    def __call__(
        self,
        *,
        target_probs: Tensor,
        draft_probs: Tensor | None,
        draft_tokens: Tensor,
        lengths: Tensor | None,
        accept_uniform: Tensor,
        next_uniform: Tensor,
    ) -> Verification: ...


VERIFIERS: dict[str, Verifier] = {
    "speculative": speculative_sampling,
    "block": block_verification,
    "match": match_verification,
}
# In which mode of `acceptance.MODES` each accepts proposals that were sampled. Those that were not
# (n-grams, the draft's argmax) all of them accept with p(x).
SAMPLED_MODES = {"speculative": "alpha", "block": "alpha", "match": "alpha_exact_match"}
