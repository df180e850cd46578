"""Composite proposers over many rounds: what is left out changes nothing, and what must not pass.

That their rounds have the target's law and know the text alone is shown in `test_exactness`.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding import composite
from draftkit.decoding.composite import HybridProposer, StagedProposer
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.ngrams import CountTable, PromptLookup
from draftkit.decoding.proposers import DraftModelProposer, Proposer
from draftkit.decoding.state import Request, RoundView
from tests.decoding.checks import (
    Parts,
    Setting,
    check_joint_law,
    check_sampled,
    check_text_alone,
    measured,
)
from tests.decoding.driving import DRAFT, Answer, assert_same, drive, request
from tests.tabular import TabularAdapter, random_adapter, relative
from tests.theory import checks as theory_checks
from tests.theory.laws import LawBroken
from tests.theory.mutants import mutate

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

    def pick(self, view: RoundView) -> Proposer:
        return self


class Noted(HybridProposer):
    """Remembers what it picked."""

    def pick(self, view: RoundView) -> Proposer:
        part = super().pick(view)
        self.picks.append(type(part).__name__)
        return part


def hybrid_of(kind: Any) -> Any:
    made = kind(PromptLookup(min_ngram=2), DraftModelProposer(random_adapter(8, 1)))
    made.picks = []
    return made


@pytest.mark.parametrize("slots", [1, 2])
def test_rounds_without_the_model_are_those_of_the_whole_and_the_model_catches_up(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = hybrid_of(Noted)
    expected = answers_of(hybrid_of(Whole), requests_of(7), slots)
    assert_same(answers_of(noted, requests_of(7), slots), expected, atol=1e-12)
    following = set(pairwise(noted.picks))
    other = {1: "DraftModelProposer", 2: "Noted"}[slots]
    assert {("PromptLookup", other), (other, "PromptLookup")} <= following
    monkeypatch.setattr(Decoder, "_catch_up", lambda *_: None)
    with pytest.raises(AssertionError):
        assert_same(answers_of(noted, requests_of(7), slots), expected, atol=1e-12)


def drawn() -> StagedProposer:
    table, model = CountTable(torch.zeros(8).double()), DraftModelProposer(random_adapter(8, 1))
    return StagedProposer(table, model, width=2)


@pytest.mark.parametrize("make", [lambda: hybrid_of(HybridProposer), drawn])
def test_a_row_gets_the_same_tokens_alone_and_beside_others(make: Any) -> None:
    together = answers_of(make(), requests_of(6), slots=4)
    alone = [answers_of(make(), [one], slots=1)[0] for one in requests_of(6)]
    assert [one.text for one in together] == [one.text for one in alone]


# What must not pass


def staged(names: dict[str, Any], draft: TabularAdapter, passes: int = 2) -> Proposer:
    table = CountTable(random_adapter(draft.vocab_size, 9).table[0].log_softmax(-1))
    return names["StagedProposer"](table, DraftModelProposer(draft), width=1, passes=passes)


def one_pass(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return staged(names, draft, passes=1)


def hybrid(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return names["HybridProposer"](PromptLookup(), DraftModelProposer(draft))


def hybrid_for_long(names: dict[str, Any], draft: TabularAdapter) -> Proposer:
    return hybrid(names, draft)


MUTANTS: dict[str, tuple[Any, str, str]] = {
    "staged states the law of the guesser": (
        one_pass,
        "return tokens, verification.accepted + 1, law",
        "law = torch.cat([guess.draft_probs, law[:, 1:]], dim=1)\n"
        "        return tokens, verification.accepted + 1, law",
    ),
    "staged states the laws one place off": (
        one_pass,
        "return tokens, verification.accepted + 1, law",
        "return tokens, verification.accepted + 1, law.roll(1, dims=1)",
    ),
    "staged takes guesses untested": (one_pass, "accept_uniform=accept,", "accept_uniform=0,"),
    "staged draws guess and test with one number": (
        one_pass,
        "accept_uniform=accept,",
        "accept_uniform=own,",
    ),
    "staged draws test and next token with one number": (
        one_pass,
        "next_uniform=then[:, 0]",
        "next_uniform=accept[:, 0]",
    ),
    "staged tests guesses against another law": (
        one_pass,
        "draft_probs=guess.draft_probs,",
        "draft_probs=guess.draft_probs.flip(-1),",
    ),
    "staged proposes what no pass has drawn": (
        one_pass,
        "ends[:, -1].clamp(max=gamma)",
        "ends[:, -1].clamp(min=gamma)",
    ),
    "staged draws all passes with the same numbers": (
        staged,
        "self._pass(now, width, uniforms[i], end)",
        "self._pass(now, width, uniforms[0], end)",
    ),
    "staged does not move on between passes": (
        staged,
        "now = _after(now, new, kept, end)",
        "pass",
    ),
    "hybrid chooses by what the model draws": (
        hybrid,
        "is_guessed = guess.lengths > 0",
        "drawn = self.model.propose(view, gamma).tokens[:, 0]\n"
        "        is_guessed = (guess.lengths > 0) & (drawn == guess.tokens[:, 0])",
    ),
    "hybrid lets the model read other tokens than are proposed": (
        hybrid_for_long,
        "proposal = self.model.propose(view, gamma, decided)",
        "own = self.model.propose(view, gamma)\n"
        "        tokens = torch.where(is_guessed[:, None], guess.tokens, own.tokens)\n"
        "        certain = torch.nn.functional.one_hot(tokens, 3).double()\n"
        "        law = torch.where(is_guessed[:, None, None], certain, own.draft_probs)\n"
        "        proposal = Proposal(tokens, law, lengths=guess.lengths)",
    ),
    "hybrid states the model's law of guesses": (
        hybrid,
        "proposal.draft_probs",
        "self.model.propose(view, gamma).draft_probs",
    ),
}


def check(make: Any, names: dict[str, Any]) -> None:
    parts = Parts(proposer=lambda draft: make(names, draft))
    result = measured(parts, Setting(gamma=2, tokens=6 if make is hybrid_for_long else 3))
    check_joint_law(result)
    check_text_alone(result)


@pytest.mark.parametrize("make", [staged, one_pass, hybrid, hybrid_for_long])
def test_the_shipped_composites_pass(make: Any) -> None:
    check(make, vars(composite))


@pytest.mark.parametrize(("make", "old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_a_broken_composite_is_rejected(make: Any, old: str, new: str) -> None:
    with pytest.raises(LawBroken):
        check(make, vars(mutate(composite, old, new)))


def test_numbers_that_later_rounds_draw_again_break_the_law_of_blocks() -> None:
    names = vars(mutate(composite, "replace(view, noise=lambda **_: own)", "view"))
    parts = Parts(proposer=lambda draft: staged(names, draft))
    with pytest.raises(LawBroken):
        check_sampled(parts, theory_checks.small_tables(), rows=20_000, verification="block")
