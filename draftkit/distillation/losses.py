"""The loss of a draft: divergences between the distributions that will be *served*, and on what.

Both logits are divided by the training temperature; the served top-k and top-p cut the target's
support, so that the draft is not taught what is never sampled. The draft keeps full support, so
every divergence stays finite except the reverse KL, whose p would be zero where q is not: it is
taken at the served temperature without the cut. Penalties depend on a history that the loss does
not keep, and are left out.

The target is a teacher: never trained, never in a checkpoint. Its scores answer one question: given
the draft's logits of some tokens, what are both distributions over one set of outcomes? So a loss
need not know whether the target's logits were made of its states just now, or come from a store of
its most likely tokens.

A sum of divergences is one too, and the forward KL may come first, since the gradient of the total
variation vanishes where the draft is far (LK losses 2602.23881). The tokens that verification
refused may be chosen (OSD 2310.07177); a loss is a mean over the chosen, so that its scale does not
depend on how many they are. Proposals late in a block may weigh less, since they are reached less
often.

Samples are constants here: what is minimised is the expectation over fixed sequences of the sum
of per-token divergences, not the gradient of a sequence-level divergence (DistillSpec
2310.08461, GKD 2306.13649).

Shapes: M generated tokens of a batch, m of them, V vocabulary, W outcomes, k stored ids.
"""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn import functional

from draftkit.config import DivergenceConfig, SamplingConfig
from draftkit.distillation.batch import Batch
from draftkit.distillation.remote import RemoteTarget
from draftkit.models.adapter import Adapter, Head
from draftkit.theory.divergences import DIVERGENCES, Divergence
from draftkit.theory.truncation import coarse_draft, coarse_target
from draftkit.theory.warping import SamplingParams, tempered, warped_logits

NEEDS_FULL_SUPPORT = {"reverse_kl"}
FIRST = "forward_kl"  # what a warm-up takes
OWN = "own"  # a loss that is a function of the caller's


@dataclass(frozen=True)
class Outcomes:
    """The ids that a draft can propose, where these are not all, and one outcome for all others.

    A loss is taken over these K + 1 outcomes alone, which over a large vocabulary is most of its
    work. The target is that of the K ids: what it gives to others is lost whatever the draft does.
    """

    kept_ids: Tensor  # [K], ascending
    column: Tensor  # [V] of each id among the outcomes: K for one that is never proposed

    @classmethod
    def of(cls, kept_ids: Tensor, vocab_size: int) -> "Outcomes":
        column = torch.full((vocab_size,), len(kept_ids), device=kept_ids.device)
        return cls(kept_ids, column.index_copy(0, kept_ids, torch.arange(len(kept_ids)).to(column)))

    def logits(self, logits: Tensor) -> Tensor:
        """`logits` [m, V] of all ids, or [m, K] of these, as [m, K + 1]: -inf for all others."""
        if logits.shape[-1] != len(self.kept_ids):
            logits = logits[:, self.kept_ids]
        return functional.pad(logits, (0, 1), value=-torch.inf)


@dataclass(frozen=True)
class Warp:
    """The distributions that a loss compares: temperature in both, cuts in the target alone, so
    that the draft's support stays whole."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    def target(self, logits: Tensor) -> Tensor:
        """Logits [m, V] of the target, -inf outside its support."""
        if self.top_k == 0 and self.top_p == 1:
            return tempered(logits, self.temperature)
        params = SamplingParams.uniform(
            1,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            device=logits.device,
        )
        return warped_logits(logits[None], params)[0]


@dataclass(frozen=True)
class FullScores:
    """States [M, H] and the head that makes logits of them; without a head, the logits [M, V].

    outcomes: those that are looked at; None: all ids.
    """

    states: Tensor
    head: Head | None
    outcomes: Outcomes | None = None

    def at(self, tokens: Tensor) -> "FullScores":
        """Those of `tokens` [N], numbers of the M."""
        return replace(self, states=self.states[tokens])

    def among(self, outcomes: Outcomes) -> "FullScores":
        """Over `outcomes` alone, of which the head makes the logits and of no others."""
        head, ids = self.head, outcomes.kept_ids
        if head is not None:
            bias = None if head.bias is None else head.bias[ids]
            head = Head(head.weight[ids], bias)
        return replace(self, head=head, outcomes=outcomes)

    def beside(self, draft_logits: Tensor, rows: slice, warp: Warp) -> tuple[Tensor, Tensor]:
        """Warped logits [m, W] of target and draft over the same outcomes, here all ids.

        draft_logits: raw, [m, V], of the tokens `rows`.
        """
        with torch.no_grad():
            target_logits = warp.target(self._logits(rows))
        return target_logits, tempered(draft_logits, warp.temperature)

    def best(self, rows: slice, warp: Warp) -> Tensor:
        """The target's most likely id [m] at each of the tokens `rows`."""
        with torch.no_grad():
            return warp.target(self._logits(rows)).argmax(-1)

    def _logits(self, rows: slice) -> Tensor:
        states = self.states[rows]
        logits = states if self.head is None else self.head(states)
        return logits if self.outcomes is None else self.outcomes.logits(logits)


