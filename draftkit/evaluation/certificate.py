"""Whether a server's answers with a drafter have its own law without one: two samples, no model.

Greedy answers must be equal. They may part at near-ties, within the engine's rounding: this is
measured on the server without a drafter, which answers twice, in batches of other sizes.

Sampled answers are compared by tokens 2 to gamma + 2 among those to one prompt with one first
token, since engines draw the first token undrafted. Two chains are as alike as they have equal
tokens, and equal pairs of neighbours, in equal positions. The statistic is the squared distance
of both samples' means under this kernel (Gretton et al., JMLR 13, 2012, eq. 5), summed over groups.
Its level is exact, because labels are permuted within groups.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftkit.evaluation.lossless import MARGIN, Losslessness, binomial_tail, parting

LEVEL, POWER = 0.01, 0.9
PERMUTATIONS = 999


class Answer(NamedTuple):
    """Its tokens as texts; by text the log-probabilities (nats) of the likeliest at each."""

    tokens: Sequence[str]
    likeliest: Sequence[Mapping[str, float]]


def rounding(plain: Sequence[Answer], again: Sequence[Answer]) -> float:
    """The largest change of a gap between two log-probabilities after the same text, in nats."""
    changes = [MARGIN]
    for a, b in zip(plain, again, strict=True):
        at = parting(a.tokens, b.tokens)
        for x, y in zip(a.likeliest[: None if at is None else at + 1], b.likeliest, strict=False):
            pairs = combinations(x.keys() & y.keys(), 2)
            changes += [abs(x[one] - x[other] - y[one] + y[other]) for one, other in pairs]
    return max(changes)


def greedy_identity(
    plain: Sequence[Answer], again: Sequence[Answer], drafted: Sequence[Answer]
) -> dict[str, Any]:
    """Greedy answers with the drafter beside those without, which came twice.

    They pass as in `lossless`: by near-ties alone, and not by many more than plain answers have.
    """
    margin = rounding(plain, again)

    def near_ties(others: Sequence[Answer]) -> list[bool]:
        """Of each answer that is another one, whether it parts at a near-tie."""
        pairs = [(a, b) for a, b in zip(plain, others, strict=True) if a.tokens != b.tokens]
        ends = [(a, b, parting(a.tokens, b.tokens)) for a, b in pairs]
        return [
            at is not None
            and a.likeliest[at][a.tokens[at]] - a.likeliest[at].get(b.tokens[at], -np.inf) <= margin
            for a, b, at in ends
        ]

    ties, own = near_ties(drafted), len(near_ties(again))
    p_value = binomial_tail(sum(ties), own)
    identity = Losslessness(len(plain), len(ties), sum(ties), p_value=p_value)
    counts = identity.as_dict() | {"method": "greedy identity", "rounding_nats": margin}
    return counts | {"near_ties_without_drafter": own}


def groups_of(
    drafted: Sequence[Sequence[Answer]], plain: Sequence[Sequence[Answer]], gamma: int
) -> Iterator[tuple[NDArray[np.float64], int]]:
    """By prompt and first token, where both samples have some: the kernel [n, n] of n chains, and
    how many of them, the first ones, are drafted. A chain goes on with "" behind its end."""
    for samples in zip(drafted, plain, strict=True):
        chains: dict[str, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
        for side, answers in enumerate(samples):
            for answer in answers:
                first, *chain = (*answer.tokens, *[""] * (gamma + 2))[: gamma + 2]
                chains[first][side].append(chain)
        for with_drafter, without in filter(all, chains.values()):
            _, ids = np.unique([*with_drafter, *without], return_inverse=True)
            equal = [column[:, None] == column for column in ids.reshape(-1, gamma + 1).T]
            pairs = [one & other for one, other in pairwise(equal)]  # [n, n] by token
            yield np.sum([*equal, *pairs], axis=0, dtype=float), len(with_drafter)


def same_law(
    drafted: Sequence[Sequence[Answer]],
    plain: Sequence[Sequence[Answer]],
    *,
    gamma: int,
    seed: int,
) -> dict[str, Any]:
    """Whether sampled answers, by prompt, have one law with the drafter and without.

    `smallest_bias` is the total variation of a bias that is seen with probability `POWER`: a share
    s of all drafted chains of a group becomes one of them, chain c. With m = n_with n_without / n
    that adds s^2 m^2 |phi_c - mu|^2 to the statistic, and 2 s^2 m v to its variance v. `passed` is
    None where no difference is seen and no such bias would be.
    """
    draw, observed, null = np.random.default_rng(seed), 0.0, np.zeros(PERMUTATIONS)
    signal, cross, varied, compared, groups, labellings = 0.0, 0.0, 0.0, 0, 0, 1
    for kernel, count in groups_of(drafted, plain, gamma):
        n = len(kernel)
        labels = np.where(np.arange(n) < count, 1 - count / n, -count / n)
        shuffled = draw.permuted(np.tile(labels, (PERMUTATIONS, 1)), axis=1)
        distances = ((shuffled @ kernel) * shuffled).sum(-1)
        observed, null = observed + labels @ kernel @ labels, null + distances
        size, same, most = count * (1 - count / n), n * (n - 1), kernel[0, 0]
        likeness = (kernel.sum() - n * most) / same  # of two chains
        signal += size**2 * (n - 2) / (n - 1) * (most - likeness)
        cross += size * distances.var()
        varied += n - ((kernel == most).sum() - n) / (n - 1)
        compared, groups, labellings = compared + n, groups + 1, labellings * math.comb(n, count)
    # Equal statistics may differ by the order of their sums.
    p_value = float(1 + (null >= observed - 1e-6).sum()) / (PERMUTATIONS + 1)
    # (s^2 signal - gap)^2 = z^2 (variance + 2 s^2 cross), solved for s^2.
    gap, square = np.quantile(null, 1 - LEVEL) - null.mean(), NormalDist().inv_cdf(POWER) ** 2
    half = signal * gap + square * cross
    root = np.sqrt(half**2 - signal**2 * (gap**2 - square * null.var()))
    able = signal > 0 and labellings > PERMUTATIONS  # else no statistic is rare enough
    share = np.sqrt(half + root) / signal if able else np.inf
    return {
        "method": f"tokens 2 to {gamma + 2} given the first",
        "answers": [sum(map(len, side)) for side in (drafted, plain)],
        "compared": compared,
        "groups": groups,
        "p_value": p_value,
        "level": LEVEL,
        "smallest_bias": float(share * varied / compared) if share <= 1 else None,
        "power": POWER,
        "passed": False if p_value <= LEVEL else True if share <= 1 else None,
    }
