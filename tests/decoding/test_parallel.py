"""A parallel draft proposes as it was trained, each token by the law of its own mask.

By enumeration over a table whose laws after masks have nothing to do with those after tokens; and,
on models of many architectures, against the logits that training makes of the same text in one row.
The joint law, which knows nothing of training, is demanded of it in `test_exactness.py`.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding import proposers
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.gamma import AdaptiveGamma
from draftkit.decoding.generation import DRAFT_ID, finish, make_requests
from draftkit.decoding.proposers import Proposal, Proposer
from draftkit.models import parallel
from draftkit.models.adapter import CausalAdapter
from draftkit.models.parallel import Parallel, declare
from draftkit.theory import noise
from tests import tiny
from tests.decoding.checks import (
    PROMPT,
    TOLERANCE,
    VOCAB_SIZE,
    Measured,
    Parts,
    Setting,
    measured,
    served,
)
from tests.tabular import TabularAdapter, with_masks
from tests.theory.laws import LawBroken, sequences
from tests.theory.mutants import mutate

PLAIN = SamplingConfig()


def made(draft: TabularAdapter, module: Any = proposers) -> Proposer:
    return module.ParallelProposer(with_masks(draft))


def check_masked_law(result: Measured) -> None:
    """Proposals are drawn each from its own law, which knows the text before the round alone."""
    setting, cells = result.setting, result.cells
    draft, mask = with_masks(setting.draft()), VOCAB_SIZE
    law: dict[tuple[int, ...], float] = {}
    blocks = cells.outcome.draft_tokens.tolist()
    for state, mass, block in zip(cells.state.tolist(), cells.mass.tolist(), blocks, strict=True):
        law[state, *block] = law.get((state, *block), 0.0) + mass
    for which, sampling in enumerate(setting.samplings):
        for text in setting.prefixes:
            own = [
                served(draft, torch.tensor([[*PROMPT, *text, *[mask] * place]]), sampling)[0]
                for place in range(setting.gamma)
            ]
            number = result.number(text, which)
            for block in sequences(VOCAB_SIZE, setting.gamma).tolist():
                expected = 1.0
                for place, token in enumerate(block):
                    expected *= float(own[place][token])
                if abs(expected - law.get((number, *block), 0.0)) > TOLERANCE:
                    raise LawBroken(f"after {text}, {block} is proposed with another probability")


def test_every_proposal_has_the_law_of_the_text_before_its_round() -> None:
    check_masked_law(measured(Parts(proposer=made), Setting(gamma=3, tokens=3)))


# Training and decoding see the same

MASK, BLOCKS, PROMPTS = 250, 4, ([5, 9, 11, 5, 9, 11, 7], [3, 4])


def model_of(name: str, dtype: torch.dtype = torch.float64) -> CausalAdapter:
    model = tiny.model(name, seed=3).to(dtype)
    declare(model.config, Parallel(MASK, BLOCKS))
    return CausalAdapter(model, vocab_size=tiny.VOCAB_SIZE)


class Listening(Proposer):
    """What another proposer says, with the text that it said it of."""

    has_cache = True

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.said: list[tuple[list[int], Tensor]] = []

    def __getattribute__(self, name: str) -> Any:
        own = {"propose", "pick", "proposer", "said", "has_cache", "signature"}
        if name in own or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(object.__getattribute__(self, "proposer"), name)

    def propose(self, view: Any, gamma: int) -> Proposal:
        proposal = self.proposer.propose(view, gamma)
        assert proposal.draft_probs is not None
        for row, length in enumerate(view.length.tolist()):
            self.said.append((view.tokens[row, :length].tolist(), proposal.draft_probs[row]))
        return proposal


class Wavering(AdaptiveGamma):
    """4, 1, 0, 3, ...: fewer proposals, and rounds without the drafter, between others."""

    def __init__(self) -> None:
        self.turn = 0

    def choose(self, *, batch: int, most: int) -> int:
        return (4, 1, 0, 3)[self.turn % 4]

    def observe(self, **_: Any) -> None:
        self.turn += 1


def trained(draft: CausalAdapter, text: list[int], blocks: int, rows: Any = parallel) -> Tensor:
    """The probabilities [K, V] of the chain behind `text`, as training makes them in one row.

    All chains of the text are in the row, and what comes after the text as well.
    """
    tokens = torch.tensor([[*text, *[17] * blocks]])
    predicting = torch.ones_like(tokens, dtype=torch.bool)
    predicting[:, -1] = False
    made = rows.chains(tokens, predicting, predicting * blocks, token=MASK)
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
def largest_difference(
    draft: CausalAdapter,
    module: Any = proposers,
    rows: Any = parallel,
    policy: AdaptiveGamma | None = None,
) -> float:
    """Between the q of decoded rounds and those of training, over their largest logit."""
    target = tiny.adapter("llama", seed=4, dtype=draft.dtype)
    listening = Listening(module.ParallelProposer(draft))
    requests = make_requests(PROMPTS, max_new_tokens=24, sampling=PLAIN, gamma=BLOCKS, seed=1)
    decoder = Decoder(target, slots=2, capacity=64, noise_function=mostly_accepting)
    decoder.gamma_policy = policy
    decoder.attach(DRAFT_ID, listening)
    finish(decoder, [replace(request, adapts=policy is not None) for request in requests])
    assert len(listening.said) > 8
    return max(
        float((probs - trained(draft, text, len(probs), rows)).abs().max())
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
    assert largest_difference(model_of("llama"), policy=Wavering()) < 1e-9


# name: (module, what is replaced in it, by what)
EDITS: dict[str, tuple[ModuleType, str, str]] = {
    "masks of the last round stay": (
        proposers,
        "text = view.group.most + 1  # ",
        "text = 2  # ",
    ),
    "a mask sees those of other chains": (
        parallel,
        "torch.where(is_token, key <= query, key == query)",
        "torch.where(is_token, key <= query, key <= query)",
    ),
    "masks stand where their chain begins": (
        parallel,
        "joined(begin.expand_as(tokens), at)",
        "joined(begin.expand_as(tokens), at - block)",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_training_parity_sees(name: str) -> None:
    module, old, new = EDITS[name]
    mutant = mutate(module, old, new)
    told = {"module": mutant} if module is proposers else {"rows": mutant}
    assert largest_difference(model_of("llama"), **told) > 1e-6
