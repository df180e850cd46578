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

Estimates are ratios of totals over positions. Their errors are those of documents: positions of a
text, answers to one prompt and turns of one chat are not independent, so all that shares a document
is summed before anything is compared. What one document does to a number is read off by leaving it
out, which for a ratio is the residual divided by 1 minus its share (HC3: MacKinnon and White,
Journal of Econometrics 29, 1985); the interval is Student's t with degrees of freedom that fall
where few documents hold most tokens. Where long documents have another rate than short ones, the
estimate is skewed, since few documents stand for those that decide: then the end on that side lies
further away (`tails.reach`). Intervals, verdict and gate are this one computation: of proportions
on the log-odds, of speed-ups on the logarithm. This module knows no models and no decoder.
Shapes: V vocabulary, P prompts, T tokens of a text.
"""

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from draftkit.theory.tails import (
    IN,
    IN_ON_ODDS,
    reach,
    student_t_quantile,
    student_t_tail,
    unskewed,
)
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
    a cut counts, by the average share, as decoding counts it.
    """
    lengths = torch.tensor([len(one) for one in shares])
    # [T, P, gamma], the last index is r - 1
    accepted = pad_sequence([by_position(one, gamma).double().flip(-1) for one in shares])
    onward = accepted.new_ones(gamma + 1)
    for left, average in enumerate(mean_by_position(shares, gamma).flip(0), start=1):
        onward[left] = 1 + average * onward[left - 1]
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

    shares: as in `rounds_of_texts`; rounds begin at every token with so many behind it. None where
    none is that long or none was accepted.
    """
    windows = []
    for share in (by_position(one, count).double() for one in shares if len(one) >= count):
        rounds = range(len(share) - count + 1)
        windows.append(torch.stack([share[i : i + count].diagonal() for i in rounds]))
    chains = torch.cat([*windows, torch.zeros(0, count).double()]).cumprod(1).sum(0)
    before = torch.cat([chains.new_tensor([sum(map(len, windows))]), chains[:-1]])
    return [float(x / y) if y else None for x, y in zip(chains, before, strict=True)]


LEAST_UNITS = 20  # documents, below which an interval is not given: those of fewer are too narrow


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


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval, and the positions `n`, prompts and documents behind it.

    Without an interval both its ends are infinite: nothing lies outside.
    """

    mean: float
    low: float
    high: float
    n: int
    prompts: int
    documents: int

    def __str__(self) -> str:
        """`0.812 [0.801, 0.823]`, or `0.812 (no interval: 6 documents, 20 needed)`."""
        if self.ci95 is None:
            needed = f"{self.documents} documents, {LEAST_UNITS} needed"
            return f"{self.mean:.3f} (no interval: {needed})"
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def ci95(self) -> list[float] | None:
        """The interval as summaries hold it; None where there is none."""
        return [self.low, self.high] if math.isfinite(self.high) else None

    def as_dict(self) -> dict[str, Any]:
        """The form in which every `summary.json` holds an estimate."""
        return {
            "mean": self.mean,
            "ci95": self.ci95,
            "n": self.n,
            "prompts": self.prompts,
            "documents": self.documents,
        }

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the interval."""
        return value < self.low or value > self.high


Compare = Callable[..., Tensor]  # makes a number of the values of one rate or of several


def rate_itself(rate: Tensor) -> Tensor:
    """What is estimated of a single rate."""
    return rate


def log_ratio(rate: Tensor, other: Tensor) -> Tensor:
    """log(rate / other): errors of a speed-up are alike up and down on this scale."""
    return (rate / other).log()


class _Jackknife(NamedTuple):
    """A number without an interval, its error, the degrees of freedom of that, and its skewness."""

    number: Estimate
    error: float
    degrees: float
    skewness: float


def _jackknife(*rates: Rate, compare: Compare) -> _Jackknife:
    """What `compare` makes of `rates`, and its error, by leaving out one document after the other.

    With D documents, theta of all and theta_i of all but document i, and w_i the share of document
    i in the counts (the mean of its shares where there are several rates),

        error^2 = D / (D - 1) sum_i (theta - theta_i)^2
        degrees = sum_i w_i^2 / sum_i w_i^3
        skewness = sum_i (theta - theta_i)^3 / (sum_i (theta - theta_i)^2)^1.5

    For a rate theta_i - theta is -(t_i - r n_i) / (N (1 - w_i)). Degrees are D for documents of one
    length. They lie between what is right where the tokens of a document are independent,
    1 / sum w^2, and where they agree entirely, (sum w^2)^2 / sum w^4; intervals by the former cover
    too little, by the latter too much (tests/evaluation/simulated.py). One document has error NaN.
    Documents without any position are no observation; raises ValueError where one has positions on
    one side alone.
    """
    first = rates[0]
    columns = [column.detach().cpu().double() for rate in rates for column in rate[:2]]
    table = torch.stack(columns, dim=-1)  # [P, 2 x rates], counts in the odd columns
    prompts = int((table[:, 1] > 0).sum())
    if len(first.documents):
        numbers = {key: number for number, key in enumerate(dict.fromkeys(first.documents))}
        index = torch.tensor([numbers[key] for key in first.documents])
        table = table.new_zeros(len(numbers), table.shape[1]).index_add(0, index, table)
    table = table[table[:, 1::2].sum(-1) > 0]
    if not (table[:, 1::2] > 0).all():
        raise ValueError("paired estimates need positions on both sides of every document")

    def statistic(sums: Tensor) -> Tensor:
        return compare(*(sums[..., ::2] / sums[..., 1::2]).unbind(-1))

    totals, documents = table.sum(0), len(table)
    value, without = statistic(totals), statistic(totals - table)
    shares = (table[:, 1::2] / totals[1::2]).mean(-1)
    moved = value - without
    squares = moved.square().sum()
    error = math.sqrt(squares * documents / (documents - 1)) if documents > 1 else math.nan
    degrees = float(shares.square().sum() / shares.pow(3).sum())
    skewness = float(moved.pow(3).sum() / squares**1.5) if error else 0.0
    number = Estimate(float(value), -math.inf, math.inf, int(totals[1]), prompts, documents)
    return _Jackknife(number, error, degrees, skewness)


def estimate(
    *rates: Rate,
    compare: Compare = rate_itself,
    least: int = LEAST_UNITS,
    tail: float = 0.025,
    inward: float = IN,
) -> Estimate:
    """A rate, or what `compare` makes of several, with its interval over documents.

    Several are paired: by the documents of the first, in which all are summed. `operator.sub` gives
    a gain. `n` are the counts of the first. There is no interval for under `least` documents;
    `tail` is the probability outside of it on either side, where it is looked at once; `inward` is
    for `reach`.
    """
    number, error, degrees, skewness = _jackknife(*rates, compare=compare)
    if number.documents < max(2, least):
        return number
    t = student_t_quantile(degrees, tail)
    down, up = (error * reach(t, one, inward) for one in (-skewness, skewness))
    return replace(number, low=number.mean - down, high=number.mean + up)


def proportion(rate: Rate, *, least: float = 0.0, most: float = 1.0) -> Estimate:
    """A rate between `least` and `most`, as alpha is, with its interval, made on the log-odds.

    Tokens a pass lie between 1 and those of a whole round. Near a bound errors of the rate itself
    are not alike up and down, those of log((rate - least) / (most - rate)) are. Where one document
    holds all that was accepted, or refused, there are no log-odds without it: then the interval is
    that of `estimate`.
    """
    plain, wide = estimate(rate), most - least
    odds = estimate(
        rate, compare=lambda value: torch.logit((value - least) / wide), inward=IN_ON_ODDS
    )
    if not math.isfinite(odds.high):
        return plain
    low, high = torch.tensor([odds.low, odds.high], dtype=torch.float64).sigmoid().tolist()
    return replace(plain, low=least + wide * low, high=least + wide * high)


def acceptance_length(rate: Rate, gamma: int) -> Estimate:
    """tau of rounds with `gamma` proposals, between 1 and gamma + 1, with its interval."""
    return proportion(rate, least=1.0, most=gamma + 1.0)


def speedup(fast: Rate, slow: Rate, *, tail: float = 0.025) -> Estimate:
    """fast / slow with its interval, of rates of the same documents, in tokens per second.

    All four totals vary: answers differ in length where they are sampled, so that tokens per second
    and not seconds are compared. The interval is made on the logarithm.
    """
    log = estimate(fast, slow, compare=log_ratio, tail=tail)
    return replace(log, mean=math.exp(log.mean), low=math.exp(log.low), high=math.exp(log.high))


def gain_p_value(*rates: Rate, compare: Compare = operator.sub) -> float:
    """How likely a paired gain this large would be if there were none: one-sided, in [0, 1].

    rates: as `estimate` takes them, those after first. By the error, the degrees of freedom and the
    skewness of its interval. NaN where a total is; raises ValueError with fewer than 2 documents.
    """
    gain, error, degrees, skewness = _jackknife(*rates, compare=compare)
    if gain.documents < 2:
        raise ValueError(f"a test needs at least 2 documents with positions, got {gain.documents}")
    if error == 0:
        return math.nan if math.isnan(gain.mean) else float(gain.mean <= 0)
    towards_none = -math.copysign(skewness, skewness * gain.mean)
    tail = student_t_tail(unskewed(abs(gain.mean) / error, towards_none), degrees)
    return tail if gain.mean > 0 else 1 - tail


def unconditional_rates(accept_counts: Tensor) -> Tensor:
    """A_i = P(first i proposals all accepted), i = 1..gamma; tau = 1 + sum_i A_i, exactly."""
    at_least = accept_counts.flip(-1).cumsum(-1).flip(-1).double()  # [..., gamma + 1] n >= i
    return at_least[..., 1:] / at_least[..., :1]
