"""May a refitted drafter be served, and may it stay? Paired tests, and a sentence.

On held-out recent traffic, which no training saw, the new weights must beat those in force. Weights
that are refused are trained on and judged again, so the tests against one version share a budget:
all of them together publish weights that gain nothing with a probability of at most
`FALSE_PASSES`. On the anchors, held-out text of before, they must not have lost more than a
tolerance since the first version: the 95 % interval of the change lies above -tolerance. So what is
published is better for the traffic of today and has not forgotten the rest, however many small
steps led there. What serves is taken back where, on the records served since, it is surely worse
than the version before it: both are scored on the same texts, so that a drift of the traffic is
nobody's fault, and the looks at one version share a budget as its gates do.

Scores are sums of sum_x min(p, q) (`evaluation.alpha`) by conversation, since texts of one are not
independent, on the same positions for both, so that both tests are paired. Each text is scored
under the sampling that it was served with. Knows no folder and no training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from draftkit.config.service import LEAST_PROMPTS
from draftkit.data.rollouts import Record
from draftkit.distillation.remote import RemoteTarget
from draftkit.evaluation.alpha import PromptTotals, score_contexts, score_stored
from draftkit.evaluation.intervals import Estimate, gain_p_value
from draftkit.evaluation.laws import is_chained
from draftkit.models.adapter import Adapter
from draftkit.templates import signed

FALSE_PASSES = 0.05  # of weights that gain nothing, over all gates of a version in force


@dataclass(frozen=True)
class Verdict:
    """Whether to publish, why, and the alpha gained since the version in force (traffic) and since
    the first (anchors; None without any).

    The gain of weights that pass is that of the test which chose them, so on average too high.
    """

    publish: bool
    reason: str
    before: Estimate  # alpha on held-out recent traffic, of the version in force
    after: Estimate  # and of the new weights
    gain: Estimate
    anchor_change: Estimate | None
    p_value: float  # of the gain

    def as_dict(self) -> dict[str, Any]:
        """As a version's metrics hold it."""
        change = self.anchor_change and self.anchor_change.as_dict()
        known = {"p_value": self.p_value, "reason": self.reason}
        return {"gain": self.gain.as_dict(), "anchor_change": change, **known}


@dataclass
class Judge:
    """Scores weights on records in the precision in which they will be served.

    `draft` is a model of the judge's own, into which weights are copied. With `target` alpha is
    exact; without it the records' stored scores serve, or those that `engines` give them, and alpha
    counts what is certain. What is
    gated is the mode of acceptance that is served, under the name alpha: `alpha_greedy_draft` where
    the draft's argmax is proposed, which only a target can score. Of a parallel draft, and
    of a head, it is the tokens a pass of the target, since acceptance differs by position.
    """

    draft: Adapter
    target: Adapter | None
    batch_size: int
    acceptance: str = "alpha"
    engines: RemoteTarget | None = None

    @property
    def measure(self) -> str:
        """What its sums are of."""
        return "tokens a pass" if is_chained(self.draft) else "alpha"

    def can_score(self, record: Record) -> bool:
        """Whether what is known of `record` suffices."""
        if self.target is not None:
            return True
        known = record.topk_ids is not None
        if self.engines is not None:
            known = len(record.prompt_ids) + len(record.output_ids) <= self.engines.longest
        return known and record.sampling["repetition_penalty"] == 1

    def completed(self, records: Sequence[Record]) -> Sequence[Record]:
        """`records` with the scores of the engines, where these stand for the target."""
        return self.engines.scored(records) if self.engines and records else records

    def score(self, weights: dict[str, Tensor], records: Sequence[Record]) -> PromptTotals:
        """Sums by record of the draft with `weights`."""
        self.draft.load_weights(weights)
        options: dict[str, Any] = {"sampling": None, "batch_size": self.batch_size}
        if self.target is None:
            known = self.engines is None
            scored = score_stored(self.draft, records, tails_known=known, **options)[0]
        else:
            scored = score_contexts(self.target, self.draft, records, **options)
        if is_chained(self.draft):
            rounds = scored.tokens_a_pass(self.acceptance, self.draft.blocks)
            return PromptTotals({"alpha": rounds.totals}, rounds.counts, documents=rounds.documents)
        return replace(scored, totals={"alpha": scored.totals[self.acceptance]}, shares={})


def level_of(gate: int) -> float:
    """The p-value that the `gate`-th test (from 1) against one version must not exceed.

    The levels of all of them add up to `FALSE_PASSES`, and so bound what they let through together
    (Bonferroni), whatever the drafters have in common. The first one's is 0.025.
    """
    return FALSE_PASSES / (gate * (gate + 1))


def judge(
    *,
    after: PromptTotals,
    before: PromptTotals,
    anchor_after: PromptTotals | None,
    anchor_first: PromptTotals | None,
    tolerance: float,
    gate: int,
    measure: str = "alpha",
) -> Verdict:
    """Compare new weights (`after`) with those in force (`before`), and with the first on anchors.

    gate: index of this test against the current version, from 1. measure: what the sums are of.
    Raises ValueError with fewer than 2 conversations; with fewer than `LEAST_PROMPTS` nothing is
    published. Anchors of few documents have a wide interval, which lets less through.
    """
    gain = after.gain(before)
    p_value = gain_p_value(after.rate(), before.rate())
    change = None
    if anchor_after is not None and anchor_first is not None:
        change = anchor_after.gain(anchor_first, least=2)
    level, text = level_of(gate), f"{measure} {signed(gain.as_dict())} on held-out recent traffic"
    publish = False
    # Each condition is one for passing, so that NaN refuses.
    if change is not None and not change.low >= -tolerance:
        lost = signed(change.as_dict())
        text = f"anchors: {lost} since the first version, {-tolerance:g} is allowed"
    elif not gain.documents >= LEAST_PROMPTS:
        text = f"{text}: of {gain.documents} conversations, {LEAST_PROMPTS} are needed"
    elif not p_value <= level:
        text = f"no sure gain: {text}, p = {p_value:.2g}, gate {gate} needs {level:.2g}"
    else:
        publish, text = True, f"{text}, p = {p_value:.2g}"
    return Verdict(publish, text, before.alpha, after.alpha, gain, change, p_value)


def judge_served(
    *, now: PromptTotals, before: PromptTotals, look: int, measure: str = "alpha"
) -> str | None:
    """Why the version that serves goes, if it is surely worse than the one before it.

    now, before: on the records served since. look: index of this look at it, from 1; all of
    them together take back one that is as good with a probability of at most `FALSE_PASSES`.
    """
    change = now.gain(before)
    if not change.documents >= LEAST_PROMPTS:
        return None
    p_value, level = gain_p_value(before.rate(), now.rate()), level_of(look)
    if not p_value <= level:
        return None
    return (
        f"{measure} {signed(change.as_dict())} on the records served since, p = {p_value:.2g}, "
        f"look {look} needs {level:.2g}"
    )
