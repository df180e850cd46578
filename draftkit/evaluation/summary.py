"""From what was measured to the keys of a summary, the verdict among them."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftkit.config import Config, SamplingConfig
from draftkit.decoding.catalogue import served_mode
from draftkit.evaluation.alpha import PromptTotals, breakdown, estimates
from draftkit.evaluation.choice import HYBRID, LOOKUP, factors_of, taus_of
from draftkit.evaluation.costs import predicted_speedup
from draftkit.evaluation.engines import engine_rows
from draftkit.evaluation.intervals import (
    LEAST_UNITS,
    Estimate,
    acceptance_length,
    estimate,
    gain_p_value,
    log_ratio,
    proportion,
    speedup,
)
from draftkit.evaluation.lossless import Losslessness
from draftkit.evaluation.measure import Measured
from draftkit.evaluation.walltime import PLAIN, Timed
from draftkit.theory.acceptance import (
    Rate,
    chain_acceptance,
    mean_by_position,
    unconditional_rates,
)
from draftkit.theory.speedup import break_even_alpha, ceiling, largest

CHOICE = 0.002  # how often one of the ways beside the judged one is named though none gains
UNCHECKED = "; whether it is lossless was not checked"
UNTIMED = (
    "the target is behind HTTP (target.urls), so nothing was decoded and timed here: count in the "
    "engine by measure_engine, or evaluate with the target's weights"
)
DEPLOY, DO_NOT_DEPLOY, INCONCLUSIVE = "deploy", "do_not_deploy", "inconclusive"


def compare(
    measured: Measured, main: str, sampling: SamplingConfig, config: Config
) -> dict[str, Any]:
    """The summary of draft `main`, with prompt lookup, the draft `before` it and paired gains."""
    summary = summarise(measured, main, sampling, config)
    scored, timed, has_drafter = measured.scored, measured.timed, config.decode.has_drafter
    if has_drafter:
        totals, costs = scored[main], measured.costs[main]
        summary["best_gamma_by_mode"] = {
            mode: largest(factors_of(taus_of(totals, mode), totals.rate(mode).mean, costs))[0]
            for mode in totals.totals
        }
        summary["engines"] = engine_rows(
            totals,
            own=served_mode(config.decode),
            gamma=timed[main].gamma,
            best_gammas=summary["best_gamma_by_mode"],
        )
    judged = "drafter" if has_drafter else config.decode.proposer
    named = {LOOKUP: LOOKUP, judged: main} | {name: name for name in (HYBRID,) if name in timed}
    own = timed[main]
    others: dict[str, Any] = {
        # How much faster answers come than by the draft before it, and by prompt lookup.
        "speedup_over": {
            name: speedup(own.answers, timed[name].answers).as_dict()
            for name in ("before", LOOKUP)
            if name in timed and timed[name] is not own
        }
    }
    if main != "before" and "before" in scored:
        for mode in scored[main].totals:
            others[f"{mode}_gain"] = scored[main].gain(scored["before"], mode).as_dict()
        lengths = (tokens_a_pass(timed[draft]) for draft in (main, "before"))
        longer = estimate(*lengths, compare=operator.sub)
        others["acceptance_length_gain"] = longer.as_dict()
        others["before"] = summarise(measured, "before", sampling, config)
        if has_drafter:
            named["before"] = "before"
    ways = ways_beside(timed, named, judged, measured.lossless)
    best = {"best_of": best_of(ways, judged), "ways": ways, LOOKUP: ways[LOOKUP]}
    return {**summary, **best_use(summary, ways), **best, **others}


def summarise(
    measured: Measured, draft: str, sampling: SamplingConfig, config: Config
) -> dict[str, Any]:
    """The `evaluate` keys of one draft."""
    scored, timed, plain = measured.scored[draft], measured.timed[draft], measured.timed[PLAIN]
    costs, lossless, gamma = measured.costs[draft], measured.lossless[draft], timed.gamma
    acceptance, counted = estimates(scored), count_rounds(timed)
    rounds, answers = speedup(timed.rounds, plain.rounds), speedup(timed.answers, plain.answers)
    predicted = predicted_speedup(timed, plain, costs)
    limit, break_even = ceiling(gamma, **costs.ratios), break_even_alpha(gamma, **costs.ratios)
    decision, reason = verdict(
        gained=answers,
        rounds=rounds,
        lossless=lossless,
        ceiling=limit,
        break_even_alpha=break_even,
        batch_size=config.evaluate.timing_batch_size,
    )
    served = served_mode(config.decode)
    alpha = acceptance[served].mean if served else counted["acceptance_per_position"][0]
    taus = taus_of(scored, served) if served else []
    gained = factors_of(taus, alpha, costs)
    best, best_factor = largest(gained)
    return {
        **{mode: one.as_dict() for mode, one in acceptance.items()},
        **counted,
        "proposer": config.decode.proposer,
        "gamma": gamma,
        "temperature": sampling.temperature,
        "sampling": dict(vars(sampling)),
        "batch_size": config.evaluate.timing_batch_size,
        **costs.ratios,
        "plain_step_seconds": costs.plain_seconds,
        "compile_seconds": measured.compile_seconds,
        "tokens_per_second": {
            "autoregressive": plain.rounds.mean,
            "speculative": timed.rounds.mean,
        },
        "prefill_seconds": {
            "autoregressive": plain.prefill_seconds,
            "speculative": timed.prefill_seconds,
        },
        "speedup": {
            **stated(timed, plain),
            "predicted": predicted,
            "prediction_error": rounds.mean / predicted - 1,
            "ceiling": limit,
            "predicted_by_gamma": gained,
        },
        **by_number(scored, served, taus, gained),
        "lost": breakdown(scored) if scored.accepted else {},
        "break_even_alpha": break_even,
        "best_gamma": best,
        "best_gamma_factor": best_factor,
        "lossless": lossless.as_dict(),
        "verdict": decision,
        "reason": reason,
    }


def bounded(judged: Mapping[str, tuple[PromptTotals, Tensor]], config: Config) -> dict[str, Any]:
    """What `score_stored` says of the last of the drafts, beside that of the one before it.

    `alpha` is what is sure, `alpha_error_bound` what may be missing; `acceptance_length_by_k` is
    made of the sure part at every position, whichever token came: near tau, and no bound of it.
    """
    summaries = []
    for scored, missing in judged.values():
        taus = taus_of(scored, "alpha")
        lengths = {str(k): acceptance_length(tau, k).as_dict() for k, tau in enumerate(taus, 1)}
        summaries.append(
            {
                "alpha": scored.alpha.as_dict(),
                "alpha_error_bound": float(missing.sum() / scored.counts.sum()),
                "acceptance_length_by_k": lengths,
                "gamma": config.proposals,
                "proposer": config.decode.proposer,
                "batch_size": config.evaluate.timing_batch_size,
                "verdict": INCONCLUSIVE,
                "reason": UNTIMED,
            }
        )
    if len(summaries) == 1:
        return summaries[0]
    (before, _), (after, _) = judged.values()
    return {**summaries[-1], "before": summaries[0], "alpha_gain": after.gain(before).as_dict()}


def by_number(
    scored: PromptTotals, mode: str | None, taus: Sequence[Rate], gained: Sequence[float]
) -> dict[str, Any]:
    """tau and predicted speed-up by the number of proposals, acceptance by their position.

    All of the scored texts, whatever number is decoded with; empty where those do not tell.
    """
    if mode is None or not taus:
        return {}
    lengths = {str(k): acceptance_length(tau, k).as_dict() for k, tau in enumerate(taus, 1)}
    return {
        "acceptance_length_by_k": lengths,
        "speedup_by_k": dict(zip(lengths, gained[1:], strict=True)),
        "alpha_by_position": mean_by_position(scored.shares[mode], len(taus)).tolist(),
        "alpha_given_chain": chain_acceptance(scored.shares[mode], len(taus)),
    }


def ways_beside(
    timed: Mapping[str, Timed],
    named: Mapping[str, str],
    judged: str,
    lossless: Mapping[str, Losslessness],
) -> dict[str, dict[str, Any]]:
    """All `ways` and what their proposals gain; `named` gives the key of each in `timed`.

    tokens_per_second: of the rounds; end_to_end: from request to last token. lossless: of this very
    way. Beside the one `judged` stand rivals to be chosen from, and the largest of several is too
    large: all of them together are as likely to be stated too high as the judged one alone.
    """
    plain, rivals, ways = timed[PLAIN], max(1, len(named) - 1), {}
    for name, key in named.items():
        one = timed[key]
        ways[name] = {
            **one.hybrid,
            "gamma": one.gamma,
            "acceptance_length": count_rounds(one)["acceptance_length"],
            "tokens_per_second": one.rounds.mean,
            "tokens_per_second_end_to_end": one.answers.mean,
            "plain_tokens_per_second_end_to_end": plain.answers.mean,
            "speedup": stated(one, plain, chosen_of=1 if name == judged else rivals),
        }
        if key in lossless:
            ways[name]["lossless"] = lossless[key].as_dict()
    return ways


def stated(timed: Timed, plain: Timed, chosen_of: int = 1) -> dict[str, Any]:
    """Speed-ups as summaries state them, tokens per second, paired: of the rounds, and end to end.

    chosen_of: ways that end to end stand beside the judged one to be chosen from.
    units: what the interval of `end_to_end` rests on, documents, or batches where rows are decoded
    together. p_value: of no speed-up against one, by the same test as the interval; None with it.
    """
    rounds = speedup(timed.rounds, plain.rounds)
    answers = speedup(timed.answers, plain.answers, tail=0.025 / chosen_of)
    p_value = None
    if answers.ci95:
        p_value = gain_p_value(timed.answers, plain.answers, compare=log_ratio)
    whole = {"mean": answers.mean, "ci95": answers.ci95, "p_value": p_value}
    whole |= {"chunks": answers.prompts, "units": answers.documents}
    return {"measured": rounds.mean, "ci95": rounds.ci95, "end_to_end": whole}


def best_of(ways: Mapping[str, dict[str, Any]], judged: str) -> str:
    """The lossless way with the largest end-to-end speed-up, of those that surely have one.

    The way `judged` was named before anything was measured, so it is tested as the verdict tests
    it: its interval lies above 1. The others stand beside it to be chosen from, and the
    largest of several is too large: together they get `CHOICE`, in equal parts (Bonferroni). So
    where nothing is gained one of all of them is named at most three times in a hundred, in
    simulations.
    """
    paying = [name for name in ways if pays(ways, name, judged)]
    return max(paying, key=lambda name: ways[name]["speedup"]["end_to_end"]["mean"], default="none")


def pays(ways: Mapping[str, dict[str, Any]], name: str, judged: str) -> bool:
    """Whether the way surely gains, at the level that `best_of` gives it."""
    way, level = ways[name], CHOICE / max(1, len(ways) - 1)
    whole = way["speedup"]["end_to_end"]
    if whole["ci95"] is None or way.get("lossless", {"passed": True})["passed"] is False:
        return False
    return whole["ci95"][0] > 1 if name == judged else whole["p_value"] <= level


def best_use(drafter: dict[str, Any], ways: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """The verdict on the drafter's best use: by itself, or where prompt lookup has no guess.

    The hybrid is tested as `best_of` tests it, beside a drafter that is judged as it was before, so
    that where nothing is gained both together deploy at most three times in a hundred, in
    simulations.
    """
    alone = {"use": drafter["proposer"], "verdict": drafter["verdict"], "reason": drafter["reason"]}
    mixed = ways[HYBRID]["speedup"]["end_to_end"] if HYBRID in ways else {"ci95": None}
    own = drafter["lossless"]
    passed = own["passed"], ways.get(HYBRID, {}).get("lossless", own)["passed"]
    if mixed["ci95"] is None or False in passed:
        return alone
    low, high = mixed["ci95"]
    as_hybrid = f"as decode.proposer=hybrid {mixed['mean']:.2f} [{low:.2f}, {high:.2f}]"
    faster = mixed["mean"] > drafter["speedup"]["end_to_end"]["mean"]
    if pays(ways, HYBRID, "drafter") and (faster or alone["verdict"] != DEPLOY):
        unchecked = UNCHECKED * (None in passed)
        reason = f"end-to-end speedup {as_hybrid} lies above 1{unchecked}"
        return {"use": HYBRID, "verdict": DEPLOY, "reason": reason}
    if alone["verdict"] == DO_NOT_DEPLOY and high >= 1:
        reason = f"{alone['reason']}; but {as_hybrid} does not"
        return {"use": HYBRID, "verdict": INCONCLUSIVE, "reason": reason}
    return alone


def count_rounds(timed: Timed) -> dict[str, Any]:
    """Rates that real speculative decoding showed, with intervals over documents.

    `acceptance_rate` = accepted / drafted; `acceptance_length` = tokens per target pass;
    `acceptance_per_position` = share of rounds whose first i proposals were all accepted;
    `alpha_decoding` = mean chance to be accepted over the positions that were tested: of
    sampled proposals sum_x min(p, q), or sum_x p q under `decode.verification=match`. A rate is
    None where nothing was proposed.
    """
    done = timed.completions

    def stated(*pairs: tuple[float, float]) -> dict[str, Any] | None:
        rate = timed.of_prompts(pairs)
        return proportion(rate).as_dict() if rate.counts.sum() > 0 else None

    counts = [torch.tensor(c.accept_counts, dtype=torch.float64) for c in done]
    histogram = pad_sequence(counts, batch_first=True).sum(0)  # rounds may differ in gamma
    return {
        "alpha_decoding": stated(*((c.acceptance_total, c.tested) for c in done)),
        "acceptance_rate": stated(*((c.accepted, c.drafted) for c in done)),
        "acceptance_length": acceptance_length(tokens_a_pass(timed), timed.gamma).as_dict(),
        "acceptance_per_position": unconditional_rates(histogram).tolist(),
        "accept_counts": [int(count) for count in histogram],
    }


def tokens_a_pass(timed: Timed) -> Rate:
    """tau by prompt: tokens, with the correction or the bonus, over passes of the target."""
    pairs = ((c.accepted + c.rounds, c.rounds) for c in timed.completions)
    return timed.of_prompts(pairs)


def verdict(
    *,
    gained: Estimate,
    rounds: Estimate,
    lossless: Losslessness,
    ceiling: float,
    break_even_alpha: float | None,
    batch_size: int = 1,
) -> tuple[str, str]:
    """Deploy or not, and why: the speed-up's interval against 1, exactness first.

    That the interval lies above 1 is a one-sided t test on the log speed-up at 2.5 %. gained: end
    to end, prefill and waiting included. rounds: without the prefill, of which alone `ceiling` and
    `break_even_alpha` speak. With fewer than `LEAST_UNITS` documents, or batches of `batch_size`,
    there is no interval, and nothing is decided.
    """
    interval = f"end-to-end speedup {gained.mean:.2f} [{gained.low:.2f}, {gained.high:.2f}]"
    if lossless.passed is False:
        return DO_NOT_DEPLOY, lossless.fault
    if (units := gained.documents) < LEAST_UNITS:
        what = "documents" if batch_size == 1 else f"batches of {batch_size} documents"
        return INCONCLUSIVE, (
            f"this run only shows that every part works: it timed {units} of the {LEAST_UNITS} "
            f"{what} that a verdict needs (evaluate.timing_prompts, timing_minutes, prompts, "
            "held-out text)"
        )
    if gained.low > 1:
        unchecked = UNCHECKED * (lossless.passed is None)
        return DEPLOY, f"{interval} lies above 1{unchecked}"
    if not gained.high < 1:
        return INCONCLUSIVE, f"{interval} contains 1; time more prompts (evaluate.timing_prompts)"
    if rounds.mean > 1:
        hint = f"rounds alone reach {rounds.mean:.2f}, but the draft's prefill costs more"
    elif break_even_alpha is None:
        hint = f"even a perfect draft would reach {ceiling:.2f}"
    else:
        hint = f"it would take an alpha of {break_even_alpha:.2f} for rounds to break even"
    return DO_NOT_DEPLOY, f"{interval} lies below 1; {hint}"
