"""Deploy or not: a verdict from a measured interval, with its reason in one sentence."""

from draftkit.evaluation.lossless import Losslessness
from draftkit.theory.acceptance import Estimate

DEPLOY, DO_NOT_DEPLOY, INCONCLUSIVE = "deploy", "do_not_deploy", "inconclusive"


def verdict(
    *,
    speedup: Estimate,
    rounds: Estimate,
    lossless: Losslessness,
    ceiling: float,
    break_even_alpha: float | None,
) -> tuple[str, str]:
    """Return the verdict and its reason: the speed-up's interval against 1, exactness first.

    speedup: end to end, prefill and waiting included. rounds: without the prefill, of which alone
    `ceiling` and `break_even_alpha` speak.
    """
    interval = f"end-to-end speedup {speedup.mean:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]"
    if not lossless.passed:
        wrong = lossless.mismatches - lossless.near_ties
        return (
            DO_NOT_DEPLOY,
            f"{wrong} of {lossless.compared} greedy outputs differ from the target's",
        )
    if speedup.low > 1:
        return DEPLOY, f"{interval} lies above 1"
    if speedup.high < 1:
        if rounds.mean > 1:
            hint = f"rounds alone reach {rounds.mean:.2f}, but the draft's prefill costs more"
        elif break_even_alpha is None:
            hint = f"even a perfect draft would reach {ceiling:.2f}"
        else:
            hint = f"it would take an alpha of {break_even_alpha:.2f} for rounds to break even"
        return DO_NOT_DEPLOY, f"{interval} lies below 1; {hint}"
    return INCONCLUSIVE, f"{interval} contains 1; time more prompts (evaluate.timing_prompts)"
