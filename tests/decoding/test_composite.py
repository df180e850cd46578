"""Two proposers in one: who proposes for which row, and from which law."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from draftkit.config import SamplingConfig
from draftkit.decoding.composite import HybridProposer, StagedProposer
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.ngrams import CountTable, NgramMemory, PromptLookup
from draftkit.decoding.proposers import DraftModelProposer, Proposal, Proposer
from draftkit.decoding.state import Request, RoundView
from tests.decoding.driving import (
    DRAFT,
    TEXTS,
    Answer,
    assert_same,
    drive,
    own_laws,
    ready,
    request,
    view_of,
)
from tests.tabular import TabularAdapter, random_adapter, relative


def model_of(seed: int = 1) -> TabularAdapter:
    return random_adapter(8, seed)


def hybrid_of(draft: TabularAdapter, tokens: str = "sampled") -> HybridProposer:
    return HybridProposer(PromptLookup(min_ngram=2), DraftModelProposer(draft, tokens=tokens))


def check_own_law(draft: TabularAdapter, proposal: Proposal, row: int) -> None:
    """All proposals of the row come with the served law of `draft`."""
    assert proposal.draft_probs is not None
    count, own = int(proposal.lengths[row]), own_laws(draft, proposal)[row]
    torch.testing.assert_close(proposal.draft_probs[row, :count], own[:count])


# Hybrid


def test_rows_that_repeat_themselves_are_the_guessers_and_the_others_the_models() -> None:
    proposal = ready(hybrid_of(model_of())).propose(view_of(3), 3)
    assert proposal.tokens[[0, 3]].tolist() == [[4, 3, 1], [0, 7, 0]]
    one_hot = torch.nn.functional.one_hot(proposal.tokens[[0, 3]], 8).double()
    torch.testing.assert_close(proposal.draft_probs[[0, 3]], one_hot, rtol=0, atol=0)
    for row in (1, 2):
        check_own_law(model_of(), proposal, row)
    assert proposal.lengths.tolist() == [3] * 4


def test_the_rows_of_the_model_are_drawn_as_by_the_model_alone() -> None:
    view = view_of(3)
    alone = ready(DraftModelProposer(model_of())).propose(view, 3)
    proposal = ready(hybrid_of(model_of())).propose(view, 3)
    assert torch.equal(proposal.tokens[1:3], alone.tokens[1:3])


def test_a_guess_shorter_than_gamma_stays_short() -> None:
    memory = NgramMemory(max_ngram=2)
    memory.learn([[3, 1, 6, 2]])
    proposer = HybridProposer(memory, DraftModelProposer(model_of()))
    proposal = ready(proposer).propose(view_of(4), 4)
    assert proposal.lengths.tolist() == [2, 4, 4, 4]
    assert proposal.tokens[0, :2].tolist() == [6, 2]


def test_a_hybrid_with_an_argmax_draft_states_no_law() -> None:
    view = view_of(3)
    proposal = ready(hybrid_of(model_of(), "argmax")).propose(view, 3)
    alone = ready(DraftModelProposer(model_of(), tokens="argmax")).propose(view, 3)
    assert proposal.draft_probs is None
    assert proposal.tokens[[0, 3]].tolist() == [[4, 3, 1], [0, 7, 0]]
    assert torch.equal(proposal.tokens[1:3], alone.tokens[1:3])


def test_fillers_have_no_say_in_what_is_picked() -> None:
    view = view_of(3)
    view.group.active[[1, 2]] = False
    part, gamma = hybrid_of(model_of()).pick(view)
    assert isinstance(part, PromptLookup)
    assert gamma == 3


def test_a_hybrid_refuses_guesses_that_are_drawn() -> None:
    hybrid = HybridProposer(CountTable(torch.zeros(8)), DraftModelProposer(model_of()))
    with pytest.raises(AssertionError, match="one-hot"):
        ready(hybrid).propose(view_of(3), 3)


# Staged


@dataclass
class Guess(Proposer):
    """A guesser that knows the answers: what comes at each place of a row, -1 for no idea."""

    answers: Tensor  # [B, L]

    def propose(self, view: RoundView, gamma: int) -> Proposal:
        places = view.length[:, None] + torch.arange(gamma)
        tokens = self.answers.gather(1, places)
        known = (tokens >= 0).long().cumprod(1)
        return Proposal(tokens * known, None, lengths=known.sum(1))


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("guesser", [PromptLookup(), CountTable(torch.zeros(8).double())])
def test_staged_proposals_come_with_the_models_served_law(guesser: Proposer, gamma: int) -> None:
    proposer = ready(StagedProposer(guesser, DraftModelProposer(model_of()), width=2, passes=3))
    proposal = proposer.propose(view_of(gamma), gamma)
    assert proposal.tokens.shape == (4, gamma)
    for row in range(4):
        assert min(3, gamma) <= proposal.lengths[row] <= gamma
        check_own_law(model_of(), proposal, row)


def argmax_answers(gamma: int) -> Tensor:
    """The texts, then the argmax of the draft, under each row's penalty."""
    view = view_of(gamma)
    drafted = ready(DraftModelProposer(model_of(), tokens="argmax")).propose(view, gamma).tokens
    answers = torch.full((4, 64), -1)
    return answers.scatter(1, view.length[:, None] + torch.arange(gamma), drafted)


