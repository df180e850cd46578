"""One training step of a draft, for `distill`, `prepare` and the online daemon alike.

AdamW over `accelerate`, warm-up then cosine, gradient clipping. Losses are means over the
tokens that count, normalised over all ranks and micro-batches together: eight rows at once and
one row eight times give the same gradient. Logits exist for a few tokens at a time (`chunked`). The
step knows no source, no folder and no schedule of evaluation.
"""

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn

from draftkit.config import OptimConfig
from draftkit.distillation.batch import Batch
from draftkit.distillation.chunked import chunked_sum
from draftkit.distillation.losses import Objective, Outcomes, Teacher, token_weights
from draftkit.models.adapter import Adapter
from draftkit.models.parallel import Chains, chains, depths, kept_share
from draftkit.theory.noise import DROPOUT, uniform

BETAS = (0.9, 0.98)  # of AdamW: decay of the first and the second moment
RATE_TIMES_WIDTH, HEAD_RATE_TIMES_WIDTH = 0.1, 0.9
# Where `divergence.position_decay` is null: of a parallel draft, and of a head that is unrolled.
CHAIN_DECAY, UNROLLED_DECAY = 0.7, 0.8


@dataclass(frozen=True)
class StepMetrics:
    """What one step did. `alpha` is the mean of sum_x min(p, q) before it, as in the loss.

    Of a draft that learns chains that of the first proposals; `tokens` counts each token once.
    """

    loss: float
    alpha: float | None
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float


def learning_rate_for(width: int, *, head: bool = False) -> float:
    """A peak rate for a draft of hidden size `width`, or for a head on hidden states of that width.

    AdamW wants it inversely proportional to the width (Yang et al. 2203.03466, table 3). The
    constants were measured at width 64, and for heads, of which most is new, at 576.
    """
    return (HEAD_RATE_TIMES_WIDTH if head else RATE_TIMES_WIDTH) / width


def schedule(step: int, optim: OptimConfig) -> float:
    """Share of the peak rate at `step` (from 0): linear warm-up, then it falls to 0.1 (cosine) or
    to 0 (linear), or stays (constant)."""
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.lr_scheduler_type == "constant":
        return 1.0
    done = (step - optim.warmup_steps) / max(1, optim.max_steps - optim.warmup_steps)
    done = min(1.0, done)
    if optim.lr_scheduler_type == "linear":
        return 1.0 - done
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def dropout_seed(*, seed: int, process: int, step: int) -> int:
    """What the generators of dropout begin a step with: another number for each step and process.

    Below 2^52.
    """
    number = uniform(
        seed=torch.tensor([seed]),
        row=torch.tensor([process]),
        length=torch.tensor([step]),
        count=1,
        purpose=DROPOUT,
    )
    return int(float(number) * 2**52)


