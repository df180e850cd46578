"""Where 1 - alpha is lost: by the target's entropy, by position in the answer, by category.

The losses of the parts of each sum to 1 - alpha. Made of the scores of single tokens, in float64,
with intervals over documents, for parts that `LEAST_UNITS` documents or more have tokens in: what
few of many documents lose is skewed, and an interval over all of them holds it too rarely.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftkit.evaluation.alpha import PromptTotals
from draftkit.evaluation.intervals import proportion
from draftkit.theory.acceptance import Rate

# Where each part begins, and its name. Nats of the target's own law, and tokens of the answer.
ENTROPIES = {0: "under 0.5", 0.5: "0.5 to 1", 1: "1 to 2", 2: "2 to 3", 3: "3 and more"}
POSITIONS = {1: "1 to 8", 9: "9 to 32", 33: "33 to 128", 129: "129 to 512", 513: "513 and more"}
UNSURE = 2  # nats, from which the target itself is unsure: as of 7 tokens that are equally likely
CATEGORIES, OTHERS = 8, "others"  # parts of the categories with the most prompts, and of the rest


def breakdown(scored: PromptTotals) -> dict[str, list[dict[str, Any]]]:
    """The parts of `entropy`, `position` and, where prompts are of several, `category`.

    Of each its name (`part`), its share of the `tokens`, `alpha` there, and how much of 1 - alpha
    is `lost` there.
    """
    entropies = torch.cat(scored.entropies)
    positions = torch.cat([torch.arange(1, len(one) + 1) for one in scored.accepted])
    parts = {
        "entropy": _parts(scored, _cut(entropies, [*ENTROPIES]), [*ENTROPIES.values()]),
        "position": _parts(scored, _cut(positions, [*POSITIONS]), [*POSITIONS.values()]),
    }
    if len(common := [name for name, _ in Counter(scored.domains).most_common()]) > 1:
        names = [*common[:CATEGORIES], OTHERS]
        numbers = [min(common.index(domain), CATEGORIES) for domain in scored.domains]
        of_tokens = torch.tensor(numbers).repeat_interleave(scored.counts.long())
        parts["category"] = _parts(scored, of_tokens, names)
    return parts


def _cut(values: Tensor, starts: Sequence[float]) -> Tensor:
    """The number of the part of each of `values`."""
    return torch.bucketize(values.double(), torch.tensor(starts[1:]).double(), right=True)


def _parts(scored: PromptTotals, part: Tensor, names: Sequence[str]) -> list[dict[str, Any]]:
    """What is said of the parts that have tokens; `part`: the number of each token's [N]."""
    texts = torch.arange(len(scored.counts)).repeat_interleave(scored.counts.long())
    accepted = torch.cat(scored.accepted)

    def by_prompt(of_tokens: Tensor) -> Tensor:
        return torch.zeros_like(scored.counts).index_add(0, texts, of_tokens)

    rows = []
    for number, name in enumerate(names):
        inside = (part == number).double()
        if inside.any():
            tokens, lost = by_prompt(inside), by_prompt(inside * (1 - accepted))
            alpha = proportion(Rate(tokens - lost, tokens, scored.documents))
            loss = proportion(Rate(lost, scored.counts, scored.documents)).as_dict()
            rows.append(
                {
                    "part": name,
                    "tokens": float(inside.mean()),
                    "alpha": alpha.as_dict(),
                    "lost": loss | ({} if alpha.ci95 else {"ci95": None}),
                }
            )
    return rows
