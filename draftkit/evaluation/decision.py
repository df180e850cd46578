"""Deploy or not: a verdict from a measured interval, with its reason in one sentence."""

from draftkit.evaluation.lossless import Losslessness
from draftkit.theory.acceptance import Estimate

DEPLOY, DO_NOT_DEPLOY, INCONCLUSIVE = "deploy", "do_not_deploy", "inconclusive"


def verdict(
    *, speedup: Estimate, lossless: Losslessness, ceiling: float, break_even_alpha: float | None
) -> tuple[str, str]:
    """Return the verdict and its reason: the speed-up's interval against 1, exactness first."""
    interval = f"measured speedup {speedup.mean:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]"
    if not lossless.passed:
        wrong = lossless.mismatches - lossless.near_ties
        return (
            DO_NOT_DEPLOY,
            f"{wrong} of {lossless.compared} greedy outputs differ from the target's",
        )
    if speedup.low > 1:
        return DEPLOY, f"{interval} lies above 1"
    if speedup.high < 1:
        if break_even_alpha is None:
            hint = f"even a perfect draft would reach {ceiling:.2f}"
        else:
            hint = f"it would take an alpha of {break_even_alpha:.2f} to break even"
        return DO_NOT_DEPLOY, f"{interval} lies below 1; {hint}"
    return INCONCLUSIVE, f"{interval} contains 1; time more prompts (evaluate.timing_prompts)"
