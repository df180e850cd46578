"""The loss of a draft: a divergence between the distributions that will be *served*.

Both logits are divided by the training temperature; the served top-k and top-p cut the target's
support, so that the draft is not taught what is never sampled. The draft keeps full support, so
every divergence stays finite except the reverse KL, whose p would be zero where q is not: it is
taken at the served temperature without the cut (and the documentation says so). Penalties depend
on a history that the loss does not keep, and are left out.

Samples are constants here: what is minimised is the expectation over fixed sequences of the sum
of per-token divergences, not the gradient of a sequence-level divergence (DistillSpec
2310.08461, GKD 2306.13649).

Shapes: M generated tokens, V vocabulary.
"""

from torch import Tensor

from draftkit.config import DivergenceConfig, SamplingConfig
from draftkit.theory.divergences import DIVERGENCES
from draftkit.theory.warping import SamplingParams, warped_logits

NEEDS_FULL_SUPPORT = {"reverse_kl"}


def token_losses(
    *,
    target_logits: Tensor | None,
    draft_logits: Tensor,
    token_ids: Tensor,
    divergence: DivergenceConfig,
    sampling: SamplingConfig,
    temperature: float,
) -> Tensor:
    """Return the divergence of each token [M], in nats, from raw logits [M, V].

    `target_logits` may be None for `next_token` alone, which does not look at them.
    """
    if target_logits is not None:
        cut = divergence.name not in NEEDS_FULL_SUPPORT
        target_logits = warped_logits(
            target_logits[None],
            SamplingParams.uniform(
                1,
                temperature=temperature,
                top_k=sampling.top_k if cut else 0,
                top_p=sampling.top_p if cut else 1.0,
                device=target_logits.device,
            ),
        )[0]
    draft_logits = warped_logits(
        draft_logits[None],
        SamplingParams.uniform(1, temperature=temperature, device=draft_logits.device),
    )[0]
    return DIVERGENCES[divergence.name](
        target_logits=target_logits,
        draft_logits=draft_logits,
        token_ids=token_ids,
        settings=divergence,
    )