class Trainer:
    """A draft, its optimizer, and the teacher that it learns from (None for `next_token`).

    objective: what is minimised, here over the ids that the draft can propose.
    seed: of the noise of dropout, which is a function of it, the step and the process: a run that
    is resumed repeats it, and no two processes share a mask.
    """

    def __init__(
        self,
        draft: Adapter,
        teacher: Teacher | None,
        objective: Objective,
        *,
        optim: OptimConfig,
        autocast: torch.dtype | None = None,
        seed: int = 0,
        plain_share: float = 0.0,
    ) -> None:
        self.draft = draft
        self.parallel = draft.parallel
        self.teacher = teacher
        self.optim = optim
        kept, size = draft.kept_ids, draft.vocab_size
        outcomes = None if kept is None else Outcomes.of(kept, size)
        self.objective = replace(objective, outcomes=outcomes)
        self.steps = self.tokens = 0
        self._begun = 0  # step at which the schedule of the rate began
        width, head = draft.width, bool(draft.reads)
        self.peak_rate = optim.learning_rate or learning_rate_for(width, head=head)
        decay = objective.divergence.position_decay
        usual = UNROLLED_DECAY if self.parallel is None else CHAIN_DECAY
        self._decay = usual if decay is None else decay  # of a proposal over the one before it
        self._autocast = autocast
        self._seed = seed
        self._plain_share = plain_share
        # Named, since accelerate takes what is not from the environment of its launcher.
        self.accelerator = Accelerator(
            cpu=draft.device.type == "cpu",
            mixed_precision="no",
            dynamo_backend="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        self.optimizer = torch.optim.AdamW(
            [weight for _, weight in self.trained()],
            lr=self.peak_rate,
            betas=BETAS,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self._module: nn.Module
        self._module, self._step_optimizer = self.accelerator.prepare(draft, self.optimizer)

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The weights of the draft that learn, by name: those that ask for a gradient."""
        named = self.draft.named_parameters()
        return [(name, weight) for name, weight in named if weight.requires_grad]

    def begin(self) -> None:
        """Let the schedule of the rate begin here, as in a run of its own; moments stay."""
        self._begun = self.steps

    def step(self, batch: Batch, *, measure: bool = False) -> StepMetrics:
        """Take one optimizer step on `batch`; with `measure`, also report its alpha.

        Raises ValueError when no token counts, or the loss or the norm of its gradient is not
        finite, on all ranks alike: weights and moments stay those of the last step.
        """
        started = time.perf_counter()
        rate = self.peak_rate * schedule(self.steps - self._begun, self.optim)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        count = min(self.optim.gradient_accumulation_steps, len(batch.input_ids))
        parts = batch.micro_batches(count)
        entries = [self._entries(part) for part in parts]
        weights = list(map(self._weights, parts, entries))
        tokens = int(self._over_ranks(sum(len(part.token_ids) for part in parts)))
        whole = self._over_ranks(sum(float(values.sum()) for values in weights))
        if whole == 0:
            raise ValueError(f"no token counts at step {self.steps}: use divergence.tokens=all")
        loss, overlap = 0.0, 0.0
        # Dropout is at work, with noise of its own; whoever samples or scores later sees none.
        device, process = self.draft.device, self.accelerator.process_index
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(dropout_seed(seed=self._seed, process=process, step=self.steps))
            self._module.train()
            try:
                for index, task in enumerate(zip(parts, entries, weights, strict=True), 1):
                    # Ranks exchange gradients once a step, with the last micro-batch.
                    last = index == len(parts)
                    with nullcontext() if last else self.accelerator.no_sync(self._module):
                        value, some = self._loss(*task, measure)
                        # Wrappers average over ranks; the loss is a mean over all tokens.
                        self.accelerator.backward(value / whole * self.accelerator.num_processes)
                    loss, overlap = loss + float(value.detach()), overlap + some
            finally:
                self._module.eval()
        loss = self._over_ranks(loss) / whole
        limit = self.optim.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(self._module.parameters(), limit)
        assert norm is not None
        for name, value in (("loss", loss), ("norm of the gradient", float(norm))):
            if not math.isfinite(value):
                self._step_optimizer.zero_grad()
                raise ValueError(
                    f"the {name} became {value} at step {self.steps}: lower optim.learning_rate"
                )
        self._step_optimizer.step()
        self._step_optimizer.zero_grad()
        self.draft.renew()
        self.steps += 1
        self.tokens += tokens
        measured = measure and self.teacher is not None
        return StepMetrics(
            loss=loss,
            alpha=self._over_ranks(overlap) / tokens if measured else None,
            grad_norm=float(norm),
            learning_rate=rate,
            tokens=tokens,
            seconds=time.perf_counter() - started,
        )

    def _over_ranks(self, value: float) -> float:
        """The sum of `value` over all ranks."""
        if self.accelerator.num_processes == 1:
            return value
        own = torch.tensor(value, dtype=torch.float64, device=self.draft.device)
        return float(self.accelerator.reduce(own, "sum"))

    def _entries(self, part: Batch) -> Chains:
        """What the draft reads of a micro-batch, and which tokens it predicts.

        A parallel draft begins with its first proposal alone (`draft.pard.plain_share`). Then its
        chains begin at every predicting token, and a share of them that falls by `_decay` goes on;
        of drafted blocks the whole chain that drew them.
        """
        is_plain = self.steps < round(self._plain_share * self.optim.max_steps)
        if self.parallel is None or (is_plain and part.block_offset is None):
            if not self.draft.reads:
                return part.entries
            return part.unrolled(self.draft.blocks if self.parallel is None else 1)
        process = self.accelerator.process_index
        seed = dropout_seed(seed=self._seed, process=process, step=self.steps)
        predicting, (token, blocks) = part.predicting, self.parallel
        if part.block_offset is None:
            generator = torch.Generator().manual_seed(seed)
            depth = depths(predicting, blocks, self._decay, generator)
        else:
            begins = part.generated(part.block_offset) == 0
            depth = torch.zeros_like(part.input_ids).masked_scatter(predicting, begins * blocks)
        if self.draft.reads:
            depth[:, 0] = 0  # a head has no features before the first token of a text
        return chains(part.input_ids, predicting, depth, token=token)

    def _weights(self, part: Batch, entries: Chains) -> Tensor:
        """How much each entry [N] of a micro-batch counts."""
        divergence = self.objective.divergence
        if self.parallel is None and not self.draft.reads:
            return token_weights(part, divergence)
        weights = token_weights(part, replace(divergence, position_decay=None))
        # What was dropped is made up for by what is left.
        dropped = part.block_offset is None and self.parallel is not None
        most = int(entries.blocks.max()) + 1 if len(entries.blocks) else 0
        of_blocks = [
            self._decay**block / (kept_share(block, self._decay) if dropped else 1)
            for block in range(most)
        ]
        return weights[entries.predicted] * weights.new_tensor(of_blocks)[entries.blocks]

    def _loss(
        self, part: Batch, entries: Chains, weights: Tensor, measure: bool
    ) -> tuple[Tensor, float]:
        """The weighted sum of a micro-batch's losses and, if asked, of its sum_x min(p, q).

        The target reads each text once, whatever the entries are.
        """
        # Of one micro-batch at a time, since that may be logits.
        scores = features = None
        if self.teacher is not None:
            scores, features = self.teacher.score(part, self.draft.reads)
        if scores is not None and (self.parallel is not None or self.draft.reads):
            scores = scores.at(entries.predicted)
        if scores is not None and self.objective.outcomes is not None:
            scores = scores.among(self.objective.outcomes)
        token_ids, overlaps = part.token_ids[entries.predicted], []

        def weighted(logits: Tensor, rows: slice) -> Tensor:
            if measure and scores is not None:
                with torch.no_grad():
                    overlap = self.objective.overlap(scores=scores, draft_logits=logits, rows=rows)
                overlaps.append((overlap * (entries.blocks[rows] == 0)).sum())
            losses = self.objective.losses(
                logits, rows, scores=scores, token_ids=token_ids, step=self.steps
            )
            return (weights[rows] * losses).sum()

        enabled, device = self._autocast is not None, self.draft.device.type
        with torch.autocast(device, self._autocast, enabled=enabled):
            states = self._module(entries, features)
        head, dtype = self.draft.head, self._autocast
        value = chunked_sum(weighted, states=states, head=head, dtype=dtype)
        return value, float(sum(overlaps))
