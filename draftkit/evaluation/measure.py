"""All that is measured of drafts beside a target, of which `summary` makes numbers and a verdict.

Alpha on shared contexts, real speculative decoding with wall time, losslessness. Each number's
definition stands with the code that computes it.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from draftkit.config import Config, DraftConfig, EvaluateConfig, SamplingConfig
from draftkit.data.rollouts import Record
from draftkit.decoding.catalogue import proposer_of
from draftkit.decoding.composite import HybridProposer
from draftkit.decoding.graphs import compile_seconds
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import Proposer
from draftkit.decoding.trees import Tree, chosen_tree
from draftkit.evaluation.alpha import PromptTotals, score_drafts
from draftkit.evaluation.choice import HYBRID, LOOKUP, chosen_numbers, rank_rates
from draftkit.evaluation.costs import calibrate
from draftkit.evaluation.laws import is_chained
from draftkit.evaluation.lossless import (
    LOSSY,
    NOT_CHECKED,
    Losslessness,
    check_proposers,
    sampled_surprise,
)
from draftkit.evaluation.walltime import (
    CALIBRATED_GAMMAS,
    MOST_GAMMA,
    PLAIN,
    PromptIds,
    Setting,
    Timed,
    decoding,
    make_decoder,
    row_capacity,
    time_ways,
)
from draftkit.models.adapter import Adapter
from draftkit.models.devices import free_bytes, in_float32
from draftkit.models.files import ModelFolder
from draftkit.models.loading import Target, load_draft, weight_count
from draftkit.models.rounded import AT_ONCE, is_packed
from draftkit.theory.speedup import Costs

LOSSLESS_PROMPTS = 32
RESERVE = 1.25  # for caches and logits beside the weights


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

    def counted(self) -> Iterable[Sequence[int]]:
        """The texts whose tokens are counted."""
        return self.calibration if self.texts is None else self.texts()


@dataclass(frozen=True)
class Measured:
    """All that was measured under one sampling, by the name of a draft.

    timed: of every way by its name, plain decoding, prompt lookup and the hybrid of it and the last
    draft among them. What proposes without a draft stands for each of them.
    """

    scored: Mapping[str, PromptTotals]
    timed: Mapping[str, Timed]
    costs: Mapping[str, Costs]  # c and v at its number of proposals
    lossless: Mapping[str, Losslessness]  # of drafts, and of other ways that were checked
    compile_seconds: float = 0.0  # for all drafts together; in none of the times


def gather(
    target: Target,
    drafts: dict[str, Adapter],
    *,
    contexts: Sequence[Record],
    others: Sequence[Record],
    prompts: Prompts,
    sampling: SamplingConfig,
    lossless: dict[str, Losslessness],
    config: Config,
    note: Callable[[str], None],
) -> Measured:
    """Measure every draft under `sampling`: shared contexts, shared prompts, shared baseline.

    others: what the target says after other prompts than `prompts.test`, by which the numbers of
    proposals are chosen.
    """
    options, adapter = config.evaluate, target.adapter
    how: Any = {"sampling": sampling, "eos_token_ids": target.eos_token_ids, "blocks": MOST_GAMMA}
    score = partial(score_drafts, adapter, drafts, batch_size=options.batch_size, **how)
    note(f"alpha on {len(contexts)} contexts at temperature {sampling.temperature:g}")
    scored = score(contexts)
    rows = timed_rows(prompts, options)
    timed_prompts = [prompts.test[row] for row in rows]
    setting = timing([*timed_prompts, *prompts.calibration], sampling, target.eos_token_ids, config)
    compiling = -compile_seconds()
    trees = dict[str, Tree]()
    if config.decode.tree > 0:
        note(f"choosing the best {config.decode.tree} nodes of a tree")
        trees = {
            name: chosen_tree(rank_rates(adapter, draft, others, config), config.decode.tree)
            for name, draft in drafts.items()
        }
    ways = ways_of(adapter, drafts, prompts, config, trees)
    plain = make_decoder(adapter, None, setting)
    proposers = {name: make() for name, make in ways.items()}
    decoders = {name: make_decoder(adapter, one, setting) for name, one in proposers.items()}
    costs = dict[str, Costs]()
    last = [*drafts][-1]
    chooses = config.decode.gamma == "auto" and not trees
    alone = setting.batch_size == 1  # else batches of guesses end otherwise than those of drafts
    guessed = decoders.get(LOOKUP, decoders[last]) if chooses and alone else None
    guesses = (AT_ONCE - 1, MOST_GAMMA) if is_packed(adapter.model) else (MOST_GAMMA,)
    calibrated = partial(
        calibrate, gammas=CALIBRATED_GAMMAS, guessed=guessed, guesses=guesses, note=note
    )
    for name in [name for name in decoders if name in drafts]:
        note(f"calibrating {name}: what its rounds cost, on other prompts")
        costs[name] = calibrated(plain, decoders[name], prompts.calibration, setting)
    chosen = {name: {"gamma": setting.gamma} for name in ways}
    chosen |= {name: {"gamma": tree.depth} for name, tree in trees.items()}
    if chooses:
        chosen = chosen_numbers(proposers, costs, score(others), others, config)
    gammas = {name: numbers["gamma"] for name, numbers in chosen.items()}
    note(", ".join(f"{name} {gamma}" for name, gamma in gammas.items()) + " proposals a round")
    hybrids = set_hybrids(proposers, chosen)
    for name, one in hybrids.items():
        note(f"{name}: {', '.join(f'{key} {number}' for key, number in one.items())}")
    for name, tree in trees.items():
        note(f"{name} proposes a tree of {tree.nodes} nodes, {tree.depth} deep")
    own = {name: numbers["draft_gamma"] for name, numbers in hybrids.items()}
    note_untaught(drafts, gammas | own, note)
    note(f"wall time on {len(rows)} prompts, {options.timing_minutes:g} min at most")
    drafting = {name: decoding(one, setting, gammas[name]) for name, one in decoders.items()}
    timed = time_ways(
        {PLAIN: decoding(plain, setting)} | drafting,
        timed_prompts,
        prompts.calibration,
        batch_size=setting.batch_size,
        documents=[prompts.documents[row] for row in rows] if prompts.documents else [],
        minutes=options.timing_minutes,
        note=note,
    )
    timed |= {name: replace(timed[name], hybrid=numbers) for name, numbers in hybrids.items()}
    compiling += compile_seconds()
    if setting.compiled:
        note(f"{compiling:.0f} s went into compiling; no measured time holds them")
    if config.decode.is_lossy:
        lossless = dict.fromkeys(timed, LOSSY) | lossless
    same = {name: name if name in costs else last for name in drafts}
    return Measured(
        scored,
        {LOOKUP: timed[last]} | timed | {name: timed[key] for name, key in same.items()},
        {name: costs[key].at(gammas[key]) for name, key in same.items()},
        {**lossless, **{name: lossless[key] for name, key in same.items()}},
        compiling,
    )


def set_hybrids(
    proposers: Mapping[str, Proposer], chosen: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, int]]:
    """Give hybrids, in place, what is `chosen` for them; return their settings beside gamma."""
    hybrids = {name: one for name, one in proposers.items() if isinstance(one, HybridProposer)}
    for name, one in hybrids.items():
        one.draft_gamma = chosen[name].get("draft_gamma", one.draft_gamma)
        one.guesser.min_ngram = chosen[name].get("lookup_min", one.guesser.min_ngram)
    return {
        name: {
            "draft_gamma": one.drafts(chosen[name]["gamma"]),
            "lookup_min": one.guesser.min_ngram,
        }
        for name, one in hybrids.items()
    }


def note_untaught(
    drafts: Mapping[str, Adapter], gammas: Mapping[str, int], note: Callable[[str], None]
) -> None:
    """Say which drafts that learn chains propose more than they were trained for."""
    for name, draft in drafts.items():
        if is_chained(draft) and gammas.get(name, 0) > draft.blocks:
            key = "draft.head" if draft.reads else "draft.pard.tokens"
            note(
                f"{name} was trained for {draft.blocks} proposals a pass: the last of "
                f"{gammas[name]} were never taught ({key})"
            )


def ways_of(
    target: Adapter,
    drafts: Mapping[str, Adapter],
    prompts: Prompts,
    config: Config,
    trees: Mapping[str, Tree] | None = None,
) -> dict[str, Callable[[], Proposer]]:
    """All that is timed beside plain decoding, by name: how to make a proposer for one decoder.

    The drafts, or what proposes without one; prompt lookup; and the hybrid of it and the last
    draft, where the drafts' samples are what is judged. trees: that drafts propose.
    """
    trees, served, last = trees or {}, config.decode.proposer, [*drafts][-1]
    ways: dict[str, Callable[[], Proposer]] = {} if served == LOOKUP else {LOOKUP: PromptLookup}

    def way(name: str, config: Config) -> Callable[[], Proposer]:
        draft, tree = drafts[name], trees.get(name)
        return partial(proposer_of, config, lambda: draft, prompts.counted, target, tree)

    if not config.decode.has_drafter:
        one = way(last, config)()  # which may have counted the text
        return ways | {last: lambda: one}
    ways |= {name: way(name, config) for name in drafts}
    if served == "sampled":
        mixed = replace(config.decode, proposer=HYBRID, tree=0)
        ways[HYBRID] = way(last, replace(config, decode=mixed))
    return ways


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
    options, gamma = config.evaluate, config.proposals
    return Setting(
        sampling=sampling,
        max_new_tokens=options.max_new_tokens,
        gamma=gamma,
        verification=config.decode.verification,
        epsilon=config.decode.epsilon,
        batch_size=options.timing_batch_size,
        capacity=row_capacity(
            texts,
            max_new_tokens=options.max_new_tokens,
            gamma=max(gamma, config.decode.tree),
        ),
        eos_token_ids=eos_token_ids,
        seed=config.seed,
        compiled=config.decode.compile in ("auto", "true"),
        captured=config.decode.compile == "captured",
    )


def check_lossless(
    target: Target,
    drafts: Mapping[str, DraftConfig],
    prompts: Prompts,
    config: Config,
    note: Callable[[str], None],
) -> dict[str, Losslessness]:
    """Greedy identity of every way that may be named, in the dtype of `evaluate.lossless`.

    For float32 `target` is held in it meanwhile, in place.
    """
    options, texts = config.evaluate, prompts.test[:LOSSLESS_PROMPTS]
    if config.decode.is_lossy:
        note("losslessness: surprise of sampled answers, as typical acceptance is lossy")
        proposers = {
            name: proposer_of(
                config, partial(load_draft, draft, target), prompts.counted, target.adapter
            )
            for name, draft in drafts.items()
        }
        setting = timing(texts, config.sampling, target.eos_token_ids, config)
        return sampled_surprise(target.adapter, proposers, texts, setting)
    if options.lossless == "off":
        note("losslessness: not checked (evaluate.lossless=off)")
        return dict.fromkeys(drafts, NOT_CHECKED)
    served, why = options.lossless == "served", ""
    if options.lossless == "auto" and target.adapter.dtype != torch.float32:
        needed = float32_bytes(target, drafts)
        free = free_bytes(target.adapter.device)
        served = needed > free
        why = f", as float32 takes {needed / 1e9:.1f} GB more and {free / 1e9:.1f} GB are free"
    dtype = target.adapter.dtype if served else torch.float32
    name = str(dtype).removeprefix("torch.")
    note(f"losslessness: greedy decoding with and without proposals, in {name}{why * served}")
    with nullcontext() if served else in_float32(target.adapter):
        held = None if served else torch.float32
        loaded = {name: load_draft(draft, target, dtype=held) for name, draft in drafts.items()}
        ways = ways_of(target.adapter, loaded, prompts, config)
        proposers = {name: make() for name, make in ways.items()}
        for one in proposers.values():
            if isinstance(one, HybridProposer):  # so that both of its numbers are checked
                one.draft_gamma = 1
        return check_proposers(
            target.adapter,
            proposers,
            texts,
            max_new_tokens=options.max_new_tokens,
            gamma=max(config.proposals, 1),
            batch_size=options.batch_size,
            eos_token_ids=target.eos_token_ids,
        )


def float32_bytes(target: Target, drafts: Mapping[str, DraftConfig]) -> int:
    """What the weights of a check in float32 take beyond the target as it is, with a reserve."""
    grown = sum(weight.numel() for weight in target.adapter.model.parameters())
    loaded = sum(weight_count(ModelFolder(draft).config) for draft in drafts.values())
    return int(RESERVE * (grown + loaded) * torch.float32.itemsize)
