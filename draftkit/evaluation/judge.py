"""All that is measured of drafts beside a target, of which `summary` makes numbers and a verdict.

Alpha on shared contexts, real speculative decoding with wall time, losslessness. Each number's
definition stands with the code that computes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from draftkit.config import Config, ModelConfig, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.catalogue import PROPOSERS, Material
from draftkit.decoding.graphs import compile_seconds
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import Proposer
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.evaluation.costs import between, meter
from draftkit.evaluation.lossless import Losslessness, greedy_identity
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
from draftkit.models.loading import Target, in_float32, load_draft
from draftkit.theory.speedup import Costs

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
    """Greedy identity of every draft, as it is served; `target` is held in float32 meanwhile."""
    note("losslessness: greedy decoding with and without the draft, in float32")
    with in_float32(target):
        loaded: dict[str, Adapter] = {name: load_draft(d, target) for name, d in drafts.items()}
        return greedy_identity(
            target.adapter,
            proposers_of(target.adapter, loaded, prompts, config),
            prompts.test[: config.evaluate.lossless_prompts],
            max_new_tokens=config.evaluate.max_new_tokens,
            gamma=max(config.decode.gamma, 1),
            batch_size=config.evaluate.batch_size,
            eos_token_ids=target.eos_token_ids,
        )
