"""Every proposer by its name in `decode.proposer`: a new one is a line of `PROPOSERS`.

How to add one: `docs/extending.md`. Each is held against the target's law by enumeration
(`tests/decoding/test_exactness.py`, over this dict).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from draftkit.config import Config, DecodeConfig
from draftkit.decoding.composite import HybridProposer, StagedProposer
from draftkit.decoding.ngrams import CountTable, NgramMemory, PromptLookup, count_table
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer, drafting
from draftkit.decoding.state import RoundView
from draftkit.decoding.trees import Tree, usual_tree
from draftkit.models.adapter import Adapter
from draftkit.theory.verification import SAMPLED_MODES

# What proposers are made of, each of what it needs: the draft model, token ids to count (of the
# training text), and the target, whose vocabulary and device they share.
Draft, Texts = Callable[[], Adapter], Callable[[], Iterable[Sequence[int]]]
Make = Callable[[Draft, Texts, Adapter], Proposer]


class Nothing(Proposer):
    """Proposes no token, whatever gamma is."""

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """`gamma` tokens a row, of which none counts."""
        tokens = view.length.new_zeros(len(view.length), gamma)
        return Proposal(tokens, None, lengths=torch.zeros_like(view.length))


def counted(texts: Texts, target: Adapter, order: int) -> Proposer:
    """A table of counts: of single tokens (order 1), or of pairs (2)."""
    table = count_table(texts(), vocab_size=target.vocab_size, order=order)
    return CountTable(table.to(target.device))


def remembering(_: Draft, texts: Texts, target: Adapter) -> Proposer:
    memory = NgramMemory(device=target.device)
    memory.learn(texts())
    return memory


def staged(draft: Draft, *_: Any) -> Proposer:
    # Token by token, whatever the draft model can do else: it verifies what the guesser says.
    model = draft()
    if model.reads:
        raise ValueError(
            "decode.proposer=staged: a head reads the target's hidden states and verifies nothing: "
            "use sampled, argmax or hybrid"
        )
    return StagedProposer(PromptLookup(), DraftModelProposer(model))


PROPOSERS: dict[str, Make] = {
    "sampled": lambda draft, *_: drafting(draft()),
    "argmax": lambda draft, *_: drafting(draft(), tokens="argmax"),
    "hybrid": lambda draft, *_: HybridProposer(PromptLookup(min_ngram=2), drafting(draft())),
    "staged": staged,
    "unigram": lambda _, texts, target: counted(texts, target, 1),
    "bigram": lambda _, texts, target: counted(texts, target, 2),
    "ngram": remembering,
    "prompt_lookup": lambda *_: PromptLookup(),
    "none": lambda *_: Nothing(),
}


def proposer_of(
    config: Config, draft: Draft, texts: Texts, target: Adapter, tree: Tree | None = None
) -> Proposer:
    """What `decode.proposer` names. tree: the one to propose where `decode.tree` asks for any;
    None: a usual one."""
    decode = config.decode
    made = PROPOSERS[decode.proposer](draft, texts, target)
    if isinstance(made, HybridProposer):
        made.draft_gamma, made.guesser.min_ngram = decode.draft_gamma, decode.lookup_min
    if decode.tree > 0:
        made.tree = tree or usual_tree(decode.tree, config.proposals)
    return made


def served_mode(decode: DecodeConfig) -> str | None:
    """The mode of `theory.acceptance.MODES` in which a draft model's proposals are accepted.

    None where there may be no guess, one that no draft model made, or several, and where typical
    ones are accepted: how often the first proposal of a round was accepted stands for it.
    """
    if decode.tree > 0 or decode.verification not in SAMPLED_MODES:
        return None
    sampled = SAMPLED_MODES[decode.verification]
    modes = {"sampled": sampled, "staged": sampled, "argmax": "alpha_greedy_draft"}
    return modes.get(decode.proposer)
