"""The loss of a draft: divergences between the distributions that will be *served*, and on what.

Both logits are divided by the training temperature; the served top-k and top-p cut the target's
support, so that the draft is not taught what is never sampled. The draft keeps full support, so
every divergence stays finite except the reverse KL, whose p would be zero where q is not: it is
taken at the served temperature without the cut. Penalties depend on a history that the loss does
not keep, and are left out.

A sum of divergences is one too, and the forward KL may come first, since the gradient of the total
variation vanishes where the draft is far (LK losses 2602.23881). The tokens that verification
refused may be chosen (OSD 2310.07177); a loss is a mean over the chosen, so that its scale does not
depend on how many they are. Proposals late in a block may weigh less, since they are reached less
often.

Samples are constants here: what is minimised is the expectation over fixed sequences of the sum
of per-token divergences, not the gradient of a sequence-level divergence (DistillSpec
2310.08461, GKD 2306.13649).

Shapes: M generated tokens of a batch, m of them, V vocabulary.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from draftkit.config import DivergenceConfig, SamplingConfig
from draftkit.distillation.batch import Batch
from draftkit.distillation.teacher import Outcomes, TargetScores, Warp
from draftkit.theory.divergences import DIVERGENCES, Divergence

NEEDS_FULL_SUPPORT = {"reverse_kl"}
FIRST = "forward_kl"  # what a warm-up takes
OWN = "own"  # a loss that is a function of the caller's


@cache
def compiled(name: str) -> Divergence:
    """The divergence `name` as machine code, which reads its logits once instead of ten times."""
    return torch.compile(DIVERGENCES[name], dynamic=True)


@dataclass(frozen=True)
class Objective:
    """What is minimised: divergences, and the served sampling at the training temperature.

    own: a function of the signature of all divergences, minimised instead of `divergence.name`. It
    is never compiled.
    """

    divergence: DivergenceConfig
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    temperature: float = 1.0
    compiled: bool = False
    outcomes: Outcomes | None = None  # of a draft that cannot propose all ids
    own: Divergence | None = None

    def terms(self, step: int) -> dict[str, float]:
        """The weights of divergences in the loss of `step`, from 0."""
        if step < (self.divergence.warmup_steps or 0):
            return {FIRST: 1.0}
        return {OWN: 1.0} if self.own is not None else self.divergence.terms

    def warp(self, name: str) -> Warp:
        """The distributions that divergence `name` compares."""
        if name in NEEDS_FULL_SUPPORT:
            return Warp(self.temperature)
        return Warp(self.temperature, self.sampling.top_k, self.sampling.top_p)

    def losses(
        self,
        draft_logits: Tensor,
        rows: slice,
        *,
        scores: TargetScores | None,
        token_ids: Tensor,
        step: int,
    ) -> Tensor:
        """The loss [m] of each of the tokens `rows`, in nats.

        draft_logits: raw, [m, V], of these, or of the ids that the draft can propose; token_ids [M]
        and scores (`among` the outcomes): of all tokens, scores None where no term looks at the
        target (`next_token`).
        """
        if self.outcomes is not None:
            draft_logits = self.outcomes.logits(draft_logits)
            token_ids = self.outcomes.column[token_ids]
        total = draft_logits.new_zeros((), dtype=torch.float32)
        for name, weight in self.terms(step).items():
            warp, ids = self.warp(name), token_ids[rows]
            if name == "ce_argmax":  # whose outcomes are tokens, whatever the scores tell apart
                assert scores is not None, name
                name, ids = "next_token", scores.best(rows, warp)
            if name == "next_token":
                target, draft = None, warp.draft(draft_logits)
            else:
                assert scores is not None, name
                target, draft = scores.beside(draft_logits, rows, warp)
            function = self._function(name)
            values = function(
                target_logits=target, draft_logits=draft, token_ids=ids, settings=self.divergence
            )
            if values.shape != ids.shape:
                raise ValueError(
                    f"the loss must give one number a token, {[*ids.shape]}, and gave "
                    f"{[*values.shape]}: sum over the vocabulary (dim=-1), not over the tokens"
                )
            total = total + (values if weight == 1 else weight * values)
        return total

    def _function(self, name: str) -> Divergence:
        if name == OWN:
            assert self.own is not None
            return self.own
        return compiled(name) if self.compiled else DIVERGENCES[name]

    def overlap(self, *, scores: TargetScores, draft_logits: Tensor, rows: slice) -> Tensor:
        """sum_x min(p, q) [m] of the distributions that the loss compares: 1 - TVD."""
        if self.outcomes is not None:
            draft_logits = self.outcomes.logits(draft_logits)
        target_logits, draft_logits = scores.beside(draft_logits, rows, self.warp("tvd"))
        return 1 - DIVERGENCES["tvd"](
            target_logits=target_logits,
            draft_logits=draft_logits,
            token_ids=torch.empty(0),
            settings=self.divergence,
        )


def token_weights(batch: Batch, divergence: DivergenceConfig) -> Tensor:
    """The weight [M] of each token in the sum that is divided by the sum of all weights.

    Raises ValueError where the batch does not tell what the settings ask for.
    """
    weights = torch.ones(len(batch.token_ids), device=batch.input_ids.device)
    if divergence.tokens == "rejected":
        if batch.rejected is None:
            raise ValueError(
                "divergence.tokens=rejected: this source does not tell which tokens were refused: "
                "use source=replay, or divergence.tokens=all"
            )
        weights *= batch.generated(batch.rejected)
    if divergence.position_decay not in (None, 1):
        if batch.block_offset is None:
            raise ValueError(
                "divergence.position_decay: this source has no blocks: use source=block, or 1"
            )
        weights *= divergence.position_decay ** batch.generated(batch.block_offset)
    return weights
