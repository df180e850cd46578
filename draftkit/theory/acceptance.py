"""What acceptance means, how it is counted, and how certain a counted number is.

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

Estimates are ratios of totals over positions, with percentile intervals from a bootstrap over
prompts, since positions of one text are not independent. Resampling uses `noise`, so the same data
give the same interval. Whether a ratio lies above another one is decided by a t test, which knows
levels that no thousand resamples can show. This module knows no models and no decoder.
Shapes: V vocabulary, P prompts, T tokens of a text.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftkit.theory.noise import RESAMPLE, uniform
from draftkit.theory.speedup import expected_tokens
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


def rounds_of_texts(
    shares: Sequence[Tensor],
    gamma: int,
    *,
    cut: Tensor | None = None,
    last: Sequence[Tensor] | None = None,
) -> "Rate":
    """What rounds of `gamma` proposals are expected to emit, over their number, by text [P].

    shares: of each text, P(its token was an accepted proposal | the token) [T]. last: where it is
    true [T] a draft that proposes this token proposes none behind it in that round. cut [P]: which
    texts end by a limit of their length, default all. The probability that token t is tested with
    r proposals of its round left,

        B(t + 1, r - 1) = share(t) B(t, r) for r > 0
        B(t + 1, gamma) = B(t, 0) + sum over r > 0 of (1 - share(t)) B(t, r)

    begins as B(0, gamma) = 1; a round begins with each B(t, gamma). What a round would emit behind
    a cut counts, by the average share, as decoding counts it.
    """
    lengths = torch.tensor([len(one) for one in shares])
    accepted = pad_sequence([one.double() for one in shares])  # [T, P]
    ending = torch.zeros_like(accepted) if last is None else pad_sequence([*last]).double()
    average = float(torch.cat([*shares]).double().mean())
    onward = accepted.new_tensor([expected_tokens(average, left) for left in range(gamma + 1)])
    state = accepted.new_zeros(gamma + 1, len(shares))  # B(t, r), the first index is r
    state[gamma] = 1
    rounds, emitted = accepted.new_zeros(len(shares)), lengths.double()
    ends = lengths if cut is None else torch.where(cut, lengths, 0)
    for t, (share, stops) in enumerate(zip(accepted, ending, strict=True)):
        rounds = rounds + torch.where(lengths > t, state[gamma], 0.0)
        kept = share * state[1:]  # [gamma, P]
        begun = (state[1:] - kept).sum(0) + state[0]
        kept[0] = kept[0] + stops * kept[1:].sum(0)
        kept[1:] *= 1 - stops
        emitted = emitted + torch.where(ends == t + 1, onward[:-1] @ kept, 0.0)
        state = torch.cat([kept, begun[None]])
    return Rate(emitted, rounds)


class Rate(NamedTuple):
    """Sums by prompt whose quotient is a rate: `totals` over `counts`, [P] each."""

    totals: Tensor
    counts: Tensor

    @staticmethod
    def of(pairs: Iterable[tuple[float, float]]) -> "Rate":
        """A total and a count of each prompt."""
        return Rate(*torch.tensor([*pairs], dtype=torch.float64).unbind(-1))

    @property
    def mean(self) -> float:
        return float(self.totals.sum() / self.counts.sum())


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, positions `n` and prompts behind it."""

    mean: float
    low: float
    high: float
    n: int
    prompts: int

    def __str__(self) -> str:
        """`0.812 [0.801, 0.823]`."""
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_dict(self) -> dict[str, Any]:
        """The form in which every `summary.json` holds an estimate."""
        return {
            "mean": self.mean,
            "ci95": [self.low, self.high],
            "n": self.n,
            "prompts": self.prompts,
        }

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the interval."""
        return value < self.low or value > self.high


def _resampled_sums(columns: Tensor, *, seed: int, resamples: int) -> Tensor:
    """Sums of [P, C] over prompts drawn with replacement: [resamples, C].

    In blocks, so that memory does not grow with prompts times resamples.
    """
    prompts = len(columns)
    block = max(1, 2**20 // prompts)
    sums = []
    for start in range(0, resamples, block):
        row = torch.arange(start, min(start + block, resamples))
        drawn = uniform(
            seed=torch.full_like(row, seed),
            row=row,
            length=torch.zeros_like(row),
            count=prompts,
            purpose=RESAMPLE,
        )
        sums.append(columns[(drawn * prompts).long()].sum(1))
    return torch.cat(sums)


def bootstrap(
    *rates: Rate,
    compare: Callable[..., Tensor] = lambda rate: rate,
    seed: int = 0,
    resamples: int = 2000,
) -> Estimate:
    """A rate, or what `compare` makes of several, with its interval over resampled prompts.

    Several are paired, since prompts are resampled with all their rates: `operator.sub` gives a
    gain, `operator.truediv` a speed-up. `n` are the counts of the first. A prompt without any
    position is no observation; raises ValueError where fewer than 2 remain, or where one has
    positions on one side alone.
    """
    columns = [column.detach().cpu().double() for rate in rates for column in rate]
    table = torch.stack(columns, dim=-1)  # [P, 2 x rates], counts in the odd columns
    table = table[table[:, 1::2].sum(-1) > 0]
    prompts = len(table)
    if prompts < 2:
        raise ValueError(f"an interval needs at least 2 prompts with positions, got {prompts}")
    if not (table[:, 1::2] > 0).all():
        raise ValueError("paired estimates need positions on both sides of every prompt")

    def statistic(sums: Tensor) -> Tensor:
        return compare(*(sums[..., ::2] / sums[..., 1::2]).unbind(-1))

    drawn = statistic(_resampled_sums(table, seed=seed, resamples=resamples))
    low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    totals = table.sum(0)
    return Estimate(float(statistic(totals)), low, high, int(totals[1]), prompts)


def _linearised(rate: Rate) -> tuple[float, Tensor]:
    """A rate, and what each prompt [P] adds to it beyond the mean: (t_i - r n_i) / mean(n).

    The rate linearised at the data (Cochran, Sampling Techniques, chapter 6).
    """
    totals, counts = rate.totals.double(), rate.counts.double()
    ratio = totals.sum() / counts.sum()
    return float(ratio), (totals - ratio * counts) / counts.mean()


def rate_error(rate: Rate) -> float:
    """The standard error of a rate over prompts, sqrt(sum_i e_i^2 / (P (P - 1))); NaN for one."""
    _, residuals = _linearised(rate)
    return float(residuals.std()) / len(residuals) ** 0.5


def gain_p_value(after: Rate, before: Rate) -> float:
    """How likely a paired gain this large would be if there were none: one-sided, in [0, 1].

    Student's t of the difference of the two rates of the same prompts, each linearised at the
    data, with P - 1 degrees of freedom. NaN where a total is; raises ValueError with fewer than 2
    prompts.
    """
    observed = after.counts > 0
    prompts = int(observed.sum())
    if prompts < 2:
        raise ValueError(f"a test needs at least 2 prompts with positions, got {prompts}")
    (new, residuals), (old, others) = (
        _linearised(Rate(side.totals[observed], side.counts[observed])) for side in (after, before)
    )
    error = float((residuals - others).square().sum().div(prompts * (prompts - 1)).sqrt())
    if error == 0:
        return math.nan if math.isnan(new - old) else float(new <= old)
    return student_t_tail((new - old) / error, prompts - 1)


def student_t_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's t with a whole number of degrees of freedom.

    The finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4; absolute error below 1e-12.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    cosine = math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    inside = math.sin(angle) * total
    if odd:
        inside = (angle + inside) * 2 / math.pi
    return (1 - inside) / 2


def unconditional_rates(accept_counts: Tensor) -> Tensor:
    """A_i = P(first i proposals all accepted), i = 1..gamma; tau = 1 + sum_i A_i, exactly."""
    at_least = accept_counts.flip(-1).cumsum(-1).flip(-1).double()  # [..., gamma + 1] n >= i
    return at_least[..., 1:] / at_least[..., :1]


def tail_bound(
    *, kept_overlap: Tensor, target_tail: Tensor, draft_tail: Tensor
) -> tuple[Tensor, Tensor]:
    """Bounds of alpha from stored ids: A <= alpha <= A + min(tail_p, tail_q).

    kept_overlap: A = sum of min(p, q) over the kept ids; the tails are the masses outside them.
    """
    return kept_overlap, kept_overlap + torch.minimum(target_tail, draft_tail)
