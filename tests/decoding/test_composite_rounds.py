"""Composite proposers over many rounds: what is left out changes nothing.

That their rounds have the target's law and know the text alone is shown in `test_exactness`, and
what breaks it in `test_mutants`.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch

from draftkit.config import SamplingConfig
from draftkit.decoding.composite import HybridProposer, StagedProposer
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.ngrams import CountTable, PromptLookup
from draftkit.decoding.proposers import DraftModelProposer, Proposer
from draftkit.decoding.state import Request, RoundView
from tests.decoding.driving import DRAFT, Answer, assert_same, drive, request
from tests.tabular import random_adapter, relative

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
    slots: int,
) -> None:
    noted = hybrid_of(Noted)
    expected = answers_of(hybrid_of(Whole), requests_of(7), slots)
    assert_same(answers_of(noted, requests_of(7), slots), expected, atol=1e-12)
    following = set(pairwise(noted.picks))
    other = {1: "DraftModelProposer", 2: "Noted"}[slots]
    assert {("PromptLookup", other), (other, "PromptLookup")} <= following


def drawn() -> StagedProposer:
    table, model = CountTable(torch.zeros(8).double()), DraftModelProposer(random_adapter(8, 1))
    return StagedProposer(table, model, width=2)


@pytest.mark.parametrize("make", [lambda: hybrid_of(HybridProposer), drawn])
def test_a_row_gets_the_same_tokens_alone_and_beside_others(make: Any) -> None:
    together = answers_of(make(), requests_of(6), slots=4)
    alone = [answers_of(make(), [one], slots=1)[0] for one in requests_of(6)]
    assert [one.text for one in together] == [one.text for one in alone]