@dataclass(frozen=True)
class TopKScores:
    """The k most likely ids, descending, and the mass of all others: W = k + 1 outcomes.

    tail_mass: [M], at the temperature of the loss. never: which of them the draft cannot propose.
    """

    ids: Tensor  # [M, k]
    log_probs: Tensor  # [M, k] at temperature 1
    tail_mass: Tensor
    never: Tensor | None = None  # [M, k] bool

    def at(self, tokens: Tensor) -> "TopKScores":
        """Those of `tokens` [N], numbers of the M."""
        return TopKScores(self.ids[tokens], self.log_probs[tokens], self.tail_mass[tokens])

    def among(self, outcomes: Outcomes) -> "TopKScores":
        """Over `outcomes`, the stored ids by their columns."""
        columns = outcomes.column[self.ids]
        return replace(self, ids=columns, never=columns == len(outcomes.kept_ids))

    def beside(self, draft_logits: Tensor, rows: slice, warp: Warp) -> tuple[Tensor, Tensor]:
        """Both over the stored ids and all others together.

        Ids that the draft never proposes are taken out of the stored ones: what the target gives
        to them is spread over the rest, as with full scores.
        """
        ids = self.ids[rows]
        target_logits = coarse_target(
            self.log_probs[rows],
            self.tail_mass[rows],
            temperature=warp.temperature,
            top_k=warp.top_k,
            top_p=warp.top_p,
        )
        if self.never is not None:
            out = functional.pad(self.never[rows], (0, 1), value=False)
            target_logits = target_logits.masked_fill(out, -torch.inf)
            # Where nothing is left, all that can be said is: another token.
            empty = (target_logits == -torch.inf).all(-1)
            target_logits[:, -1] = target_logits[:, -1].masked_fill(empty, 0.0)
        return target_logits, coarse_draft(tempered(draft_logits, warp.temperature), ids)

    def best(self, rows: slice, warp: Warp) -> Tensor:
        """The first stored id that the draft can propose."""
        ids = self.ids[rows]
        if self.never is None:
            return ids[:, 0]
        return ids.gather(-1, (~self.never[rows]).int().argmax(-1, keepdim=True))[:, 0]


TargetScores = FullScores | TopKScores  # what the target makes of the M generated tokens


@dataclass(frozen=True)
class TargetTeacher:
    """Scores batches with a frozen target."""

    target: Adapter

    @torch.no_grad()
    def score(
        self, batch: Batch, layers: tuple[int, ...] = ()
    ) -> tuple[TargetScores, Tensor | None]:
        """Run the target once over `batch`: its scores, and its streams of `layers` [B, T, F]."""
        states, features = self.target.read(batch.input_ids, batch.predicting, layers)
        return FullScores(states, self.target.head), features


class StoredTeacher:
    """Scores that lie with the texts: no target in memory."""

    def score(
        self, batch: Batch, layers: tuple[int, ...] = ()
    ) -> tuple[TargetScores, Tensor | None]:
        """Read them. Raises ValueError for a batch without."""
        stored = (batch.topk_ids, batch.topk_log_probs, batch.tail_mass)
        parts = [batch.generated(values) for values in stored if values is not None]
        if len(parts) < len(stored):
            raise ValueError(
                "generate.top_k: these texts have no stored scores: use source=target or fixed, or "
                "generate.top_k=0"
            )
        return TopKScores(*parts), batch.features if layers else None


@dataclass(frozen=True)
class RemoteTeacher:
    """Asks the engines that serve the target for its scores. temperature: of the loss."""

    target: RemoteTarget
    temperature: float

    def score(
        self, batch: Batch, layers: tuple[int, ...] = ()
    ) -> tuple[TargetScores, Tensor | None]:
        """Those of the generated tokens of `batch`. A head has no teacher that shows no layers."""
        assert not layers
        ids, log_probs = self.target.scores(batch.texts)
        tail = self.target.tail(log_probs, self.temperature)
        device = batch.input_ids.device
        known = (ids.to(device), log_probs.float().to(device), tail.float().to(device))
        return TopKScores(*known), None


Teacher = TargetTeacher | StoredTeacher | RemoteTeacher


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

    @cached_property
    def terms(self) -> dict[str, float]:
        """The weights of the divergences, behind the warm-up."""
        return self.divergence.terms if self.own is None else {OWN: 1.0}

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
        is_warm = step >= (self.divergence.warmup_steps or 0)
        for name, weight in (self.terms if is_warm else {FIRST: 1.0}).items():
            warp, ids = self.warp(name), token_ids[rows]
            if name == "ce_argmax":  # whose outcomes are tokens, whatever the scores tell apart
                assert scores is not None, name
                name, ids = "next_token", scores.best(rows, warp)
            if name == "next_token":
                target, draft = None, tempered(draft_logits, self.temperature)
            else:
                assert scores is not None, name
                target, draft = scores.beside(draft_logits, rows, warp)
            if name == OWN and self.own is not None:
                function = self.own
            else:
                function = compiled(name) if self.compiled else DIVERGENCES[name]
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
