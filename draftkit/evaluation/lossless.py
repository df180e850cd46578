"""Losslessness on the evaluation prompts: greedy speculative output equals greedy plain output.

In float32, token for token. Passes over one token and over several use different kernels, so a
near-tie may fall the other way: a mismatch is tolerated, and counted, only where the target's two
best logits differ by less than 1e-5 at the first difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import Completion, decode, make_requests
from draftkit.decoding.proposers import Proposer
from draftkit.models.adapter import Adapter

MARGIN = 1e-5


@dataclass(frozen=True)
class Losslessness:
    """How many outputs were compared, differed, and differed only by a near-tie."""

    compared: int
    mismatches: int
    near_ties: int

    @property
    def passed(self) -> bool:
        """Whether every difference is a near-tie."""
        return self.mismatches == self.near_ties

    def as_dict(self) -> dict[str, Any]:
        """The `lossless` object of a summary."""
        return {
            "method": "greedy identity in float32",
            "statistic": self.mismatches,
            "p_value": None,
            "passed": self.passed,
            "compared": self.compared,
            "near_ties": self.near_ties,
        }


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
    """Decode `prompts` greedily without and with each proposer (all in float32) and compare."""

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
        near_ties = sum(parting_margin(target, *pair) < MARGIN for pair in differing)
        return Losslessness(len(plain), len(differing), near_ties)

    return {name: compared(proposer) for name, proposer in proposers.items()}


@torch.inference_mode()
def parting_margin(target: Adapter, first: Completion, second: Completion) -> float:
    """How far the worse of both tokens lies below the best logit where two answers part.

    Infinite where one answer is the beginning of the other: no tie explains that.
    """
    pairs = [*zip(first.output_ids, second.output_ids, strict=False)]
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if common is None:
        return math.inf
    text = [*first.prompt_ids, *first.output_ids[:common]]
    tokens = torch.tensor([text], device=target.device)
    keep = torch.zeros_like(tokens, dtype=torch.bool)
    keep[:, -1] = True
    logits = target.score(tokens, keep)[0].double()
    return float(logits.max() - logits[[*pairs[common]]].min())
