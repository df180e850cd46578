"""Texts of which every token is the draft's by a coin, else the target's: OSD's mix per token.

On one growing text each token is drawn from the draft with probability `fraction`, else from the
target, so that its law is fraction * q + (1 - fraction) * p (Liu et al. 2310.07177, mix_token).
The decoder does this in rounds: the draft runs ahead, its tokens stand as long as coins fall for
it, and at the first other one the target draws in its place.

Shapes: B rows, K proposed tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.decoder import Decoder, tokens_needed
from draftkit.decoding.generation import DRAFT_ID, finish
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.distillation.samplers import AnswerSettings
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
class MixtureSampler:
    """A `Sampler` of texts whose tokens come from `draft` or `target`, by a coin each."""

    target: Adapter
    draft: Adapter
    fraction: float
    settings: AnswerSettings

    def sample(
        self, prompts: Sequence[Sequence[int]], *, rows: Sequence[int], version: str
    ) -> list[Record]:
        if not prompts:
            return []
        settings, models = self.settings, [self.target, self.draft]
        drawn = replace(settings, sampling=never_greedy(settings.sampling))
        requests = drawn.requests(prompts, rows, models=models, gamma=AHEAD)
        decoder = Decoder(
            self.target,
            slots=min(settings.batch_size, len(requests)),
            capacity=max(map(tokens_needed, requests)),
            eos_token_ids=settings.eos_token_ids,
        )
        decoder.verifier = coins(self.fraction)
        decoder.attach(DRAFT_ID, DraftModelProposer(self.draft, version=version))
        answers = finish(decoder, requests)
        fields = ({"output_ids": answer.output_ids} for answer in answers)
        return settings.records(requests, fields, sampler="mix", version=version)


def never_greedy(sampling: SamplingConfig) -> SamplingConfig:
    """The same law, exact ties aside, as sampling: greedy rounds toss no coins."""
    if sampling.temperature > 0:
        return sampling
    return replace(sampling, temperature=1.0, top_k=1, top_p=1.0)
