"""How many proposals a round pay most, found on other prompts than those that are timed.

tau at every number follows from texts that the target sampled: for a drafter from the scores of
both models, for a guesser of one-hot proposals by letting it guess at every token of them. With
measured costs of a round that gives the speed-up of every number from one measurement. For a tree,
whose nodes are chosen, `rank_rates` tells from the same scores which are likely.

Shapes: M tokens of an answer, K proposals, D depths, R ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftkit.config import Config
from draftkit.data.rollouts import Record
from draftkit.decoding.catalogue import served_mode
from draftkit.decoding.composite import HybridProposer
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import Proposer
from draftkit.decoding.state import Group, RoundView, text_of
from draftkit.evaluation.alpha import PromptTotals
from draftkit.evaluation.laws import OWN_LAW, is_chained, logits_of, proposed_laws, served_laws
from draftkit.evaluation.walltime import MOST_GAMMA
from draftkit.models.adapter import Adapter
from draftkit.theory.acceptance import Rate, by_position
from draftkit.theory.speedup import Costs, by_gamma, factors, largest
from draftkit.theory.verification import SAMPLED_MODES
from draftkit.theory.warping import SamplingParams

LOOKUP, HYBRID = "prompt_lookup", "hybrid"
TREE_RANKS = 16  # of a law, that nodes of a tree may have


def taus_of(scored: PromptTotals, mode: str) -> list[Rate]:
    """tau at 1, 2, ... proposals a round; nothing where the texts do not tell."""
    if not scored.shares.get(mode):
        return []
    return [scored.tokens_a_pass(mode, gamma) for gamma in range(1, MOST_GAMMA + 1)]


def factors_of(taus: Sequence[Rate], alpha: float, costs: Costs) -> list[float]:
    """The speed-up of each number of proposals from 0; without `taus` by the i.i.d. model."""
    if not taus:
        return factors(alpha, costs, MOST_GAMMA)
    return by_gamma([tau.mean for tau in taus], costs)


def chosen_numbers(
    ways: Mapping[str, Proposer],
    costs: Mapping[str, Costs],
    scored: Mapping[str, PromptTotals],
    texts: Sequence[Record],
    config: Config,
) -> dict[str, dict[str, int]]:
    """The settings of `decode` with which each way is fastest on `texts`; a gamma is at least 1.

    Of most ways it is `gamma` alone. A hybrid has three (`hybrid_numbers`), if the host sees its
    guesses, rows are decoded alone, and it is not what is judged: then its costs mix two kinds of
    rounds. What counts the training text keeps `Config.proposals`. costs, scored: of each draft, on
    `texts`.
    """
    decode = config.decode
    mode = served_mode(decode) or SAMPLED_MODES.get(decode.verification, "alpha")
    chosen = dict[str, dict[str, int]]()
    for name, one in ways.items():
        draft = name if name in scored else [*scored][-1]
        alone = config.evaluate.timing_batch_size == 1
        if isinstance(one, HybridProposer) and alone and name != draft and not one.on_cuda:
            shares = scored[draft].shares[mode]
            chosen[name] = hybrid_numbers(texts, shares, costs[draft])
            continue
        gained = []
        if isinstance(one, PromptLookup):
            gained = by_gamma(guessed_lengths(one, texts), free(costs[draft]))
        elif decode.has_drafter:
            gained = factors_of(taus_of(scored[draft], mode), math.nan, costs[draft])
        chosen[name] = {"gamma": 1 + largest(gained[1:])[0] if gained else config.proposals}
    return chosen


def free(costs: Costs) -> Costs:
    """`costs` of proposals that cost nothing."""
    return replace(costs, cost_ratio=0.0, draft_units={})


def guessed_lengths(guesser: Proposer, contexts: Sequence[Record]) -> list[float]:
    """tau of a guesser that reads the text alone and guesses one-hot, at 1, 2, ... proposals.

    Whoever proposes, the text is the target's. A guess is accepted with the probability that the
    target's token is that guess, so in a text of the target it is accepted where it is its token.
    """
    right = [[run or 0 for run in correct(guesser, one)] for one in contexts]
    tokens = sum(map(len, right))

    def passes(text: list[int], most: int) -> int:
        at = count = 0
        while at < len(text):
            at, count = at + 1 + min(text[at], most), count + 1
        return count

    numbers = range(1, MOST_GAMMA + 1)
    return [tokens / sum(passes(text, most) for text in right) for most in numbers]


def hybrid_numbers(
    texts: Sequence[Record], shares: Sequence[Tensor], costs: Costs
) -> dict[str, int]:
    """The settings of a hybrid with which it is expected to write `texts` in the least time.

    gamma: tokens of a guess. draft_gamma: those that the draft proposes elsewhere, at most as many.
    lookup_min: how many last tokens a guess rests on. shares: of each text, P(its token was an
    accepted proposal of the draft | the token), [T] or [T, K], as
    `theory.acceptance.rounds_of_texts` has them. costs: of the draft's rounds. What the draft reads
    again behind guesses, and looking for these, takes no time here.
    """
    least = range(1, PromptLookup().max_ngram + 1)
    runs = {n: [correct(PromptLookup(min_ngram=n), one) for one in texts] for n in least}
    accepted = [by_position(one, MOST_GAMMA).tolist() for one in shares]

    def seconds(gamma: int, draft_gamma: int, lookup_min: int) -> float:
        counts = [
            mixed_rounds(*text, gamma=gamma, draft_gamma=draft_gamma)
            for text in zip(runs[lookup_min], accepted, strict=True)
        ]
        by_guess, by_draft = (sum(count) for count in zip(*counts, strict=True))
        return by_guess * free(costs).round_at(gamma) + by_draft * costs.round_at(draft_gamma)

    gammas = range(1, MOST_GAMMA + 1)
    triples = [(gamma, own, n) for gamma in gammas for own in range(1, gamma + 1) for n in least]
    best = min(triples, key=lambda triple: seconds(*triple))
    return dict(zip(("gamma", "draft_gamma", "lookup_min"), best, strict=True))


def mixed_rounds(
    runs: Sequence[int | None],
    accepted: Sequence[Sequence[float]],
    *,
    gamma: int,
    draft_gamma: int,
) -> tuple[float, float]:
    """The rounds that a text is expected to take, by guesses where there are any, and by the draft.

    runs: right guesses before each token [M]. accepted: share of each token by the position of the
    proposal in its round [M, K].
    """
    begins = [1.0] + [0.0] * len(runs)  # P(a round begins with token t)
    counts = [0.0, 0.0]
    for t, run in enumerate(runs):
        left = begins[t]  # P(the round has come so far)
        counts[run is None] += left
        if run is not None:
            begins[min(t + min(run, gamma) + 1, len(runs))] += left
            continue
        for at in range(t, min(t + draft_gamma, len(runs))):
            kept = left * accepted[at][at - t]
            begins[at + 1] += left - kept
            left = kept
        begins[min(t + draft_gamma + 1, len(runs))] += left
    return counts[0], counts[1]


def correct(guesser: Proposer, context: Record) -> list[int | None]:
    """How many proposals in a row are the text's own tokens, guessed before each token [M].

    None where there is no guess.
    """
    text = torch.tensor([*context.prompt_ids, *context.output_ids])
    length = torch.arange(len(context.prompt_ids), len(text))
    nothing, params = torch.zeros_like(length), SamplingParams.uniform(len(length))
    view = RoundView(
        group=Group({}, length, None, length >= 0, length < 0, params, MOST_GAMMA, None),
        **text_of(text.expand(len(length), -1), length, None),
        visible=len(text),
        seed=nothing,
        row=nothing,
    )
    guess = guesser.propose(view, MOST_GAMMA)
    behind = torch.cat([text, text.new_full((MOST_GAMMA,), -1)]).unfold(0, MOST_GAMMA, 1)
    run = (guess.tokens == behind[length]).long().cumprod(1).sum(1)
    runs = zip(torch.minimum(run, guess.lengths).tolist(), guess.lengths.tolist(), strict=True)
    return [run if count else None for run, count in runs]


@torch.inference_mode()
def rank_rates(
    target: Adapter, draft: Adapter, contexts: Sequence[Record], config: Config
) -> list[list[float]]:
    """How likely the r-th likeliest token of each place in a round is the target's: [D][R].

    Given that those before it are the text's. D is `Config.proposals`; a draft that reads its own
    proposals like any text has the same rates everywhere.
    """
    most, ranks = max(config.proposals, 1), min(TREE_RANKS, draft.vocab_size)
    sums = torch.zeros(most, ranks, dtype=torch.float64)
    counts = torch.zeros(most, 1, dtype=torch.float64)
    size = config.evaluate.batch_size
    for first in range(0, len(contexts), size):
        chunk = contexts[first : first + size]
        logits, streams = logits_of(target, chunk, draft.reads)
        own = [streams[layer] for layer in draft.reads]
        features = torch.cat(own, -1) if own else None
        rows = proposed_laws(draft, chunk, OWN_LAW, blocks=most, features=features)
        for (law,), positions in zip(
            served_laws(chunk, logits, config.sampling), rows, strict=True
        ):
            for depth, (proposed,) in enumerate(positions):
                likeliest = proposed.topk(ranks).indices
                sums[depth] += law[depth:].gather(1, likeliest).double().sum(0).cpu()
                counts[depth] += len(likeliest)
    rates = sums / counts.clamp(min=1)
    return (rates if is_chained(draft) else rates[:1].expand(most, -1)).tolist()
