"""One training step of a draft, for `distill`, `prepare` and the online daemon alike.

AdamW over `accelerate`, warm-up then cosine, gradient clipping. Losses are means over generated
tokens, normalised over all ranks and micro-batches together: eight rows at once and one row eight
times give the same gradient. The step knows no source, no folder and no schedule of evaluation.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftkit.config import DivergenceConfig, OptimConfig, SamplingConfig
from draftkit.distillation.batch import Batch
from draftkit.distillation.losses import token_losses
from draftkit.distillation.teacher import Teacher
from draftkit.models.adapter import CausalAdapter
from draftkit.theory.acceptance import sampled_acceptance
from draftkit.theory.warping import SamplingParams, warp

RATE_TIMES_WIDTH = 0.1


@dataclass(frozen=True)
class StepMetrics:
    """What one step did. `alpha` is sum_x min(p, q) at the training temperature, before it."""

    loss: float
    alpha: float | None
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float


def learning_rate_for(width: int) -> float:
    """A peak rate for a draft of hidden size `width`: AdamW wants it inversely proportional to
    the width (Yang et al. 2203.03466, table 3); the constant was measured at width 64.
    """
    return RATE_TIMES_WIDTH / width


def schedule(step: int, optim: OptimConfig) -> float:
    """Share of the peak rate at `step` (from 0): linear warm-up, then cosine to 0.1, or 1."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    done = (step - optim.warmup_steps) / max(1, optim.max_steps - optim.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


class Trainer:
    """A draft, its optimizer, and the teacher that it learns from (None for `next_token`)."""

    def __init__(
        self,
        draft: CausalAdapter,
        teacher: Teacher | None,
        *,
        optim: OptimConfig,
        divergence: DivergenceConfig,
        sampling: SamplingConfig,
        temperature: float = 1.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.draft = draft
        self.teacher = teacher
        self.optim = optim
        self.divergence = divergence
        self.sampling = sampling
        self.temperature = temperature
        self.steps = 0
        self.tokens = 0
        self.peak_rate = optim.learning_rate or learning_rate_for(draft.width)
        self._autocast = autocast
        self.accelerator = Accelerator(cpu=draft.device.type == "cpu")
        parameters = list(draft.parameters())
        for parameter in parameters:
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=self.peak_rate,
            betas=(optim.adam_beta1, optim.adam_beta2),
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self._module: nn.Module
        self._module, self._step_optimizer = self.accelerator.prepare(draft, self.optimizer)

    def step(self, batch: Batch, *, measure: bool = False) -> StepMetrics:
        """Take one optimizer step on `batch`; with `measure`, also report its alpha.

        Raises ValueError when the loss is not finite: the weights stay those of the last step.
        """
        started = time.perf_counter()
        rate = self.peak_rate * schedule(self.steps, self.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._module.train()
        tokens = int(self.accelerator.reduce(batch.loss_mask[:, 1:].sum(), "sum"))
        loss, overlap = 0.0, 0.0
        parts = batch.micro_batches(self.optim.gradient_accumulation_steps)
        for index, part in enumerate(parts):
            last = index + 1 == len(parts)
            # Ranks exchange gradients once a step, with the last micro-batch.
            quiet = nullcontext() if last else self.accelerator.no_sync(self._module)
            with quiet:
                values, part_overlap = self._losses(part, measure)
                # Data-parallel wrappers average over ranks; the loss is a mean over all tokens.
                share = values.sum() / tokens * self.accelerator.num_processes
                self.accelerator.backward(share)
            loss += float(values.detach().sum()) / tokens
            overlap += part_overlap / tokens
        if not math.isfinite(loss):
            self.optimizer.zero_grad()
            raise ValueError(
                f"the loss became {loss} at step {self.steps}: lower optim.learning_rate"
            )
        norm = self.accelerator.clip_grad_norm_(self._module.parameters(), self.optim.max_grad_norm)
        assert norm is not None
        self._step_optimizer.step()
        self._step_optimizer.zero_grad()
        self._module.eval()  # whoever samples or scores between steps sees no dropout
        self.steps += 1
        self.tokens += tokens
        return StepMetrics(
            loss=loss,
            alpha=overlap if measure and self.teacher is not None else None,
            grad_norm=float(norm),
            learning_rate=rate,
            tokens=tokens,
            seconds=time.perf_counter() - started,
        )

    def _losses(self, part: Batch, measure: bool) -> tuple[Tensor, float]:
        """Divergences [M] of a micro-batch and, if asked, the sum of its sum_x min(p, q)."""
        scores = self.teacher.score(part) if self.teacher is not None else None
        device = part.input_ids.device.type
        with torch.autocast(device, self._autocast, enabled=self._autocast is not None):
            draft_logits = self._module(part.input_ids, part.predicting)
        values = token_losses(
            target_logits=None if scores is None else scores.logits,
            draft_logits=draft_logits,
            token_ids=part.token_ids,
            divergence=self.divergence,
            sampling=self.sampling,
            temperature=self.temperature,
        )
        if not measure or scores is None:
            return values, 0.0
        return values, float(self._overlap(scores.logits, draft_logits.detach()).sum())

    def _overlap(self, target_logits: Tensor, draft_logits: Tensor) -> Tensor:
        """sum_x min(p, q) [M] at the training temperature."""
        params = SamplingParams.uniform(
            1, temperature=self.temperature, device=target_logits.device
        )
        return sampled_acceptance(
            target_probs=warp(target_logits[None], params)[0],
            draft_probs=warp(draft_logits[None], params)[0],
        )
