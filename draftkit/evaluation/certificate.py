"""Whether a server's answers with a drafter have its own law without one: two samples, no model.

Greedy answers must be equal but for near-ties (`lossless`), within the engine's rounding: this is
measured on the server without a drafter, which answers twice, in batches of other sizes.

Sampled answers are compared by tokens 2 to gamma + 2 among those to one prompt with one first
token, since engines draw the first token undrafted. Two chains are as alike as they have equal
tokens, and equal pairs of neighbours, in equal positions. The statistic is the squared distance
of both samples' means under this kernel (Gretton et al., JMLR 13, 2012, eq. 5), summed over groups.
Its level is exact, because labels are permuted within groups.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, combinations, pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftkit.evaluation.lossless import MARGIN, greedy_identity, parting, partings

LEVEL, POWER = 0.01, 0.9
PERMUTATIONS = 999
FORMS = ("temperature", "repeats")  # of a bias


class Answer(NamedTuple):
    """Its tokens as texts; by text the log-probabilities (nats) of the likeliest at each."""

    tokens: Sequence[str]
    likeliest: Sequence[Mapping[str, float]]


def same_greedy(
    plain: Sequence[Answer], again: Sequence[Answer], drafted: Sequence[Answer]
) -> dict[str, Any]:
    """Greedy answers with the drafter beside those without, which came twice.

    Rounding is the largest change of a gap between two log-probabilities after the same text.
    """
    margin = MARGIN  # in nats
    for a, b in zip(plain, again, strict=True):
        at = parting(a.tokens, b.tokens)
        for x, y in zip(a.likeliest[: None if at is None else at + 1], b.likeliest, strict=False):
            for one, other in combinations(x.keys() & y.keys(), 2):
                margin = max(margin, abs(x[one] - x[other] - y[one] + y[other]))

    def near_ties(parted: Mapping[int, int]) -> list[bool]:
        ties = []
        for number, at in parted.items():
            token, by_text = plain[number].tokens[at], plain[number].likeliest[at]
            other = by_text.get(drafted[number].tokens[at], -np.inf)
            ties.append(by_text[token] - other <= margin)
        return ties

    own, once_more, others = ([one.tokens for one in side] for side in (plain, again, drafted))
    identity = greedy_identity(own, others, again=lambda: once_more, near_ties=near_ties)
    counts = identity.as_dict() | {"method": "greedy identity", "rounding_nats": margin}
    return counts | {"near_ties_without_drafter": len(partings(own, once_more))}


def groups_of(
    drafted: Sequence[Sequence[Answer]], plain: Sequence[Sequence[Answer]], gamma: int
) -> Iterator[tuple[NDArray[np.float64], int, NDArray[np.float64]]]:
    """By prompt and first token, where both samples have some: the kernel [n, n] of n chains, how
    many of them, the first ones, are drafted, and the warmth of each [n]. A chain goes on with ""
    behind its end."""
    for samples in zip(drafted, plain, strict=True):
        padded = [(*one.tokens, *[""] * (gamma + 2))[: gamma + 2] for one in chain(*samples)]
        _, ids = np.unique(padded, return_inverse=True)
        ids, with_drafter = ids.reshape(-1, gamma + 2), np.arange(len(padded)) < len(samples[0])
        table = warmth(ids[with_drafter], int(ids.max(initial=0)) + 1)
        for first in np.unique(ids[:, 0]):
            of = ids[:, 0] == first
            chains, count = ids[of], int(with_drafter[of].sum())
            if 0 < count < len(chains):
                equal = [column[:, None] == column for column in chains.T[1:]]
                pairs = [one & other for one, other in pairwise(equal)]  # [n, n] by token
                kernel = np.sum([*equal, *pairs], axis=0, dtype=float)
                yield kernel, count, table[chains[:, :-1], chains[:, 1:]].sum(-1)


def warmth(ids: NDArray[np.int64], tokens: int) -> NDArray[np.float64]:
    """By a token and the one behind it [V, V]: the derivative of the pair's log-probability by the
    inverse temperature, log p less its mean, in nats.

    p is that of the answers `ids` [N, T], smoothed by how often each token occurs at all, with as
    much weight as a token has different ones behind it (Witten and Bell, 1991).
    """
    counts = np.zeros((tokens, tokens))
    np.add.at(counts, (ids[:, :-1], ids[:, 1:]), 1)
    anywhere = (counts.sum(0) + 1) / (counts.sum() + tokens)
    behind = np.maximum((counts > 0).sum(1, keepdims=True), 1)
    p = (counts + behind * anywhere) / (counts.sum(1, keepdims=True) + behind)
    return np.log(p) - (p * np.log(p)).sum(1, keepdims=True)


def same_law(
    drafted: Sequence[Sequence[Answer]],
    plain: Sequence[Sequence[Answer]],
    *,
    gamma: int,
    seed: int,
) -> dict[str, Any]:
    """Whether sampled answers, by prompt, have one law with the drafter and without.

    `biases` holds, for two forms of bias, the total variation of chains from which on it is seen
    with probability `POWER`; None where none is. With m = n_with n_without / n of a group, a change
    s d of the mean of phi adds s^2 m^2 |d|^2 to the statistic.

    - `repeats`: a share s of all drafted chains of a group becomes one of them, chain c. Then d is
      phi_c - mu. The statistic's variance v grows by 2 s^2 m v.
    - `temperature`: the inverse temperature grows by s. Then d is the covariance of phi and warmth
      h, and the variance grows by 4 s^2 m^3 d' cov(phi) d. h is learned from the drafted chains,
      and d measured on the plain ones: no chain answers for itself.

    `smallest_bias` is the larger of both. `passed` is None where no difference is seen and one of
    these biases would not be.
    """
    draw, observed, null = np.random.default_rng(seed), 0.0, np.zeros(PERMUTATIONS)
    compared, groups, labellings = 0, 0, 1
    # By form: what s^2 adds to the statistic and to its variance; the chains that s changes.
    forms = {form: np.zeros(3) for form in FORMS}
    for kernel, count, warm in groups_of(drafted, plain, gamma):
        n = len(kernel)
        labels = np.where(np.arange(n) < count, 1 - count / n, -count / n)
        shuffled = draw.permuted(np.tile(labels, (PERMUTATIONS, 1)), axis=1)
        distances = ((shuffled @ kernel) * shuffled).sum(-1)
        observed, null = observed + labels @ kernel @ labels, null + distances
        size, same, most = count * (1 - count / n), n * (n - 1), kernel[0, 0]
        likeness = (kernel.sum() - n * most) / same  # of two chains
        repeated = n - ((kernel == most).sum() - n) / (n - 1)
        signal = size**2 * (n - 2) / (n - 1) * (most - likeness)
        forms["repeats"] += signal, 2 * size * distances.var(), repeated
        forms["temperature"] += tilted(kernel[count:, count:], warm[count:], n, size)
        compared, groups, labellings = compared + n, groups + 1, labellings * math.comb(n, count)
    # Equal statistics may differ by the order of their sums.
    p_value = float(1 + (null >= observed - 1e-6).sum()) / (PERMUTATIONS + 1)
    able = labellings > PERMUTATIONS  # else no statistic is rare enough
    gap = float(np.quantile(null, 1 - LEVEL) - null.mean())
    biases = {
        form: smallest(added, cross, gap, float(null.var())) * changed / compared
        if able
        else np.inf
        for form, (added, cross, changed) in forms.items()
    }
    bias = max(biases.values())
    return {
        "method": f"tokens 2 to {gamma + 2} given the first",
        "answers": [sum(map(len, side)) for side in (drafted, plain)],
        "compared": compared,
        "groups": groups,
        "p_value": p_value,
        "level": LEVEL,
        "biases": {form: float(one) if one <= 1 else None for form, one in biases.items()},
        "smallest_bias": float(bias) if bias <= 1 else None,
        "power": POWER,
        "passed": False if p_value <= LEVEL else True if bias <= 1 else None,
    }


def tilted(
    kernel: NDArray[np.float64], warm: NDArray[np.float64], n: int, size: float
) -> tuple[float, float, float]:
    """What a change of the temperature does to a group of n chains, of which these are plain: to
    the statistic, to its variance, and how many chains it changes."""
    count = len(kernel)
    centred = kernel - kernel.mean(0) - kernel.mean(1, keepdims=True) + kernel.mean()
    apart = warm - warm.mean()
    toward = centred @ apart / count
    own = centred.diagonal() @ apart**2 / count  # of each chain with itself
    signal = size**2 * (apart @ toward - own) / max(count - 1, 1)
    variance = 4 * size**3 * toward @ toward / count
    return signal, variance, n * np.abs(warm).mean() / 2


def smallest(signal: float, cross: float, gap: float, variance: float) -> float:
    """The s from which on s^2 signal exceeds the gap to the level with probability `POWER`:

    (s^2 signal - gap)^2 = z^2 (variance + s^2 cross), solved for s^2.
    """
    if signal <= 0:
        return math.inf
    square = NormalDist().inv_cdf(POWER) ** 2
    half = signal * gap + square * cross / 2
    root = math.sqrt(half**2 - signal**2 * (gap**2 - square * variance))
    return math.sqrt(half + root) / signal
