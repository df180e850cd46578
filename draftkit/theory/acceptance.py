"""What acceptance means, and how it is counted.

Three modes, for the three ways engines verify (q = the law proposals are sampled from):

    sampled        sum_x min(p, q) = beta    p/q acceptance; its mean over contexts is alpha
    argmax draft   p(argmax q)               the draft proposes its argmax
    exact match    sum_x p q                 a sampled proposal must equal the target's sample

What a text says of rounds. Committed tokens have the target's distribution, whoever proposed them.
Given that x was committed, it was an accepted proposal with probability

    sampled        min(p, q)(x) / p(x)      argmax draft   1 if x = argmax q      exact match   q(x)

whatever happened before it, so text that the target sampled tells how many rounds the decoder would
have taken to write it, at any gamma and without decoding: `rounds_of_texts`.

Counted quantities follow from one histogram: rounds by number of accepted proposals, n = 0..gamma.
Servers call accepted/drafted the acceptance rate; it is below alpha, because its denominator holds
proposals that were never tested. Functions of one alpha assume the i.i.d. model of Leviathan et
al. (arXiv 2211.17192, section 3.1: every context has the same alpha); where contexts differ,
the true acceptance length is larger than the one at the mean alpha.

This module knows no models and no decoder. Shapes: V vocabulary, P prompts, T tokens of a text.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from draftkit.theory.warping import promote


def sampled_acceptance(*, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """sum_x min(p, q): the acceptance probability of a sampled proposal; [..., V] to [...]."""
    return torch.minimum(promote(target_probs), promote(draft_probs)).sum(-1)


def greedy_draft_acceptance(*, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """p(argmax q): the acceptance probability where the draft proposes its most likely token."""
    proposed = draft_probs.argmax(-1, keepdim=True)
    return promote(target_probs).gather(-1, proposed)[..., 0]


def exact_match_acceptance(*, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """sum_x p q: the probability that independent samples of target and draft agree."""
    return (promote(target_probs) * promote(draft_probs)).sum(-1)


def sampled_share(*, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """min(1, q(x) / p(x)): P(x was an accepted proposal | x was committed); tokens x [...].

    1 where p(x) is 0, which the target samples never, but may by rounding.
    """
    target, draft = (_of(tokens, promote(probs)) for probs in (target_probs, draft_probs))
    return torch.where(target > 0, draft / target, 1.0).clamp(max=1)


def greedy_draft_share(*, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """1 where x = argmax q, else 0: the same where the draft proposes its most likely token."""
    return (draft_probs.argmax(-1) == tokens).to(promote(target_probs).dtype)


def exact_match_share(*, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """q(x): the same where a proposal must equal an independent sample of the target."""
    return _of(tokens, promote(draft_probs))


# By the names that summaries give them: what is accepted of the proposals, and the share of a text.
MODES = {
    "alpha": sampled_acceptance,
    "alpha_greedy_draft": greedy_draft_acceptance,
    "alpha_exact_match": exact_match_acceptance,
}
SHARES = {
    "alpha": sampled_share,
    "alpha_greedy_draft": greedy_draft_share,
    "alpha_exact_match": exact_match_share,
}


def _of(tokens: Tensor, probs: Tensor) -> Tensor:
    """The probabilities [...] of `tokens` [...] in `probs` [..., V]."""
    return probs.gather(-1, tokens[..., None])[..., 0]


def rounds_of_texts(shares: Sequence[Tensor], gamma: int, *, cut: Tensor | None = None) -> "Rate":
    """What rounds of `gamma` proposals are expected to emit, over their number, by text [P].

    shares: of each text, P(its token was an accepted proposal | the token) [T]; or [T, K] where it
    depends on the position of the proposal in its round, as of a drafter that proposes in one pass
    (what a round cannot reach is 0). cut [P]: which texts end by a limit of their length, default
    all. The probability that token t is tested with r proposals of its round left,

        B(t + 1, r - 1) = share(t, gamma - r) B(t, r) for r > 0
        B(t + 1, gamma) = B(t, 0) + sum over r > 0 of (1 - share(t, gamma - r)) B(t, r)

    begins as B(0, gamma) = 1; a round begins with each B(t, gamma). What a round would emit behind
    a cut counts, as decoding counts it: a proposal there is accepted as often as those that stand
    there in a round are, given those before them (`chain_acceptance`). The average share would be
    too low, since what follows accepted proposals is easier: in 150 greedy texts of 64 tokens, by
    0.004 of tau at five proposals.
    """
    lengths = torch.tensor([len(one) for one in shares])
    # [T, P, gamma], the last index is r - 1
    accepted = pad_sequence([by_position(one, gamma).double().flip(-1) for one in shares])
    onward = accepted.new_ones(gamma + 1)  # what the rest of a round emits, with r left
    chain = [*zip(chain_acceptance(shares, gamma), mean_by_position(shares, gamma), strict=True)]
    for left, (given, average) in enumerate(reversed(chain), start=1):
        onward[left] = 1 + (average if given is None else given) * onward[left - 1]
    state = accepted.new_zeros(gamma + 1, len(shares))  # B(t, r), the first index is r
    state[gamma] = 1
    rounds, emitted = accepted.new_zeros(len(shares)), lengths.double()
    ends = lengths if cut is None else torch.where(cut, lengths, 0)
    for t, share in enumerate(accepted):
        rounds = rounds + torch.where(lengths > t, state[gamma], 0.0)
        kept = share.T * state[1:]  # [gamma, P]
        begun = (state[1:] - kept).sum(0) + state[0]
        emitted = emitted + torch.where(ends == t + 1, onward[:-1] @ kept, 0.0)
        state = torch.cat([kept, begun[None]])
    return Rate(emitted, rounds)


def by_position(shares: Tensor, gamma: int) -> Tensor:
    """`shares` [T] or [T, K] of a text by the position of the proposal in its round: [T, gamma].

    Proposals behind the K that were looked at count as refused.
    """
    if shares.dim() == 1:
        return shares[:, None].expand(-1, gamma)
    return pad(shares[:, :gamma], (0, max(0, gamma - shares.shape[1])))


def mean_by_position(shares: Sequence[Tensor], gamma: int) -> Tensor:
    """The mean share [gamma] of every position, over the tokens that can stand there."""
    columns = torch.cat([by_position(one, gamma).double() for one in shares])
    if shares[0].dim() == 1:
        return columns.mean(0)
    reached = torch.cat([torch.arange(len(one)) for one in shares])
    can = reached[:, None] >= torch.arange(gamma)
    return (columns * can).sum(0) / can.sum(0).clamp(min=1)


def chain_acceptance(shares: Sequence[Tensor], count: int) -> list[float | None]:
    """How often proposal 1, 2, ..., `count` of a round is accepted, given those before it were.

    shares: as in `rounds_of_texts`; a round begins at every token, and counts up to the end of its
    text. None where no text is that long or none was accepted.
    """
    lengths = torch.tensor([len(one) for one in shares])
    padded = pad_sequence([by_position(one, count).double() for one in shares])  # [T, P, count]
    number, chain, rates = torch.arange(len(padded))[:, None], torch.ones_like(padded[..., 0]), []
    for position in range(count):
        share = padded[position:, :, position]
        tested = chain[: len(share)] * (number[position:] < lengths)
        chain = tested * share
        rates.append(float(chain.sum() / tested.sum()) if tested.any() else None)
    return rates


class Rate(NamedTuple):
    """Sums by prompt whose quotient is a rate: `totals` over `counts`, [P] each.

    documents: what each prompt belongs to [P]; empty where each is a document of its own.
    """

    totals: Tensor
    counts: Tensor
    documents: Sequence[Hashable] = ()

    @staticmethod
    def of(pairs: Iterable[tuple[float, float]], documents: Sequence[Hashable] = ()) -> "Rate":
        """A total and a count of each prompt."""
        table = torch.tensor([*pairs], dtype=torch.float64).reshape(-1, 2)
        return Rate(table[:, 0], table[:, 1], documents)

    @property
    def mean(self) -> float:
        return float(self.totals.sum() / self.counts.sum())


def unconditional_rates(accept_counts: Tensor) -> Tensor:
    """A_i = P(first i proposals all accepted), i = 1..gamma; tau = 1 + sum_i A_i, exactly."""
    at_least = accept_counts.flip(-1).cumsum(-1).flip(-1).double()  # [..., gamma + 1] n >= i
    return at_least[..., 1:] / at_least[..., :1]
