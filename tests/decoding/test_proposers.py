"""Which tokens a draft proposes, in which precision, and what a new proposer must define.

That proposals have the law that is stated, of the text that the rows have, is enumerated in
`test_exactness.py`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer
from draftkit.decoding.state import RoundView
from draftkit.models.cache import SlotCache
from tests import tiny
from tests.decoding.driving import SAMPLINGS, TEXTS, own_laws, ready, view_of
from tests.tabular import random_adapter

VOCAB_SIZE = 8


@pytest.mark.parametrize("name", ["table", "memory"])
def test_a_version_whose_weights_do_not_fit_never_comes_into_force(name: str) -> None:
    proposer = ready(DraftModelProposer(random_adapter(VOCAB_SIZE, 1), version="v1"))
    view = view_of(2)
    before = proposer.propose(view, 2)
    weights = random_adapter(VOCAB_SIZE, 2).state_dict()
    weights[name] = weights[name][:-1]
    with pytest.raises(ValueError, match=name):
        proposer.swap(weights, "v2")
    assert proposer.version == "v1"
    after = proposer.propose(view, 2)
    torch.testing.assert_close(after.draft_probs, before.draft_probs, rtol=0, atol=0)


def test_a_draft_in_half_precision_is_sampled_from_a_law_in_single_precision() -> None:
    adapter = tiny.adapter(dtype=torch.bfloat16)
    view = replace(view_of(1, samplings=SAMPLINGS[:1]), seen=None)
    proposer = DraftModelProposer(adapter)
    proposer.allocate(4, 32)
    with torch.no_grad():
        (law,) = proposer.propose(view, 1).draft_probs.unbind(1)  # pyrefly: ignore
        logits = adapter.step(
            torch.tensor([TEXTS[1]]), positions=torch.tensor([[0]]), cache=SlotCache(1, 8)
        )
    assert law.dtype == torch.float32
    # A softmax in bfloat16 would be off by more than 1e-3 at the largest probabilities.
    torch.testing.assert_close(
        law[1].double(), logits[0, 0].double().softmax(-1), atol=1e-6, rtol=0
    )


def test_an_argmax_draft_proposes_the_most_likely_token_under_penalties_and_states_no_law() -> None:
    model = random_adapter(VOCAB_SIZE, 1)
    proposer = ready(DraftModelProposer(model, tokens="argmax"))
    proposal = proposer.propose(view_of(4), 4)
    assert proposal.draft_probs is None
    assert proposal.lengths.tolist() == [4] * 4
    greedy = [replace(sampling, temperature=0.0) for sampling in SAMPLINGS]
    own = torch.stack(own_laws(model, proposal, greedy))
    assert torch.equal(proposal.tokens, own.argmax(-1))
    unpunished = torch.stack(own_laws(model, proposal, [SamplingConfig(temperature=0.0)] * 4))
    assert not torch.equal(proposal.tokens, unpunished.argmax(-1))


def test_a_draft_whose_rows_are_all_greedy_is_an_argmax_draft() -> None:
    model = random_adapter(VOCAB_SIZE, 1)
    view = view_of(3, samplings=[SamplingConfig(temperature=0.0, top_k=2)])
    sampled = ready(DraftModelProposer(model)).propose(view, 3)
    argmax = ready(DraftModelProposer(model, tokens="argmax")).propose(view, 3)
    assert sampled.draft_probs is None
    assert torch.equal(sampled.tokens, argmax.tokens)


class Repeats(Proposer):
    """All that a new proposer must define; `times` and `table` are settings of its own."""

    def __init__(self, times: int = 1, table: Tensor | None = None) -> None:
        self.times = times
        self.table = torch.zeros(8) if table is None else table

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        tokens = view.last_two[:, 1:].expand(-1, gamma)
        return Proposal(tokens, None, torch.full_like(view.length, min(self.times, gamma)))


def test_a_proposer_of_the_text_defines_its_proposals_alone() -> None:
    proposer, target = Repeats(2), random_adapter(VOCAB_SIZE, 1)
    requests = make_requests(TEXTS, max_new_tokens=8, sampling=SAMPLINGS[2], gamma=3)
    plain = make_requests(TEXTS, max_new_tokens=8, sampling=SAMPLINGS[2])
    answers, expected = (
        decode(target, [*some], eos_token_ids=(), batch_size=4, proposer=who)
        for some, who in ((requests, proposer), (plain, None))
    )
    assert [a.output_ids for a in answers] == [e.output_ids for e in expected]
    with pytest.raises(ValueError, match="Repeats has no weights to swap"):
        proposer.swap({}, "v2")


def test_every_attribute_of_a_proposer_is_in_its_signature_but_the_contents_of_tensors() -> None:
    same = Repeats(1, torch.ones(8))
    same.version = "v2"
    assert Repeats().signature == same.signature
    for other in (Repeats(2), Repeats(1, torch.ones(9)), Repeats(1, torch.ones(8).double())):
        assert other.signature != same.signature
