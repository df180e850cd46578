"""A parallel draft proposes as it was trained, each token by the law of its own mask.

By enumeration over a table whose laws after masks have nothing to do with those after tokens; and,
on models of many architectures, against the logits that training makes of the same text in one row.
The joint law, which knows nothing of training, is demanded of it in `test_exactness.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.generation import DRAFT_ID, finish, make_requests
from draftkit.decoding.proposers import Decide, ParallelProposer, Proposal, undecided
from draftkit.decoding.state import RoundView
from draftkit.models.adapter import CausalAdapter
from draftkit.models.parallel import Parallel, chains, declare
from draftkit.theory import noise
from tests import tiny
from tests.decoding.checks import (
    PLAIN,
    PROMPT,
    VOCAB_SIZE,
    Parts,
    Setting,
    Text,
    check_law,
    served,
)
from tests.decoding.driving import Schedule
from tests.decoding.mutants import SHIPPED, parallel
from tests.tabular import with_masks


def masked(setting: Setting) -> Callable[[int, Text, Text], float]:
    """The law of proposals, each of which knows the text before the round alone."""
    draft = with_masks(setting.draft())

    def law(which: int, text: Text, block: Text) -> float:
        own = 1.0
        for place, token in enumerate(block):
            before = torch.tensor([[*PROMPT, *text, *[VOCAB_SIZE] * place]])
            own *= float(served(draft, before, setting.samplings[which])[0, token])
        return own

    return law


def test_every_proposal_has_the_law_of_the_text_before_its_round() -> None:
    check_law(Parts(proposer=partial(parallel, SHIPPED), proposals=masked), Setting(gamma=3))


# Training and decoding see the same

MASK, BLOCKS, PROMPTS = 250, 4, ([5, 9, 11, 5, 9, 11, 7], [3, 4])


def model_of(name: str, dtype: torch.dtype = torch.float64) -> CausalAdapter:
    model = tiny.model(name, seed=3).to(dtype)
    declare(model.config, Parallel(MASK, BLOCKS))
    return CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE)


Said = list[tuple[list[int], Tensor]]  # texts, and the laws of what was proposed behind them


class Listening(ParallelProposer):
    """Remembers what it said."""

    def __init__(self, draft: CausalAdapter) -> None:
        super().__init__(draft)
        self.said: Said = []

    def propose(self, view: RoundView, gamma: int, decide: Decide = undecided) -> Proposal:
        proposal = super().propose(view, gamma, decide)
        assert proposal.draft_probs is not None
        for row, length in enumerate(view.length.tolist()):
            self.said.append((view.tokens[row, :length].tolist(), proposal.draft_probs[row]))
        return proposal


def trained(draft: CausalAdapter, text: list[int], blocks: int) -> Tensor:
    """The probabilities [K, V] of the chain behind `text`, as training makes them in one row.

    All chains of the text are in the row, and what comes after the text as well.
    """
    tokens = torch.tensor([[*text, *[17] * blocks]])
    predicting = torch.ones_like(tokens, dtype=torch.bool)
    predicting[:, -1] = False
    made = chains(tokens, predicting, predicting * blocks, token=MASK)
    states = draft.states(made.tokens, made.keep, made.packing)
    logits = states if draft.head is None else draft.head(states)
    own = made.predicted - made.blocks == len(text) - 1
    assert made.blocks[own].tolist() == list(range(blocks))
    return logits[own].softmax(-1)


def mostly_accepting(**key: Any) -> Tensor:
    """Noise under which most tests are passed, whatever the pair: the text is the drafts' own."""
    drawn = noise.uniform(**key)
    return torch.where(drawn < 0.7, 0.0, drawn) if key["purpose"] == noise.ACCEPT else drawn


@torch.no_grad()
def largest_difference(draft: CausalAdapter, policy: AdaptiveGamma | None = None) -> float:
    """Between the q of decoded rounds and those of training, over their largest logit."""
    target = tiny.adapter("llama", seed=4, dtype=draft.dtype)
    listening = Listening(draft)
    requests = make_requests(PROMPTS, max_new_tokens=24, sampling=PLAIN, gamma=BLOCKS, seed=1)
    decoder = Decoder(target, slots=2, capacity=64, noise_function=mostly_accepting)
    decoder.gamma_policy = policy
    decoder.attach(DRAFT_ID, listening)
    finish(decoder, [replace(request, adapts=policy is not None) for request in requests])
    assert len(listening.said) > 8
    return max(
        float((probs - trained(draft, text, len(probs))).abs().max())
        for text, probs in listening.said
    )


@pytest.mark.parametrize(
    ("name", "most"),
    [(name, 1e-9) for name in ("llama", "gpt2", "gpt_neox", "qwen3", "mistral")]
    + [("gemma2", 1e-5)],  # whose norms are taken in single precision
)
def test_training_logits_are_those_of_the_proposer(name: str, most: float) -> None:
    assert largest_difference(model_of(name)) < most


def test_training_logits_are_those_of_the_proposer_in_single_precision() -> None:
    assert largest_difference(model_of("llama", torch.float32)) < 1e-4


def test_rounds_of_fewer_proposals_and_of_none_leave_no_trace() -> None:
    assert largest_difference(model_of("llama"), policy=Schedule([4, 1, 0, 3])) < 1e-9
