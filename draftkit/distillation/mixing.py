"""Texts of which every token is the draft's by a coin, else the target's: OSD's mix per token.

On one growing text each token is drawn from the draft with probability `fraction`, else from the
target, so that its law is fraction * q + (1 - fraction) * p (Liu et al. 2310.07177, mix_token).
The decoder does this in rounds: the draft runs ahead, its tokens stand as long as coins fall for
it, and at the first other one the target draws in its place.

Shapes: B rows, K proposed tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.decoder import Decoder, tokens_needed
from draftkit.decoding.generation import DRAFT_ID, finish
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.state import Request
from draftkit.distillation.samplers import Sampler
from draftkit.models.adapter import Adapter
from draftkit.theory.noise import sample
from draftkit.theory.verification import Verification, Verifier

AHEAD = 4  # tokens that the draft runs ahead


def coins(fraction: float) -> Verifier:
    """Verification that accepts each proposal with probability `fraction`, whatever p and q say."""

    def verify(
        *,
        target_probs: Tensor,
        draft_probs: Tensor | None,
        draft_tokens: Tensor,
        lengths: Tensor | None,
        accept_uniform: Tensor,
        next_uniform: Tensor,
    ) -> Verification:
        kept = (accept_uniform < fraction).long().cumprod(1).sum(1)  # [B] before the first other
        # The draft has not said what it would draw after its last token, so that one ends a round.
        last = draft_tokens.shape[1] - 1
        target_law = target_probs[torch.arange(len(kept), device=kept.device), kept]  # [B, V]
        drawn = sample(probs=target_law, uniform=next_uniform)
        next_token = torch.where(kept > last, draft_tokens[:, last], drawn)
        return Verification(accepted=kept.clamp(max=last), next_token=next_token)

    return verify


@dataclass(frozen=True, kw_only=True)
class MixtureSampler(Sampler):
    """Texts whose tokens come from `draft` or `target`, by a coin each."""

    target: Adapter
    draft: Adapter
    fraction: float
    name: str = "mix"
    gamma: int = AHEAD

    @property
    def models(self) -> Sequence[Adapter]:
        return [self.target, self.draft]

    def answers(self, requests: Sequence[Request]) -> Iterator[dict[str, Any]]:
        if not requests:
            return
        drawn = [replace(one, sampling=never_greedy(one.sampling)) for one in requests]
        decoder = Decoder(
            self.target,
            slots=min(self.settings.batch_size, len(drawn)),
            capacity=max(map(tokens_needed, drawn)),
            eos_token_ids=self.settings.eos_token_ids,
        )
        decoder.verifier = coins(self.fraction)
        decoder.attach(DRAFT_ID, DraftModelProposer(self.draft))
        for answer in finish(decoder, drawn):
            yield {"output_ids": answer.output_ids}


def never_greedy(sampling: SamplingConfig) -> SamplingConfig:
    """The same law, exact ties aside, as sampling: greedy rounds toss no coins."""
    if sampling.temperature > 0:
        return sampling
    return replace(sampling, temperature=1.0, top_k=1, top_p=1.0)
