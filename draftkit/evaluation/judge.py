"""The whole judgement of drafts against a target: one dictionary of summary keys a draft.

Puts together contexts, alpha, real speculative decoding with wall time, losslessness and the
verdict. Each number's definition stands with the code that computes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftkit.config import Config, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.graphs import compile_seconds
from draftkit.evaluation.alpha import PromptTotals, estimates, gains, score_contexts
from draftkit.evaluation.calibration import Calibrator, between
from draftkit.evaluation.decision import verdict
from draftkit.evaluation.lossless import Losslessness, greedy_identity
from draftkit.evaluation.walltime import (
    CALIBRATED_GAMMA,
    PLAIN,
    PromptIds,
    Setting,
    Timed,
    chunk_count,
    end_to_end_speedup,
    full_speedup,
    measured_speedup,
    row_capacity,
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


@dataclass(frozen=True)
class Prompts:
    """Held-out prompts for measuring, and others for calibration and warm-up."""

    test: Sequence[Sequence[int]]
    calibration: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Evidence:
    """All that was measured of one draft under one sampling."""

    scored: PromptTotals
    timed: Timed
    plain: Timed
    costs: Costs
    lossless: Losslessness
    compile_seconds: float = 0.0  # for all drafts together; in none of the times


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
    calibrators = {
        name: Calibrator(
            target.adapter, draft, prompts.calibration, setting, gammas=(CALIBRATED_GAMMA,)
        )
        for name, draft in drafts.items()
    }
    timed = time_methods(
        target.adapter,
        drafts,
        timed_prompts,
        prompts.calibration,
        setting,
        between(
            [*calibrators.values()],
            chunk_count(timed_prompts, setting),
            config.evaluate.calibration_turns,
        ),
    )
    costs = {name: calibrator.result().costs for name, calibrator in calibrators.items()}
    compiling += compile_seconds()
    if setting.compiled:
        note(f"{compiling:.0f} s went into compiling; no measured time holds them")
    return {
        name: Evidence(
            scored[name], timed[name], timed[PLAIN], costs[name], lossless[name], compiling
        )
        for name in drafts
    }


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
    """Greedy identity of every draft beside a float32 `target`."""
    return {
        name: greedy_identity(
            target.adapter,
            draft,
            prompts.test[: config.evaluate.lossless_prompts],
            max_new_tokens=config.evaluate.max_new_tokens,
            gamma=max(config.decode.gamma, 1),
            batch_size=config.evaluate.batch_size,
            eos_token_ids=target.eos_token_ids,
        )
        for name, draft in drafts.items()
    }


def summarise(evidence: Evidence, sampling: SamplingConfig, config: Config) -> dict[str, Any]:
    """The `evaluate` keys of one draft under one sampling."""
    seed, resamples = config.seed, config.evaluate.bootstrap
    gamma, costs, timed = config.decode.gamma, evidence.costs, evidence.timed
    acceptance = estimates(evidence.scored, seed=seed, resamples=resamples)
    counted = count_rounds(timed, gamma, seed=seed, resamples=resamples)
    pair: dict[str, Any] = {"speculative": timed, "plain": evidence.plain}
    measured, full, whole = (
        speedup(**pair, seed=seed, resamples=resamples)
        for speedup in (measured_speedup, full_speedup, end_to_end_speedup)
    )
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
    chosen, factor = best_gamma(
        acceptance["alpha"].mean,
        cost_ratio=costs.cost_ratio,
        verify_ratio=costs.verify_at,
        overhead_ratio=costs.overhead_ratio,
        max_gamma=MAX_GAMMA,
    )
    return {
        **{mode: estimate.as_dict() for mode, estimate in acceptance.items()},
        **counted,
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
            "end_to_end": {
                "mean": whole.mean,
                "ci95": [whole.low, whole.high],
                "chunks": whole.prompts,
            },
        },
        "break_even_alpha": break_even,
        "best_gamma": chosen,
        "best_gamma_factor": factor,
        "lossless": evidence.lossless.as_dict(),
        "verdict": decision,
        "reason": reason,
    }


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


def count_rounds(timed: Timed, gamma: int, *, seed: int, resamples: int) -> dict[str, Any]:
    """Rates that real speculative decoding showed, with intervals over prompts.

    `acceptance_rate` = accepted / drafted; `acceptance_length` = tokens per target pass;
    `acceptance_per_position` = share of rounds whose first i proposals were all accepted;
    `alpha_decoding` = mean of sum_x min(p, q) over the positions that were tested.
    """

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def ratio(totals: Sequence[float], counts: Sequence[float]) -> Estimate:
        return estimate_ratio(column(totals), column(counts), seed=seed, resamples=resamples)

    done = timed.completions
    rounds = [c.rounds for c in done]
    accepted = [c.accepted for c in done]
    histogram = torch.tensor([c.accept_counts for c in done], dtype=torch.float64).sum(0)
    emitted = [n + r for n, r in zip(accepted, rounds, strict=True)]
    return {
        "alpha_decoding": ratio(
            [c.acceptance_total for c in done], [c.tested for c in done]
        ).as_dict(),
        "acceptance_rate": ratio(accepted, [r * gamma for r in rounds]).as_dict(),
        "acceptance_length": ratio(emitted, rounds).as_dict(),
        "acceptance_per_position": unconditional_rates(histogram).tolist(),
        "accept_counts": [int(count) for count in histogram],
    }


def compare(
    evidence: dict[str, Evidence], main: str, sampling: SamplingConfig, config: Config
) -> dict[str, Any]:
    """The summary of draft `main`, with that of the one `before` it and the paired gains."""
    summary = summarise(evidence[main], sampling, config)
    if main == "before" or "before" not in evidence:
        return summary
    gained = gains(
        after=evidence[main].scored,
        before=evidence["before"].scored,
        seed=config.seed,
        resamples=config.evaluate.bootstrap,
    )
    summary |= {f"{mode}_gain": gain.as_dict() for mode, gain in gained.items()}
    return {**summary, "before": summarise(evidence["before"], sampling, config)}
