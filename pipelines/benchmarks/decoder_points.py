"""The decoder beside its peers: the same pair, prompts, lengths and precision, in one process.

A *point* is one method in one setting (sampling and batch size). Rates run from the request to the
last token on the host, prefill included, for every method; methods are compared chunk by chunk,
and the median over chunks stands with its exact (binomial) 95 % interval. The prediction is the
theory's, tau / (gamma c + v + o), from costs calibrated on other prompts; it speaks of rounds of
full batches, so what it is held against leaves out the prefill and the rounds behind the first end
of a row. Greedy answers are compared with Hugging Face's, token by token.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftkit.decoding.catalogue import PROPOSERS, Material
from draftkit.decoding.gamma import AdaptiveGamma, GammaPolicy
from draftkit.decoding.generation import Completion
from draftkit.decoding.proposers import Proposer
from draftkit.evaluation.costs import CALIBRATION_TURNS, Meter, between, meter
from draftkit.evaluation.judge import Prompts
from draftkit.evaluation.lossless import parting_margin
from draftkit.evaluation.summary import count_rounds
from draftkit.evaluation.walltime import (
    PLAIN,
    Method,
    PromptIds,
    Setting,
    Timed,
    decoding,
    row_capacity,
    take_turns,
    warm_up,
)
from draftkit.models.adapter import CausalAdapter
from draftkit.theory.acceptance import speedup
from draftkit.theory.speedup import Costs, speedup_from_length

from .decoder_peers import hugging_face

SPECULATIVE, ADAPTIVE, HF_PLAIN, HF_ASSISTED = "speculative", "adaptive", "hf_plain", "hf_assisted"
HF_LOOKUP, HF_STATIC = "hf_lookup", "hf_static"
BASELINES = (PLAIN, HF_PLAIN, HF_ASSISTED, HF_STATIC)
UNDRAFTED = (PLAIN, "eager_plain", HF_PLAIN, HF_STATIC)
DRAFTED = (SPECULATIVE, ADAPTIVE, "eager_speculative", *PROPOSERS)
POLICY_TURNS = 3  # of calibration, before the timed chunks, for the adaptive gamma
CROWD = 8  # rows from which on it is in doubt whether speculation pays
# How far below the best logit the worse of two tokens may lie where answers part: rounding of
# passes over other shapes. In bfloat16 logits between 8 and 16 are 1/16 apart: two steps.
TIE_MARGINS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 0.125}

Point = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """The models that all methods run."""

    target: CausalAdapter
    draft: CausalAdapter
    eos_token_ids: Sequence[int] = ()
    pad_token_id: int = 0


class Counted(AdaptiveGamma):
    """An adaptive gamma, and how often it chose what."""

    def __init__(self, costs: dict[int, Costs]) -> None:
        super().__init__(costs)
        self.chosen: Counter[int] = Counter()

    def choose(self, *, batch: int, most: int) -> int:
        gamma = super().choose(batch=batch, most=most)
        self.chosen[gamma] += 1
        return gamma


@dataclass(frozen=True)
class Bench:
    """What a method is made of."""

    pair: Pair
    setting: Setting
    texts: Callable[[], Iterable[Sequence[int]]]  # token ids that tables of n-grams count
    chosen: str = "sampled"  # the proposer of `speculative`, `adaptive` and `eager_speculative`
    policy: GammaPolicy | None = None

    def proposer(self, name: str | None = None) -> Proposer:
        """The proposer of that name, or the one that is benchmarked."""
        target, draft = self.pair.target, self.pair.draft
        material = Material(lambda: draft, self.texts, target.vocab_size, target.device)
        return PROPOSERS[name or self.chosen](material)

    def ours(
        self, proposer: Proposer | None, policy: GammaPolicy | None = None, *, eager: bool = False
    ) -> Method:
        """Our decoder, plain without `proposer`; at the gammas of `policy` if given."""
        setting = self.setting
        if eager:
            setting = replace(setting, compiled=False, captured=False)
        return decoding(self.pair.target, proposer, setting, policy)

    def peer(self, **options: Any) -> Method:
        pad = self.pair.pad_token_id
        return hugging_face(self.pair.target, self.setting, pad_token_id=pad, **options)


METHODS: dict[str, Callable[[Bench], Method]] = {
    PLAIN: lambda bench: bench.ours(None),
    SPECULATIVE: lambda bench: bench.ours(bench.proposer()),
    ADAPTIVE: lambda bench: bench.ours(bench.proposer(), bench.policy),
    "eager_plain": lambda bench: bench.ours(None, eager=True),
    "eager_speculative": lambda bench: bench.ours(bench.proposer(), eager=True),
    **{
        name: lambda bench, name=name: bench.ours(bench.proposer(name))
        for name in PROPOSERS
        if name != "none"
    },
    HF_PLAIN: lambda bench: bench.peer(),
    HF_ASSISTED: lambda bench: bench.peer(assistant=bench.pair.draft),
    HF_LOOKUP: lambda bench: bench.peer(lookup=True),
    HF_STATIC: lambda bench: bench.peer(static=True),
}


def applicable(names: Sequence[str], setting: Setting) -> list[str]:
    """Those of `names` that make sense at this batch size.

    Hugging Face refuses to speculate for more than one row; an adaptive gamma is for crowds.
    """
    alone, crowded = setting.batch_size == 1, setting.batch_size >= CROWD
    fits = {HF_ASSISTED: alone, HF_LOOKUP: alone, ADAPTIVE: crowded}
    return [name for name in names if fits.get(name, True)]


def measure(
    pair: Pair,
    prompts: Prompts,
    setting: Setting,
    names: Sequence[str],
    *,
    costs: dict[int, Costs] | None = None,
    turns: int = CALIBRATION_TURNS,
    proposer: str = "sampled",
) -> list[Point]:
    """Time the methods `names` on `prompts.test`, in turns; one point for each.

    costs: by batch size, to which those calibrated here are added; the adaptive gamma uses them.
    turns: bursts of rounds of a kind by which they are calibrated. proposer: a name of `PROPOSERS`,
    of all methods that are not named after one themselves.
    """
    names = applicable(names, setting)
    costs = {} if costs is None else costs
    meters, policy = [], None
    bench = Bench(pair, setting, prompts.texts or (lambda: prompts.calibration), proposer)
    if setting.gamma > 0 and {SPECULATIVE, ADAPTIVE} & set(names):
        meters.append(meter(pair.target, bench.proposer, prompts.calibration, setting))
        if ADAPTIVE in names:
            meters[0].turn(POLICY_TURNS)
            costs[setting.batch_size] = meters[0].costs()
            policy = Counted(costs)
            bench = replace(bench, policy=policy)
    methods = {name: METHODS[name](bench) for name in names}
    drafted = [name for name in names if name in DRAFTED]
    warm_up(methods, prompts.calibration, setting, drafted=drafted)
    if policy is not None:
        policy.chosen.clear()
    timed = take_turns(methods, prompts.test, setting, between(meters, turns))
    timed = {name: replace(one, documents=prompts.documents) for name, one in timed.items()}
    points = {name: base_point(name, timed, setting) for name in names}
    for measured in meters:
        costs[setting.batch_size] = measured.costs()
        if {PLAIN, SPECULATIVE} <= set(names):
            points[SPECULATIVE] |= prediction(timed, measured, setting)
    if policy is not None:
        points[ADAPTIVE]["gammas"] = {str(g): n for g, n in sorted(policy.chosen.items())}
    if HF_PLAIN in names and setting.sampling.temperature == 0:
        for name in [name for name in (PLAIN, *DRAFTED) if name in names]:
            points[name]["beside_hf"] = greedy_agreement(
                pair.target, timed[name].completions, timed[HF_PLAIN].completions
            )
    return list(points.values())


def base_point(name: str, timed: dict[str, Timed], setting: Setting) -> Point:
    """What every method has: its setting, counts, rate and ratios to the baselines."""
    mine = timed[name]
    ours = not name.startswith("hf_")
    return {
        "method": name,
        "temperature": setting.sampling.temperature,
        "batch_size": setting.batch_size,
        "gamma": 0 if name in UNDRAFTED else setting.gamma,
        "compiled": ours and setting.compiled and not name.startswith("eager_"),
        "captured": ours and setting.captured and not name.startswith("eager_"),
        "prompts": len(mine.completions),
        "chunks": len(mine.chunks),
        "tokens": sum(chunk.tokens for chunk in mine.chunks),
        "seconds": float(mine.answers.counts.sum()),
        "prefill_seconds": mine.prefill_seconds if ours else None,  # theirs is not known
        "tokens_per_second": spread(by_chunk(mine)),
        "ratios": {
            other: paired_ratio(mine, timed[other])
            for other in BASELINES
            if other in timed and other != name
        },
    }


def setting_of(
    prompts: Prompts, *, max_new_tokens: int, gamma: int, most_gamma: int = 0, **options: Any
) -> Setting:
    """One row, eagerly, by speculative sampling, of texts that end by their length alone.

    most_gamma: of settings that share compiled code with this one. options: of `Setting`.
    """
    texts: PromptIds = [*prompts.test, *prompts.calibration]
    capacity = row_capacity(texts, max_new_tokens=max_new_tokens, gamma=max(gamma, most_gamma))
    return Setting(max_new_tokens=max_new_tokens, gamma=gamma, capacity=capacity, **options)


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


def prediction(timed: dict[str, Timed], measured: Meter, setting: Setting) -> Point:
    """Acceptance length, calibrated costs, and the speed-up that they predict beside the measured.

    The latter two for the rounds of full batches, and `full_length` is the acceptance length there.
    """
    costs, drafted = measured.costs(), timed[SPECULATIVE]
    counted = count_rounds(drafted)
    gained = speedup(drafted.full_batches, timed[PLAIN].full_batches)
    predicted = speedup_from_length(drafted.full_length, setting.gamma, **costs.ratios)
    return {
        "acceptance_length": counted["acceptance_length"],
        "full_length": drafted.full_length,
        **costs.ratios,
        "plain_step_seconds": costs.plain_seconds,
        "quartiles": measured.quartiles(),
        "speedup": {
            "measured": gained.mean,
            "ci95": gained.ci95,
            "predicted": predicted,
        },
        "prediction_error": gained.mean / predicted - 1,
    }


def greedy_agreement(
    target: CausalAdapter, ours: Sequence[Completion], theirs: Sequence[Completion]
) -> dict[str, Any]:
    """How many answers are the same, and how the others part: by a near-tie, or not."""
    margins = [
        parting_margin(target, mine, other)
        for mine, other in zip(ours, theirs, strict=True)
        if mine.output_ids != other.output_ids
    ]
    tolerance = TIE_MARGINS[target.dtype]
    different = sum(not margin <= tolerance for margin in margins)  # NaN is no tie
    return {
        "compared": len(ours),
        "identical": len(ours) - len(margins),
        "near_ties": len(margins) - different,
        "different": different,
        "largest_margin": max(margins, default=0.0),
        "tolerance": tolerance,
    }


def headline(points: Sequence[Point]) -> dict[str, Any]:
    """The numbers of greedy decoding of a single row; null for what was not measured."""
    alone = {
        point["method"]: point
        for point in points
        if point["batch_size"] == 1 and point["temperature"] == 0
    }

    def ratio(name: str, other: str) -> float | None:
        return alone.get(name, {}).get("ratios", {}).get(other, {}).get("median")

    drafted = alone.get(SPECULATIVE, {})
    return {
        "ratio_to_plain": ratio(SPECULATIVE, PLAIN),
        "ratio_to_hf_assisted": ratio(SPECULATIVE, HF_ASSISTED),
        "ratio_to_hf_plain": ratio(SPECULATIVE, HF_PLAIN),
        "plain_ratio_to_hf_plain": ratio(PLAIN, HF_PLAIN),
        "acceptance_length": drafted.get("acceptance_length"),
        "prediction_error": drafted.get("prediction_error"),
    }
