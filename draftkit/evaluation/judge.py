"""The whole judgement of drafts against a target: one dictionary of summary keys a draft.

Puts together contexts, alpha, real speculative decoding with wall time, losslessness and the
verdict. Each number's definition stands with the code that computes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from draftkit.config import Config, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.catalogue import PROPOSERS, Material
from draftkit.decoding.graphs import compile_seconds
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import Proposer
from draftkit.evaluation.alpha import PromptTotals, estimates, gains, score_contexts
from draftkit.evaluation.costs import between, meter
from draftkit.evaluation.decision import verdict
from draftkit.evaluation.lossless import Losslessness, greedy_identity
from draftkit.evaluation.walltime import (
    CALIBRATED_GAMMA,
    PLAIN,
    PromptIds,
    Setting,
    Timed,
    chunk_count,
    row_capacity,
    speedup,
    time_methods,
)
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target
from draftkit.theory.acceptance import Estimate, estimate_ratio, unconditional_rates
from draftkit.theory.speedup import (
    Costs,
    best_gamma,
    break_even_alpha,
    ceiling,
    speedup_from_length,
)

MAX_GAMMA = 16
LOOKUP = "prompt_lookup"
# The acceptance of proposals as they are served. Other proposers may have no guess: how often the
# first of a round was made and accepted stands for it.
SERVED_ALPHA = {"sampled": "alpha", "staged": "alpha", "argmax": "alpha_greedy_draft"}


@dataclass(frozen=True)
class Prompts:
    """Held-out prompts for measuring, others for calibration and warm-up, and training text."""

    test: PromptIds
    calibration: PromptIds
    # Token ids that the proposers unigram, bigram and ngram count. None: those of `calibration`.
    texts: Callable[[], Iterable[Sequence[int]]] | None = None


@dataclass(frozen=True)
class Evidence:
    """All that was measured of one draft, and of prompt lookup, under one sampling."""

    scored: PromptTotals
    timed: Timed
    plain: Timed
    costs: Costs
    lossless: Losslessness
    lookup: Timed
    compile_seconds: float = 0.0  # for all drafts together; in none of the times


def proposers_of(
    target: Adapter, drafts: Mapping[str, Adapter], prompts: Prompts, config: Config
) -> dict[str, Proposer]:
    """What stands for each draft in real decoding, as `decode.proposer` says.

    Proposers without a draft model are the same for all: one of them, by the name of the last.
    """
    make = PROPOSERS[config.decode.proposer]
    texts = prompts.texts or (lambda: prompts.calibration)
    names = [*drafts] if config.decode.has_drafter else [*drafts][-1:]
    return {
        name: make(
            Material(partial(drafts.__getitem__, name), texts, target.vocab_size, target.device)
        )
        for name in names
    }


def gather(
    target: Target,
    drafts: dict[str, Adapter],
    *,
    contexts: Sequence[Record],
    prompts: Prompts,
    sampling: SamplingConfig,
    lossless: dict[str, Losslessness],
    config: Config,
    note: Callable[[str], None],
) -> dict[str, Evidence]:
    """Measure every draft under `sampling`: shared contexts, shared prompts, shared baseline."""
    options = config.evaluate
    timed_prompts = prompts.test[: options.timing_prompts]
    texts = [*timed_prompts, *prompts.calibration]
    setting = timing(texts, sampling, target.eos_token_ids, config)
    note(f"alpha on {len(contexts)} contexts at temperature {sampling.temperature:g}")
    scored = {
        name: score_contexts(
            target.adapter, draft, contexts, sampling=sampling, batch_size=options.batch_size
        )
        for name, draft in drafts.items()
    }
    compiling = -compile_seconds()
    note(f"wall time on {len(timed_prompts)} prompts, in turns with the baseline")

    def proposers() -> dict[str, Proposer]:  # each decoder has its own, since each has its cache
        return proposers_of(target.adapter, drafts, prompts, config)

    lookup = {} if config.decode.proposer == LOOKUP else {LOOKUP: PromptLookup()}
    meters = {
        name: meter(
            target.adapter, proposer, prompts.calibration, setting, gammas=(CALIBRATED_GAMMA,)
        )
        for name, proposer in proposers().items()
    }
    timed = time_methods(
        target.adapter,
        lookup | proposers(),
        timed_prompts,
        prompts.calibration,
        setting,
        between([*meters.values()], chunk_count(timed_prompts, setting), options.calibration_turns),
    )
    costs = {name: measured.result().costs for name, measured in meters.items()}
    compiling += compile_seconds()
    if setting.compiled:
        note(f"{compiling:.0f} s went into compiling; no measured time holds them")
    evidence = {}
    for name in drafts:
        stand_in = name if name in meters else next(iter(meters))  # proposers without a draft
        evidence[name] = Evidence(
            scored[name],
            timed[stand_in],
            timed[PLAIN],
            costs[stand_in],
            lossless[stand_in],
            timed[LOOKUP] if lookup else timed[stand_in],
            compiling,
        )
    return evidence


def timing(
    texts: PromptIds, sampling: SamplingConfig, eos_token_ids: Sequence[int], config: Config
) -> Setting:
    """How generations of `texts` are timed."""
    options, gamma = config.evaluate, config.decode.gamma
    return Setting(
        sampling=sampling,
        max_new_tokens=options.max_new_tokens,
        gamma=gamma,
        verification=config.decode.verification,
        batch_size=options.timing_batch_size,
        capacity=row_capacity(texts, max_new_tokens=options.max_new_tokens, gamma=gamma),
        eos_token_ids=eos_token_ids,
        seed=config.seed,
        compiled=config.decode.compiles,
        captured=config.decode.captures,
    )


def check_lossless(
    target: Target, drafts: dict[str, Adapter], prompts: Prompts, config: Config
) -> dict[str, Losslessness]:
    """Greedy identity of every draft, as it is served, beside a float32 `target`."""
    return greedy_identity(
        target.adapter,
        proposers_of(target.adapter, drafts, prompts, config),
        prompts.test[: config.evaluate.lossless_prompts],
        max_new_tokens=config.evaluate.max_new_tokens,
        gamma=max(config.decode.gamma, 1),
        batch_size=config.evaluate.batch_size,
        eos_token_ids=target.eos_token_ids,
    )


def summarise(evidence: Evidence, sampling: SamplingConfig, config: Config) -> dict[str, Any]:
    """The `evaluate` keys of one draft under one sampling."""
    seed, resamples = config.seed, config.evaluate.bootstrap
    gamma, costs, timed = config.decode.gamma, evidence.costs, evidence.timed
    acceptance = estimates(evidence.scored, seed=seed, resamples=resamples)
    counted = count_rounds(timed, seed=seed, resamples=resamples)
    measured, full, whole = speedups(timed, evidence.plain, config)
    round_costs = {
        "cost_ratio": costs.cost_ratio,
        "verify_ratio": costs.verify_ratio,
        "overhead_ratio": costs.overhead_ratio,
    }
    predicted = speedup_from_length(timed.full_length, gamma, **round_costs)
    limit = ceiling(gamma, **round_costs)
    break_even = break_even_alpha(gamma, **round_costs)
    decision, reason = verdict(
        speedup=whole,
        rounds=measured,
        lossless=evidence.lossless,
        ceiling=limit,
        break_even_alpha=break_even,
    )
    served = SERVED_ALPHA.get(config.decode.proposer)
    first = counted["acceptance_per_position"][0]
    chosen, factor = best_gamma(
        first if served is None else acceptance[served].mean,
        cost_ratio=costs.cost_ratio,
        verify_ratio=costs.verify_at,
        overhead_ratio=costs.overhead_ratio,
        max_gamma=MAX_GAMMA,
    )
    return {
        **{mode: estimate.as_dict() for mode, estimate in acceptance.items()},
        **counted,
        "proposer": config.decode.proposer,
        "gamma": gamma,
        "temperature": sampling.temperature,
        "batch_size": config.evaluate.timing_batch_size,
        **round_costs,
        **clocked(evidence),
        "speedup": {
            "measured": measured.mean,
            "ci95": [measured.low, measured.high],
            "predicted": predicted,
            "prediction_error": full.mean / predicted - 1,
            "ceiling": limit,
            "end_to_end": end_to_end(whole),
        },
        "break_even_alpha": break_even,
        "best_gamma": chosen,
        "best_gamma_factor": factor,
        "lossless": evidence.lossless.as_dict(),
        "verdict": decision,
        "reason": reason,
    }


def speedups(timed: Timed, plain: Timed, config: Config) -> list[Estimate]:
    """Of the rounds, of the rounds of full batches, and from request to last token."""
    options: dict[str, Any] = {"seed": config.seed, "resamples": config.evaluate.bootstrap}
    return [
        speedup(speculative=timed, plain=plain, of=part, **options)
        for part in ("rounds", "full batches", "answers")
    ]


def end_to_end(whole: Estimate) -> dict[str, Any]:
    """An end-to-end speed-up as summaries state it."""
    return {"mean": whole.mean, "ci95": [whole.low, whole.high], "chunks": whole.prompts}


def lookup_summary(evidence: Evidence, config: Config) -> dict[str, Any]:
    """The `prompt_lookup` object: what proposals from the text alone would gain."""
    lookup, options = evidence.lookup, {"seed": config.seed, "resamples": config.evaluate.bootstrap}
    measured, _, whole = speedups(lookup, evidence.plain, config)
    return {
        "acceptance_length": count_rounds(lookup, **options)["acceptance_length"],
        "tokens_per_second": lookup.tokens_per_second,
        "speedup": {
            "measured": measured.mean,
            "ci95": [measured.low, measured.high],
            "end_to_end": end_to_end(whole),
        },
    }


def best_of(ways: Mapping[str, dict[str, Any]]) -> str:
    """The lossless way with the largest end-to-end speed-up whose interval lies above 1."""
    paying = {
        name: way["speedup"]["end_to_end"]["mean"]
        for name, way in ways.items()
        if way["speedup"]["end_to_end"]["ci95"][0] > 1
        and way.get("lossless", {"passed": True})["passed"]
    }
    return max(paying, key=lambda name: paying[name], default="none")


def clocked(evidence: Evidence) -> dict[str, Any]:
    """Seconds and rates as the clock gave them, with speculation and without."""
    plain, timed = evidence.plain, evidence.timed
    return {
        "plain_step_seconds": evidence.costs.plain_seconds,
        "compile_seconds": evidence.compile_seconds,
        "tokens_per_second": {
            "autoregressive": plain.tokens_per_second,
            "speculative": timed.tokens_per_second,
        },
        "prefill_seconds": {
            "autoregressive": sum(plain.prefill_seconds),
            "speculative": sum(timed.prefill_seconds),
        },
    }


def count_rounds(timed: Timed, *, seed: int, resamples: int) -> dict[str, Any]:
    """Rates that real speculative decoding showed, with intervals over prompts.

    `acceptance_rate` = accepted / drafted; `acceptance_length` = tokens per target pass;
    `acceptance_per_position` = share of rounds whose first i proposals were all accepted;
    `alpha_decoding` = mean of sum_x min(p, q) over the positions that were tested. A rate is None
    where fewer than two prompts had proposals.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def ratio(totals: Sequence[float], counts: Sequence[float]) -> dict[str, Any] | None:
        if sum(count > 0 for count in counts) < 2:
            return None
        estimate = estimate_ratio(column(totals), column(counts), seed=seed, resamples=resamples)
        return estimate.as_dict()

    done = timed.completions
    rounds = [c.rounds for c in done]
    accepted = [c.accepted for c in done]
    histogram = torch.tensor([c.accept_counts for c in done], dtype=torch.float64).sum(0)
    emitted = [n + r for n, r in zip(accepted, rounds, strict=True)]
    return {
        "alpha_decoding": ratio([c.acceptance_total for c in done], [c.tested for c in done]),
        "acceptance_rate": ratio(accepted, [c.drafted for c in done]),
        "acceptance_length": ratio(emitted, rounds),
        "acceptance_per_position": unconditional_rates(histogram).tolist(),
        "accept_counts": [int(count) for count in histogram],
    }


def compare(
    evidence: dict[str, Evidence], main: str, sampling: SamplingConfig, config: Config
) -> dict[str, Any]:
    """The summary of draft `main`, with prompt lookup, the draft `before` it and paired gains."""
    summary = summarise(evidence[main], sampling, config)
    lookup = lookup_summary(evidence[main], config)
    has_drafter = config.decode.has_drafter
    ways = {LOOKUP: lookup, "drafter" if has_drafter else config.decode.proposer: summary}
    others: dict[str, Any] = {"prompt_lookup": lookup}
    if main != "before" and "before" in evidence:
        gained = gains(
            after=evidence[main].scored,
            before=evidence["before"].scored,
            seed=config.seed,
            resamples=config.evaluate.bootstrap,
        )
        others |= {f"{mode}_gain": gain.as_dict() for mode, gain in gained.items()}
        others["before"] = summarise(evidence["before"], sampling, config)
        if has_drafter:
            ways["before"] = others["before"]
    return {**summary, "best_of": best_of(ways), **others}
