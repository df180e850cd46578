"""The units of a round compute nothing from indices alone that would leave int32."""

from typing import Any

import pytest
import torch

from draftkit.decoding.decoder import Decoder
from draftkit.decoding.ngrams import NgramMemory
from draftkit.decoding.proposers import DraftModelProposer, Proposer
from tests import tiny
from tests.decoding.checks import Made
from tests.decoding.driving import DRAFT, SAMPLINGS, SMALL, request
from tests.decoding.mutants import ALL_PROPOSERS
from tests.indices import indices_inside_int32
from tests.tabular import random_adapter, relative

TEXT = [1, 2, 3, 1, 2, 3, 1, 2]


def play(target: Any, proposer: Proposer, *, gamma: int = 3, **options: Any) -> None:
    """Rounds of rows of every sampling, not in all slots."""
    decoder = Decoder(target, slots=6, capacity=64, eos_token_ids=[7], **options)
    decoder.attach(DRAFT, proposer)
    samplings = enumerate(SAMPLINGS)
    decoder.join([request(TEXT, gamma=gamma, sampling=s, row=row) for row, s in samplings])
    decoder.prefill()
    with indices_inside_int32():
        decoder.round()
        decoder.round()


@pytest.mark.parametrize("make", ALL_PROPOSERS.values(), ids=ALL_PROPOSERS)
def test_of_every_proposer(make: Made) -> None:
    target = random_adapter(8, 1)
    play(target, make(relative(target, 2)))


@pytest.mark.parametrize("rule", ["speculative", "block", "match"])
def test_of_every_rule_and_of_a_transformer(rule: str) -> None:
    target, draft = tiny.pair(**SMALL)
    play(target, DraftModelProposer(draft), verification=rule, top_k=3)


def test_places_of_the_largest_memory_are_no_products_of_indices() -> None:
    """Its tables begin at multiples of 2^30, which must not be made of indices in a unit."""
    made: Any = NgramMemory()
    made._cells, made._starts = (1 << 30) - 1, torch.arange(4) << 30
    with indices_inside_int32() as indices:
        torch.arange(2)
        made._look_up(torch.ones(1, 4, dtype=torch.int64))
    assert indices.seen
