"""How one setting is measured: our decoder beside its peers, in one process.

A *point* is one method in one setting (sampling and batch size). Rates run from the request to the
last token on the host, prefill included, for every method; methods are compared chunk by chunk,
and the median over chunks stands with its exact (binomial) 95 % interval. The prediction is the
theory's, tau / (gamma c + v + o), from costs calibrated on other prompts; it speaks of rounds of
full batches, so what it is held against leaves out the prefill and the rounds behind the first end
of a row. Greedy answers are compared with Hugging Face's, token by token.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from draftkit.decoding.catalogue import PROPOSERS
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.proposers import Proposer
from draftkit.evaluation.costs import between, meter
from draftkit.evaluation.judge import Prompts
from draftkit.evaluation.lossless import differ_by_rounding, differing
from draftkit.evaluation.summary import count_rounds
from draftkit.evaluation.walltime import (
    PLAIN,
    Method,
    Setting,
    Timed,
    decoding,
    take_turns,
    warm_up,
)
from draftkit.models.adapter import CausalAdapter
from draftkit.theory.acceptance import speedup
from draftkit.theory.speedup import Costs, speedup_from_length

from .decoder_peers import hugging_face

SPECULATIVE, ADAPTIVE = "speculative", "adaptive"
HF_PLAIN, HF_ASSISTED, HF_LOOKUP = "hf_plain", "hf_assisted", "hf_lookup"
BASELINES = (PLAIN, HF_PLAIN, HF_ASSISTED)
DRAFTED = (SPECULATIVE, ADAPTIVE)
POLICY_TURNS = 3  # of calibration, before the timed chunks, for the adaptive gamma
CROWD = 8  # rows from which on it is in doubt whether speculation pays

Point = dict[str, Any]


def applicable(names: Sequence[str], batch_size: int) -> list[str]:
    """Those of `names` that make sense at this batch size.

    Hugging Face refuses to speculate for more than one row; an adaptive gamma is for crowds.
    """
    alone, crowded = batch_size == 1, batch_size >= CROWD
    fits = {HF_ASSISTED: alone, HF_LOOKUP: alone, ADAPTIVE: crowded}
    return [name for name in names if fits.get(name, True)]


def measure(
    target: CausalAdapter,
    draft: CausalAdapter,
    prompts: Prompts,
    setting: Setting,
    names: Sequence[str],
    *,
    proposer: str = "sampled",
) -> list[Point]:
    """Time the methods `names` on `prompts.test`, in turns; one point for each.

    proposer: a name of `PROPOSERS`, of what our decoder speculates by.
    """
    counted = prompts.texts or (lambda: prompts.calibration)

    def made() -> Proposer:
        return PROPOSERS[proposer](lambda: draft, counted, target)

    def adaptive() -> Method:
        costs.turn(POLICY_TURNS)
        policy = AdaptiveGamma({setting.batch_size: costs.costs()})
        return decoding(target, made(), setting, policy)

    costs = meter(target, made, prompts.calibration, setting)
    makers: dict[str, Callable[[], Method]] = {
        PLAIN: lambda: decoding(target, None, setting),
        SPECULATIVE: lambda: decoding(target, made(), setting),
        ADAPTIVE: adaptive,
        HF_PLAIN: lambda: hugging_face(target, setting),
        HF_ASSISTED: lambda: hugging_face(target, setting, assistant=draft),
        HF_LOOKUP: lambda: hugging_face(target, setting, lookup=True),
    }
    methods = {name: makers[name]() for name in names}
    warm_up(methods, prompts.calibration, setting, drafted=DRAFTED)
    timed = take_turns(methods, prompts.test, setting, between([costs]))
    timed = {name: replace(one, documents=prompts.documents) for name, one in timed.items()}
    points = {name: base_point(name, timed, setting) for name in names}
    points[SPECULATIVE] |= prediction(timed, costs.costs(), setting)
    if setting.sampling.temperature == 0:
        for name in points.keys() & {PLAIN, *DRAFTED}:
            sides = (timed[name], timed[HF_PLAIN])
            points[name]["beside_hf"] = greedy_agreement(target, *sides, setting)
    return list(points.values())


def base_point(name: str, timed: Mapping[str, Timed], setting: Setting) -> Point:
    """What every method has: its setting, counts, rate and ratios to the baselines."""
    mine = timed[name]
    ours = not name.startswith("hf_")
    return {
        "method": name,
        "temperature": setting.sampling.temperature,
        "batch_size": setting.batch_size,
        "compiled": ours and setting.compiled,
        "captured": ours and setting.captured,
        "prompts": len(mine.completions),
        "chunks": len(mine.chunks),
        "tokens_per_second": spread(by_chunk(mine)),
        "without_prefill": mine.rounds.mean if ours else None,  # theirs is not known
        "ratios": {
            other: paired_ratio(mine, timed[other])
            for other in BASELINES
            if other in timed and other != name
        },
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles, as tables show them."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": statistics.median(values), "quartiles": [low, high]}


def by_chunk(timed: Timed) -> list[float]:
    """Tokens per second from request to last token."""
    return (timed.answers.totals / timed.answers.counts).tolist()


def paired_ratio(mine: Timed, other: Timed) -> dict[str, Any]:
    """Median over chunks of the ratio of both rates on the same chunk, with its 95 % interval."""
    ratios = [a / b for a, b in zip(by_chunk(mine), by_chunk(other), strict=True)]
    return {"median": statistics.median(ratios), "ci95": median_interval(ratios)}


def median_interval(values: Sequence[float]) -> list[float]:
    """The exact 95 % interval of a median: from the k-th smallest to the k-th largest value.

    k is the largest with P(Binomial(n, 1/2) < k) <= 2.5 %, whatever the law of the values. Fewer
    than 6 of them admit no such interval: then it is their range, which covers less.
    """
    ordered, n = sorted(values), len(values)
    cut, below = 0, 1 + n  # values left out on each side; sets of fewer than cut + 2 of n values
    while below <= 0.025 * 2**n:
        cut += 1
        below += math.comb(n, cut + 1)
    return [ordered[cut], ordered[n - 1 - cut]]


def prediction(timed: Mapping[str, Timed], costs: Costs, setting: Setting) -> Point:
    """Acceptance length, calibrated costs, and the speed-up that they predict beside the measured.

    The latter two for the rounds of full batches, and `full_length` is the acceptance length there.
    """
    drafted = timed[SPECULATIVE]
    gained = speedup(drafted.full_batches, timed[PLAIN].full_batches)
    predicted = speedup_from_length(drafted.full_length, setting.gamma, **costs.ratios)
    return {
        "gamma": setting.gamma,
        "acceptance_length": count_rounds(drafted)["acceptance_length"],
        "full_length": drafted.full_length,
        **costs.ratios,
        "speedup": {"measured": gained.mean, "ci95": gained.ci95, "predicted": predicted},
        "prediction_error": gained.mean / predicted - 1,
    }


def greedy_agreement(
    target: CausalAdapter, ours: Timed, theirs: Timed, setting: Setting
) -> dict[str, int]:
    """How many answers are the same, and how the others part: by a near-tie, or not.

    Near-ties are told by `lossless`, which reads their text in passes of the shapes of both.
    """
    rows = setting.batch_size
    shapes = ((1, rows), (1, 1), (setting.gamma + 1, rows))
    parted = differing(theirs.completions, ours.completions)
    ties = sum(differ_by_rounding(target, parted, shapes))
    return {
        "compared": len(ours.completions),
        "identical": len(ours.completions) - len(parted),
        "near_ties": ties,
        "different": len(parted) - ties,
    }


def headline(points: Sequence[Point]) -> dict[str, Any]:
    """The numbers of greedy decoding of a single row, which every benchmark measures."""
    alone = {
        point["method"]: point
        for point in points
        if point["batch_size"] == 1 and point["temperature"] == 0
    }
    plain, drafted = alone[PLAIN], alone[SPECULATIVE]
    return {
        "ratio_to_plain": drafted["ratios"][PLAIN]["median"],
        "ratio_to_hf_assisted": drafted["ratios"][HF_ASSISTED]["median"],
        "ratio_to_hf_plain": drafted["ratios"][HF_PLAIN]["median"],
        "plain_ratio_to_hf_plain": plain["ratios"][HF_PLAIN]["median"],
        "acceptance_length": drafted["acceptance_length"],
        "prediction_error": drafted["prediction_error"],
    }
