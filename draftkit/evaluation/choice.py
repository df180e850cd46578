"""How many proposals a round pay most, found on other prompts than those that are timed.

tau at every number follows from texts that the target sampled: for a drafter from the scores of
both models, for a guesser of one-hot proposals by letting it guess at every token of them. With
measured costs of a round that gives the speed-up of every number from one measurement. For a tree,
whose nodes are chosen, `rank_rates` tells from the same scores which are likely.

Shapes: M tokens of an answer, K proposals, D depths, R ranks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from draftkit.config import Config
from draftkit.data.rollouts import Record
from draftkit.decoding.catalogue import served_mode
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import Proposer
from draftkit.decoding.state import Group, RoundView, text_of
from draftkit.evaluation.alpha import PromptTotals
from draftkit.evaluation.laws import OWN_LAW, is_chained, logits_of, proposed_laws, served_laws
from draftkit.evaluation.walltime import MOST_GAMMA
from draftkit.models.adapter import Adapter
from draftkit.theory.acceptance import Rate
from draftkit.theory.speedup import Costs, by_gamma, factors, largest
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
    ways: Mapping[str, Callable[[], Proposer]],
    costs: Mapping[str, Costs],
    scored: Mapping[str, PromptTotals],
    texts: Sequence[Record],
    config: Config,
) -> dict[str, int]:
    """The number of proposals, at least 1, of each way that pays most on `texts`.

    costs, scored: of each draft. The hybrid has the number of its draft, the last one. What counts
    the training text keeps `Config.proposals`.
    """
    mode = served_mode(config.decode) or "alpha"
    gammas = dict.fromkeys(ways, config.proposals)
    for name, make in ways.items():
        guesser, draft = make(), name if name in scored else [*scored][-1]
        if isinstance(guesser, PromptLookup):
            free = replace(costs[draft], cost_ratio=0.0, draft_units={})  # guesses cost nothing
            gained = by_gamma(guessed_lengths(guesser, texts), free)
        elif config.decode.has_drafter:
            gained = factors_of(taus_of(scored[draft], mode), math.nan, costs[draft])
        else:
            continue
        gammas[name] = 1 + largest(gained[1:])[0]
    return gammas


def guessed_lengths(guesser: Proposer, contexts: Sequence[Record]) -> list[float]:
    """tau of a guesser that reads the text alone and guesses one-hot, at 1, 2, ... proposals.

    Whoever proposes, the text is the target's. A guess is accepted with the probability that the
    target's token is that guess, so in a text of the target it is accepted where it is its token.
    """
    right = [correct(guesser, one) for one in contexts]
    tokens = sum(map(len, right))

    def passes(text: list[int], most: int) -> int:
        at = count = 0
        while at < len(text):
            at, count = at + 1 + min(text[at], most), count + 1
        return count

    numbers = range(1, MOST_GAMMA + 1)
    return [tokens / sum(passes(text, most) for text in right) for most in numbers]


def correct(guesser: Proposer, context: Record) -> list[int]:
    """How many proposals in a row are the text's own tokens, guessed before each token [M]."""
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
    return torch.minimum(run, guess.lengths).tolist()


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