def test_few_passes_yield_all_proposals_where_every_guess_is_right() -> None:
    staged = StagedProposer(
        Guess(argmax_answers(8)), DraftModelProposer(model_of(), tokens="argmax"), width=3, passes=2
    )
    proposal = ready(staged).propose(view_of(8), 8)
    assert proposal.draft_probs is None
    assert proposal.lengths.tolist() == [8] * 4
    places = torch.tensor([[len(text)] for text in TEXTS]) + torch.arange(8)
    assert torch.equal(proposal.tokens, argmax_answers(8).gather(1, places))


def test_a_pass_without_a_good_guess_yields_one_token() -> None:
    answers = argmax_answers(8)
    wrong = torch.where(answers >= 0, (answers + 1) % 8, answers)
    for guess in (wrong, torch.full_like(answers, -1)):
        staged = StagedProposer(
            Guess(guess), DraftModelProposer(model_of(), tokens="argmax"), width=3, passes=2
        )
        proposal = ready(staged).propose(view_of(8), 8)
        places = torch.tensor([[len(text)] for text in TEXTS]) + torch.arange(2)
        assert proposal.lengths.tolist() == [2] * 4
        assert torch.equal(proposal.tokens[:, :2], answers.gather(1, places))


# Context


def test_a_composite_has_the_context_of_its_model() -> None:
    model = DraftModelProposer(random_adapter(8, 1, max_positions=48))
    assert HybridProposer(PromptLookup(), model).max_positions == 48
    assert StagedProposer(PromptLookup(), model).max_positions == 48


# Over many rounds


WARM = SamplingConfig(temperature=0.7)


def requests_of(count: int) -> list[Request]:
    """Prompts of different lengths; every second text repeats itself."""
    prompts = [[row % 8, 1, 2] * 3 if row % 2 else [row % 8, 5, (row + 3) % 8] for row in range(4)]
    return [
        request(
            prompts[row % 4][: 9 - row % 3],
            new=40 - 7 * (row % 3),
            gamma=3,
            sampling=WARM,
            row=row,
        )
        for row in range(count)
    ]


def answers_of(proposer: Proposer, requests: list[Request], slots: int) -> list[Answer]:
    decoder = Decoder(relative(random_adapter(8, 1), 2, spread=0.5), slots=slots, capacity=72)
    decoder.attach(DRAFT, proposer)
    return drive(decoder, requests)


class Whole(HybridProposer):
    """Never leaves a part out."""

    def pick(self, view: RoundView) -> tuple[Proposer, int]:
        return self, view.group.gamma


class Noted(HybridProposer):
    """Remembers what it picked."""

    def pick(self, view: RoundView) -> tuple[Proposer, int]:
        part, gamma = super().pick(view)
        self.picks.append(type(part).__name__)
        return part, gamma


def hybrid_as(kind: Any, draft_gamma: int | None = None) -> Any:
    model = DraftModelProposer(random_adapter(8, 1))
    made = kind(PromptLookup(min_ngram=2), model, draft_gamma=draft_gamma)
    made.picks = []
    return made


@pytest.mark.parametrize("draft_gamma", [None, 1, 2])
@pytest.mark.parametrize("slots", [1, 2])
def test_rounds_without_the_model_are_those_of_the_whole_and_the_model_catches_up(
    slots: int, draft_gamma: int | None
) -> None:
    noted = hybrid_as(Noted, draft_gamma)
    expected = answers_of(hybrid_as(Whole, draft_gamma), requests_of(7), slots)
    answers = answers_of(noted, requests_of(7), slots)
    assert [one.text for one in answers] == [one.text for one in expected]
    if draft_gamma is None:  # else the whole has more columns, of which none counts
        assert_same(answers, expected, atol=1e-12)
    following = set(pairwise(noted.picks))
    other = {1: "DraftModelProposer", 2: "Noted"}[slots]
    assert {("PromptLookup", other), (other, "PromptLookup")} <= following


def test_the_draft_of_a_hybrid_has_a_number_of_its_own() -> None:
    hybrid = hybrid_as(HybridProposer, draft_gamma=1)
    counts = {fact[0] for one in answers_of(hybrid, requests_of(6), 1) for fact, *_ in one.facts}
    assert counts == {1, 3}


def drawn() -> StagedProposer:
    table, model = CountTable(torch.zeros(8).double()), DraftModelProposer(random_adapter(8, 1))
    return StagedProposer(table, model, width=2)


@pytest.mark.parametrize(
    "make", [lambda: hybrid_as(HybridProposer), lambda: hybrid_as(HybridProposer, 1), drawn]
)
def test_a_row_gets_the_same_tokens_alone_and_beside_others(make: Any) -> None:
    together = answers_of(make(), requests_of(6), slots=4)
    alone = [answers_of(make(), [one], slots=1)[0] for one in requests_of(6)]
    assert [one.text for one in together] == [one.text for one in alone]
