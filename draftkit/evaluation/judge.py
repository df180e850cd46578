"""All that is measured of drafts beside a target, of which `summary` makes numbers and a verdict.

Alpha on shared contexts, real speculative decoding with wall time, losslessness. Each number's
definition stands with the code that computes it.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from draftkit.config import Config, EvaluateConfig, ModelConfig, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.catalogue import PROPOSERS, Material
from draftkit.decoding.graphs import compile_seconds
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import Proposer
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.evaluation.costs import between, meter
from draftkit.evaluation.lossless import NOT_CHECKED, Losslessness, greedy_identity
from draftkit.evaluation.walltime import (
    CALIBRATED_GAMMA,
    PLAIN,
    PromptIds,
    Setting,
    Timed,
    row_capacity,
    time_methods,
)
from draftkit.models.adapter import Adapter
from draftkit.models.loading import Target, load_draft, model_config
from draftkit.models.memory import cache_bytes, free_bytes, in_float32, weight_count
from draftkit.theory.speedup import Costs

LOOKUP = "prompt_lookup"
LOGITS = 4  # copies of a round's, of both models and as distributions
RESERVE = 1.1


@dataclass(frozen=True)
class Prompts:
    """Held-out prompts for measuring, others for calibration and warm-up, and training text.

    documents: what each of `test` belongs to; empty where each is a document of its own.
    """

    test: PromptIds
    calibration: PromptIds
    # Token ids that the proposers unigram, bigram and ngram count. None: those of `calibration`.
    texts: Callable[[], Iterable[Sequence[int]]] | None = None
    documents: Sequence[Hashable] = ()


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
    rows = timed_rows(prompts, options)
    timed_prompts = [prompts.test[row] for row in rows]
    decoded = [*timed_prompts, *prompts.calibration]
    setting = timing(decoded, sampling, target.eos_token_ids, config)
    note(f"alpha on {len(contexts)} contexts at temperature {sampling.temperature:g}")
    scored = score_drafts(
        target.adapter,
        drafts,
        contexts,
        sampling=sampling,
        batch_size=options.batch_size,
        eos_token_ids=target.eos_token_ids,
    )
    compiling = -compile_seconds()
    note(f"wall time on {len(timed_prompts)} prompts, in turns with the baseline")

    def proposers() -> dict[str, Proposer]:  # each decoder has its own, since each has its cache
        return proposers_of(target.adapter, drafts, prompts, config)

    lookup = {} if config.decode.proposer == LOOKUP else {LOOKUP: PromptLookup()}
    gammas = (CALIBRATED_GAMMA,)
    meters = {
        name: meter(target.adapter, proposer, prompts.calibration, setting, gammas=gammas)
        for name, proposer in proposers().items()
    }
    timed = time_methods(
        target.adapter,
        lookup | proposers(),
        timed_prompts,
        prompts.calibration,
        setting,
        between([*meters.values()], options.calibration_turns),
    )
    if prompts.documents:
        documents = [prompts.documents[row] for row in rows]
        timed = {name: replace(one, documents=documents) for name, one in timed.items()}
    compiling += compile_seconds()
    if setting.compiled:
        note(f"{compiling:.0f} s went into compiling; no measured time holds them")
    shared = next(iter(meters))  # a proposer without a draft, of which there is one for all
    evidence = {}
    for name in drafts:
        key = name if name in meters else shared
        evidence[name] = Evidence(
            scored=scored[name],
            timed=timed[key],
            plain=timed[PLAIN],
            costs=meters[key].costs(),
            lossless=lossless[key],
            lookup=timed[LOOKUP] if lookup else timed[key],
            compile_seconds=compiling,
        )
    return evidence


def timed_rows(prompts: Prompts, options: EvaluateConfig) -> list[int]:
    """Numbers of the prompts of `test` that are timed.

    A batch is one observation, so where rows are decoded together each document gives but one:
    batches that share a document would tell the same twice.
    """
    rows = range(len(prompts.test))
    if options.timing_batch_size > 1 and prompts.documents:
        first = {document: row for row, document in reversed([*enumerate(prompts.documents)])}
        rows = sorted(first.values())
    return [*rows[: options.timing_prompts]]


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
    target: Target,
    drafts: Mapping[str, ModelConfig],
    prompts: Prompts,
    config: Config,
    note: Callable[[str], None],
) -> dict[str, Losslessness]:
    """Greedy identity of every draft, as it is served, in the dtype of `evaluate.lossless`.

    For float32 `target` is held in it meanwhile, in place.
    """
    options, texts = config.evaluate, prompts.test[: config.evaluate.lossless_prompts]
    if options.lossless == "off":
        note("losslessness: not checked (evaluate.lossless=off)")
        return dict.fromkeys(drafts, NOT_CHECKED)
    served, why = options.lossless == "served", ""
    if options.lossless == "auto" and target.adapter.dtype != torch.float32:
        needed = float32_bytes(target, drafts, texts, config)
        free = free_bytes(target.adapter.device)
        served = needed > free
        why = f", as float32 takes {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free"
    dtype = target.adapter.dtype if served else torch.float32
    name = str(dtype).removeprefix("torch.")
    note(f"losslessness: greedy decoding with and without the draft, in {name}{why * served}")
    with nullcontext() if served else in_float32(target.adapter):
        held = None if served else torch.float32
        loaded: dict[str, Adapter] = {
            name: load_draft(draft, target, dtype=held) for name, draft in drafts.items()
        }
        return greedy_identity(
            target.adapter,
            proposers_of(target.adapter, loaded, prompts, config),
            texts,
            max_new_tokens=options.max_new_tokens,
            gamma=max(config.decode.gamma, 1),
            batch_size=options.batch_size,
            eos_token_ids=target.eos_token_ids,
        )


def float32_bytes(
    target: Target, drafts: Mapping[str, ModelConfig], texts: PromptIds, config: Config
) -> int:
    """What checking in float32 takes beyond the target as it is, from shapes alone.

    Weights, caches of target and draft, and the logits of a round, with a reserve of a tenth.
    """
    options, gamma = config.evaluate, max(config.decode.gamma, 1)
    rows, wide = min(options.batch_size, len(texts)), torch.float32
    slots = row_capacity(texts, max_new_tokens=options.max_new_tokens, gamma=gamma)
    weights = [*target.adapter.model.parameters()]
    grown = sum(weight.numel() for weight in weights) * wide.itemsize
    if target.adapter.device.type != "cpu":  # where weights read of a file take no memory of ours
        given_back = sum(weight.nbytes for weight in weights)
        grown -= given_back - max(weight.nbytes for weight in weights)  # there are two of the last
    configs = [model_config(draft, "draft") for draft in drafts.values()]
    loaded = sum(map(weight_count, configs)) * wide.itemsize
    caches = sum(
        cache_bytes(one, rows=rows, slots=slots, dtype=wide)
        for one in (target.adapter.model.config, *configs)
    )
    logits = LOGITS * rows * (gamma + 1) * target.adapter.vocab_size * wide.itemsize
    return int(RESERVE * (grown + loaded + caches + logits))
