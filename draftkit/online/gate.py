"""May a refitted drafter be served? Two paired tests, and a sentence.

On held-out recent traffic, which no training saw, the new weights must beat those in force: the
95 % interval of the gain in alpha lies above 0. On the anchors, held-out text of before, they must
not have lost more than a tolerance since the first version: the interval of the change lies above
-tolerance. So what is published is better for the traffic of today and has not forgotten the rest,
however many small steps led there.

Scores are sums of sum_x min(p, q) by prompt (`evaluation.alpha`), on the same prompts and
positions for both, so that both tests are paired. Knows no folder and no training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.evaluation.alpha import PromptTotals, gains, score_contexts, score_stored
from draftkit.models.adapter import CausalAdapter
from draftkit.models.remembered import RememberedAdapter
from draftkit.theory.acceptance import Estimate

RESAMPLES = 1000


@dataclass(frozen=True)
class Verdict:
    """Whether to publish, why, and the alpha gained since the version in force (traffic) and since
    the first (anchors; None without any)."""

    publish: bool
    reason: str
    gain: Estimate
    anchor_change: Estimate | None

    def as_dict(self) -> dict[str, Any]:
        """As a version's metrics hold it."""
        change = None if self.anchor_change is None else self.anchor_change.as_dict()
        return {"gain": self.gain.as_dict(), "anchor_change": change, "reason": self.reason}


class Judge:
    """Scores weights on records in the precision in which they will be served.

    `draft` is a model of the judge's own, into which weights are copied. With `target` alpha is
    exact; without it the records' stored scores serve, and alpha counts what is certain.
    """

    def __init__(
        self,
        draft: CausalAdapter,
        target: CausalAdapter | RememberedAdapter | None,
        *,
        sampling: SamplingConfig,
        batch_size: int,
    ) -> None:
        self.draft = draft
        self._target = target
        self._sampling = sampling
        self._batch_size = batch_size

    def score(self, weights: dict[str, Tensor], records: Sequence[Record]) -> PromptTotals:
        """Sums by prompt of the draft with `weights`."""
        self.draft.load_weights(weights)
        options: dict[str, Any] = {"sampling": self._sampling, "batch_size": self._batch_size}
        if self._target is None:
            return score_stored(self.draft, records, **options)[0]
        return score_contexts(self._target, self.draft, records, **options)


def judge(
    *,
    after: PromptTotals,
    before: PromptTotals,
    anchor_after: PromptTotals | None,
    anchor_first: PromptTotals | None,
    tolerance: float,
    seed: int,
) -> Verdict:
    """Compare new weights (`after`) with those in force (`before`), and with the first on anchors.

    Raises ValueError with fewer than 2 prompts.
    """
    gain = gains(after=after, before=before, seed=seed, resamples=RESAMPLES)["alpha"]
    change = None
    if anchor_after is not None and anchor_first is not None:
        change = gains(after=anchor_after, before=anchor_first, seed=seed, resamples=RESAMPLES)
        change = change["alpha"]
    if change is not None and change.low < -tolerance:
        reason = f"anchors: {shown(change)} since the first version, {-tolerance:g} is allowed"
        return Verdict(False, reason, gain, change)
    if gain.low <= 0:
        return Verdict(False, f"no sure gain on recent traffic: {shown(gain)}", gain, change)
    return Verdict(True, f"alpha {shown(gain)} on held-out recent traffic", gain, change)


def shown(change: Estimate) -> str:
    """A difference with its interval."""
    return f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
