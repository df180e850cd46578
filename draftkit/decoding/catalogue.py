"""Every proposer by its name in `decode.proposer`: a new one is a line of `PROPOSERS`.

How to add one: `docs/adding.md`. Each is held against the target's law by enumeration
(`tests/decoding/test_exactness.py`, over this dict).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from draftkit.decoding.composite import HybridProposer, StagedProposer
from draftkit.decoding.ngrams import CountTable, NgramMemory, PromptLookup, count_table
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer, drafting
from draftkit.decoding.state import RoundView
from draftkit.models.adapter import Adapter
from draftkit.theory.verification import SAMPLED_MODES


@dataclass(frozen=True)
class Material:
    """What proposers are made of; each takes what it needs, and nothing else is made."""

    draft: Callable[[], Adapter]  # the draft model
    texts: Callable[[], Iterable[Sequence[int]]]  # token ids to count: the training text
    vocab_size: int
    device: torch.device

    def model(self, tokens: str = "sampled") -> DraftModelProposer:
        """The draft model, whose `tokens` are sampled as served, or its argmax."""
        return drafting(self.draft(), tokens=tokens)

    def table(self, order: int) -> CountTable:
        """The counts of single tokens (order 1) or of pairs (2)."""
        table = count_table(self.texts(), vocab_size=self.vocab_size, order=order)
        return CountTable(table.to(self.device))

    def memory(self) -> NgramMemory:
        """What followed what."""
        memory = NgramMemory(device=self.device)
        memory.learn(self.texts())
        return memory


class Nothing(Proposer):
    """Proposes no token, whatever gamma is."""

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        """`gamma` tokens a row, of which none counts."""
        tokens = view.length.new_zeros(len(view.length), gamma)
        return Proposal(tokens, None, lengths=torch.zeros_like(view.length))


PROPOSERS: dict[str, Callable[[Material], Proposer]] = {
    "sampled": lambda material: material.model(),
    "argmax": lambda material: material.model("argmax"),
    # A guess must rest on three tokens where a model could propose instead.
    "hybrid": lambda material: HybridProposer(PromptLookup(min_ngram=3), material.model()),
    # Token by token, whatever the draft model can do else: it verifies what the guesser says.
    "staged": lambda material: StagedProposer(PromptLookup(), DraftModelProposer(material.draft())),
    "unigram": lambda material: material.table(1),
    "bigram": lambda material: material.table(2),
    "ngram": lambda material: material.memory(),
    "prompt_lookup": lambda _: PromptLookup(),
    "none": lambda _: Nothing(),
}


def served_mode(proposer: str, verification: str) -> str | None:
    """The mode of `theory.acceptance.MODES` in which a draft model's proposals are accepted.

    None where there may be no guess, or one that no draft model made: how often the first proposal
    of a round was made and accepted stands for it.
    """
    sampled = SAMPLED_MODES[verification]
    return {"sampled": sampled, "staged": sampled, "argmax": "alpha_greedy_draft"}.get(proposer)
