"""Losslessness on the evaluation prompts: greedy speculative output equals greedy plain output.

Token for token, in float32 or in the dtype that is served. Passes over one token and over several
use different kernels, so a near-tie may fall the other way. A mismatch is tolerated, and counted,
only where every token from there on lies within the rounding of the best one: such an answer is
read again by one pass of the target, which is no part of the decoder.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion, decode, make_requests
from draftkit.decoding.proposers import Proposer
from draftkit.models.adapter import Adapter

MARGIN = 1e-5  # at least
# How far two logits may err against each other, in units of the last place of the largest. Between
# passes of other shapes they differ by 1 to 3 of them, by 10 at most in 28 layers.
ULPS = 16


@dataclass(frozen=True)
class Losslessness:
    """How many outputs were compared, differed, and differed only by near-ties, in which dtype."""

    compared: int
    mismatches: int
    near_ties: int
    dtype: torch.dtype = torch.float32

    @property
    def passed(self) -> bool | None:
        """Whether every difference is a near-tie; None where nothing was compared."""
        return self.mismatches == self.near_ties if self.compared else None

    def as_dict(self) -> dict[str, Any]:
        """The `lossless` object of a summary."""
        name = str(self.dtype).removeprefix("torch.")
        return {
            "method": f"greedy identity in {name}" if self.compared else "not checked",
            "statistic": self.mismatches if self.compared else None,
            "p_value": None,
            "passed": self.passed,
            "compared": self.compared,
            "near_ties": self.near_ties,
        }


NOT_CHECKED = Losslessness(0, 0, 0)


def greedy_identity(
    target: Adapter,
    proposers: Mapping[str, Proposer],
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    gamma: int,
    batch_size: int,
    eos_token_ids: Sequence[int],
) -> dict[str, Losslessness]:
    """Decode `prompts` greedily without and with each proposer and compare, as the models are."""

    def outputs(proposer: Proposer | None) -> list[Completion]:
        requests = make_requests(
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=SamplingConfig(temperature=0.0),
            gamma=0 if proposer is None else gamma,
        )
        return decode(
            target,
            list(requests),
            eos_token_ids=eos_token_ids,
            batch_size=batch_size,
            proposer=proposer,
        )

    plain = outputs(None)

    def compared(proposer: Proposer) -> Losslessness:
        pairs = zip(plain, outputs(proposer), strict=True)
        differing = [pair for pair in pairs if pair[0].output_ids != pair[1].output_ids]
        near_ties = sum(differ_by_rounding(target, *pair) for pair in differing)
        return Losslessness(len(plain), len(differing), near_ties, target.dtype)

    return {name: compared(proposer) for name, proposer in proposers.items()}


def parting(first: Completion, second: Completion) -> int | None:
    """Where two answers part; None where one begins the other, which no tie explains."""
    pairs = zip(first.output_ids, second.output_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def differ_by_rounding(target: Adapter, plain: Completion, other: Completion) -> bool:
    """Whether two greedy answers part at a near-tie, and the other goes on by best tokens alone."""
    start = parting(plain, other)
    if start is None:
        return False
    gaps, margins = below_best(target, other, start)
    (gap, *_), (margin, *_) = below_best(target, plain, start)
    return bool((gaps < margins).all() and gap < margin)  # which NaN is not


def parting_margin(target: Adapter, first: Completion, second: Completion) -> float:
    """How far the worse of both tokens lies below the best logit where two answers part.

    Infinite where one answer is the beginning of the other.
    """
    start = parting(first, second)
    if start is None:
        return math.inf
    return max(float(below_best(target, answer, start)[0][0]) for answer in (first, second))


@torch.inference_mode()
def below_best(target: Adapter, answer: Completion, start: int) -> tuple[Tensor, Tensor]:
    """How far the logits of the tokens of `answer` from `start` on lie below the best ones, and
    how far they may by rounding: [N] each, by one pass over the text.
    """
    text = [*answer.prompt_ids, *answer.output_ids]
    chosen = torch.tensor(answer.output_ids[start:], device=target.device)
    keep = torch.zeros(1, len(text) - 1, dtype=torch.bool, device=target.device)
    keep[:, len(answer.prompt_ids) + start - 1 :] = True
    logits = target.score(torch.tensor([text[:-1]], device=target.device), keep)
    best, least = logits.amax(-1).double(), logits.amin(-1).double()
    largest = torch.maximum(best.abs(), least.abs())
    margins = (ULPS * torch.finfo(logits.dtype).eps * largest).clamp(min=MARGIN)
    return best - logits.gather(1, chosen[:, None])[:, 0].double(), margins
