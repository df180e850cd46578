"""A proposer returns the law that it drew from, of the text that the rows really have."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.generation import decode, make_requests
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer
from draftkit.decoding.state import RoundView
from draftkit.models.adapter import CausalAdapter
from draftkit.models.cache import SlotCache
from draftkit.theory.noise import DRAFT, sample, uniform
from tests import tiny
from tests.decoding.checks import served
from tests.decoding.driving import view_of
from tests.tabular import TabularAdapter, random_adapter

SAMPLINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=0.6, top_k=3),
    SamplingConfig(temperature=0.0),
    SamplingConfig(top_p=0.7, repetition_penalty=1.3),
]
TEXTS = [[3, 1, 4, 1], [5], [2, 6, 5, 3, 5, 0], [0, 7]]
VOCAB_SIZE = 8


def proposer_with(
    model: TabularAdapter, texts: list[list[int]], tokens: str = "sampled"
) -> DraftModelProposer:
    """A proposer whose cache holds all of each text but its last token."""
    proposer = DraftModelProposer(model, version="v1", tokens=tokens)
    proposer.allocate(len(texts), 32)
    for row, text in enumerate(texts):
        if len(text) > 1:
            proposer.prefill(
                torch.tensor([text[:-1]]),
                positions=torch.arange(len(text) - 1)[None],
                rows=torch.tensor([row]),
                visible=len(text),
            )
    return proposer


def own_probs(
    model: TabularAdapter, proposal: Proposal, samplings: Sequence[SamplingConfig] = SAMPLINGS
) -> Tensor:
    """The served law of `model` before each proposal, by the processors of transformers."""
    rows = []
    for text, sampling, tokens in zip(TEXTS, samplings, proposal.tokens.tolist(), strict=True):
        texts = [torch.tensor([text + tokens[:i]]) for i in range(len(tokens))]
        rows.append(torch.cat([served(model, before, sampling) for before in texts]))
    return torch.stack(rows)


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_the_law_returned_is_the_served_law_of_the_text_and_the_tokens_are_drawn_from_it(
    gamma: int,
) -> None:
    model = random_adapter(VOCAB_SIZE, 1)
    view = view_of(TEXTS, SAMPLINGS, gamma)
    proposal = proposer_with(model, TEXTS).propose(view, gamma)
    assert proposal.draft_probs is not None
    assert proposal.tokens.shape == (4, gamma)
    assert proposal.lengths.tolist() == [gamma] * 4
    torch.testing.assert_close(proposal.draft_probs, own_probs(model, proposal))
    drawn = uniform(
        seed=torch.full((4,), 11),
        row=torch.arange(4),
        length=torch.tensor([len(text) for text in TEXTS]),
        count=gamma,
        purpose=DRAFT,
    )
    for i in range(gamma):
        token = sample(probs=proposal.draft_probs[:, i], uniform=drawn[:, i])
        assert torch.equal(proposal.tokens[:, i], token)


def test_a_slot_that_lacks_the_last_proposal_is_filled_by_the_next_round() -> None:
    """After full acceptance the cache ends two tokens before the text."""
    model = random_adapter(VOCAB_SIZE, 1)
    short = [text[:-1] if len(text) > 1 else text for text in TEXTS]
    view = view_of(TEXTS, SAMPLINGS, 2)
    proposal = proposer_with(model, short).propose(view, 2)
    torch.testing.assert_close(proposal.draft_probs, own_probs(model, proposal))


def test_what_lies_behind_the_text_in_the_cache_is_not_seen() -> None:
    model = random_adapter(VOCAB_SIZE, 1)
    longer = [[*text, 6, 2, 7, 7] for text in TEXTS]
    proposer = proposer_with(model, longer)
    proposal = proposer.propose(view_of(TEXTS, SAMPLINGS, 3), 3)
    torch.testing.assert_close(proposal.draft_probs, own_probs(model, proposal))


def test_new_weights_and_their_version_come_into_force_together() -> None:
    model, new = random_adapter(VOCAB_SIZE, 1), random_adapter(VOCAB_SIZE, 2)
    proposer = proposer_with(model, TEXTS)
    view = view_of(TEXTS, SAMPLINGS, 1)
    before = proposer.propose(view, 1)
    proposer.swap(new.state_dict(), "v2")
    after = proposer.propose(view, 1)
    assert proposer.version == "v2"
    assert before.draft_probs is not None
    assert after.draft_probs is not None
    assert (after.draft_probs - before.draft_probs).abs().amax() > 0.1
    fresh = proposer_with(model, TEXTS).propose(view, 1)
    torch.testing.assert_close(fresh.draft_probs, own_probs(new, fresh))


@pytest.mark.parametrize("name", ["table", "memory"])
def test_a_version_whose_weights_do_not_fit_never_comes_into_force(name: str) -> None:
    proposer = proposer_with(random_adapter(VOCAB_SIZE, 1), TEXTS)
    view = view_of(TEXTS, SAMPLINGS, 2)
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
    view = replace(view_of(TEXTS, SAMPLINGS[:1] * 4, 1), seen=None)
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
    proposal = proposer_with(model, TEXTS, "argmax").propose(view_of(TEXTS, SAMPLINGS, 4), 4)
    assert proposal.draft_probs is None
    assert proposal.lengths.tolist() == [4] * 4
    greedy = [replace(sampling, temperature=0.0) for sampling in SAMPLINGS]
    own = own_probs(model, proposal, greedy)
    assert torch.equal(proposal.tokens, own.argmax(-1))
    unpunished = own_probs(model, proposal, [SamplingConfig(temperature=0.0)] * 4)
    assert not torch.equal(proposal.tokens, unpunished.argmax(-1))


def test_a_draft_whose_rows_are_all_greedy_is_an_argmax_draft() -> None:
    model = random_adapter(VOCAB_SIZE, 1)
    view = view_of(TEXTS, [SamplingConfig(temperature=0.0, top_k=2)] * 4, 3)
    sampled = proposer_with(model, TEXTS).propose(view, 3)
    argmax = proposer_with(model, TEXTS, "argmax").propose(view, 3)
    assert sampled.draft_probs is None
    assert torch.equal(sampled.tokens, argmax.tokens)


def test_how_tokens_are_chosen_is_part_of_a_signature() -> None:
    model = random_adapter(VOCAB_SIZE, 1)
    sampled, argmax = (DraftModelProposer(model, tokens=name) for name in ("sampled", "argmax"))
    assert sampled.signature != argmax.signature
    assert sampled.signature == DraftModelProposer(random_adapter(VOCAB_SIZE, 2)).signature


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
    assert not proposer.has_cache
    assert proposer.pick(view_of(TEXTS, SAMPLINGS, 3)) is proposer
    assert proposer.weights() == {}
    with pytest.raises(ValueError, match="Repeats has no weights to swap"):
        proposer.swap({}, "v2")
    assert proposer.version == ""


def test_every_attribute_of_a_proposer_is_in_its_signature_but_the_contents_of_tensors() -> None:
    same = Repeats(1, torch.ones(8))
    same.version = "v2"
    assert Repeats().signature == same.signature
    for other in (Repeats(2), Repeats(1, torch.ones(9)), Repeats(1, torch.ones(8).double())):
        assert other.signature != same.signature


def test_the_context_of_a_proposer_is_its_models() -> None:
    adapter: CausalAdapter = tiny.adapter(max_position_embeddings=48)
    assert DraftModelProposer(adapter).max_positions == 48
