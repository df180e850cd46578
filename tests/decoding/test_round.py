"""What a round keeps, compiled rounds of every proposer, and rounds without the draft."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftkit.decoding import graphs
from draftkit.decoding import round as units
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.proposers import (
    DraftModelProposer,
)
from tests import tiny
from tests.decoding.checks import Made
from tests.decoding.driving import (
    DRAFT,
    SAMPLINGS,
    Schedule,
    assert_same,
    drive,
    request,
    strict_compiler,
)
from tests.decoding.mutants import ALL_PROPOSERS
from tests.decoding.test_cache import Session
from tests.tabular import random_adapter, relative

EXACT = 1e-10


TARGET = random_adapter(8, 1)


def test_an_end_of_text_beyond_the_length_limit_is_emitted_but_ends_nothing() -> None:
    cut = units.cut_round(
        torch.tensor([[5, 6, 9]]),
        accepted=torch.tensor([2]),
        remaining=torch.tensor([2]),
        eos_token_ids=torch.tensor([[9]]),
    )
    assert [part.tolist() for part in cut] == [[3], [2], [False], [True]]


def test_rows_that_ignore_ends_of_text_share_rounds_with_rows_that_do_not() -> None:
    """The former say what a decoder without ends of text says, the latter the beginning of it."""
    key: dict[str, Any] = {"new": 14, "gamma": 3, "sampling": SAMPLINGS[1]}
    pairs = [(row, ignores) for row in range(4) for ignores in (True, False)]
    requests = [request([1, 2, row], row=row, ignores_eos=i, **key) for row, i in pairs]
    made = []
    for ends, asked in (([7, 3], requests), ([], requests[::2])):
        decoder = Decoder(TARGET, slots=8, capacity=64, eos_token_ids=ends)
        decoder.attach(DRAFT, ALL_PROPOSERS["sampled"](relative(TARGET, 2)))
        made.append(drive(decoder, asked))
    assert_same(made[0][::2], made[1], atol=EXACT)
    texts = [answer.text for answer in made[1]]
    firsts = [next((i for i, one in enumerate(text) if one in (7, 3)), 99) for text in texts]
    assert [answer.text for answer in made[0][1::2]] == [
        text[: first + 1] for text, first in zip(texts, firsts, strict=True)
    ]
    assert min(firsts) < 13


# Compiled rounds of every proposer


soak = pytest.mark.soak
IN_SHORT = ("ngram", "hybrid", "parallel, of a table")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name in IN_SHORT else soak)
        for name, make in ALL_PROPOSERS.items()
        if name != "none"
    ],
)
def test_compiled_rounds_of_every_proposer_are_its_own(make: Made) -> None:
    requests = [
        request(
            [1, 2, 3, 1, 2, 3, row % 7],
            new=14,
            gamma=3,
            row=row,
            sampling=SAMPLINGS[1],
            ignores_eos=row % 3 == 0,
        )
        for row in range(7)
    ]
    found = []
    with strict_compiler(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BATCHES", (3,))
        for compiled, late in ((False, False), (True, False), (True, True)):
            decoder = Decoder(
                TARGET, slots=3, capacity=64, eos_token_ids=[7], compiled=compiled, late=late
            )
            decoder.attach(DRAFT, make(relative(TARGET, 2)))
            found.append(drive(decoder, requests))
    assert sum(fact[0][2] - 1 for answer in found[0] for fact in answer.facts) > 5
    assert_same(found[1], found[0], atol=EXACT)
    assert_same(found[2], found[0], atol=EXACT)


@soak
def test_compiled_rounds_read_encoders_of_every_size() -> None:
    target, draft = tiny.seq2seq_pair("t5")
    with strict_compiler() as strict, pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "BATCHES", (3,))
        for room in (64, 72):
            found = []
            for compiled in (False, True):
                decoder = Decoder(target, slots=3, capacity=room, compiled=compiled)
                decoder.attach(DRAFT, DraftModelProposer(draft))
                texts = tiny.prompts([3, 9, 20, 1, 7], seed=4)
                requests = [
                    request([*text, tiny.START, *[5] * (row % 2)], gamma=3, row=row)
                    for row, text in enumerate(texts)
                ]
                found.append(drive(decoder, requests))
            assert_same(found[1], found[0], atol=1e-5)
        assert strict.made == 4


# Rounds without the draft


PLAIN_BETWEEN = [3, 0, 0, 2, 0, 0, 0, 0, 3, 1, 0]


def session_of(architecture: str) -> Session:
    """Rows of one draft whose gamma is the schedule's."""
    session = Session(architecture, slots=3)
    session.decoder.gamma_policy = Schedule(PLAIN_BETWEEN)
    for length in (9, 1, 14):
        slot = session.join(length, gamma=3, draft="close", new=40)
        session.decoder.state.slots[slot].request = replace(session.requests[slot], adapts=True)
    return session


def finish(session: Session) -> None:
    while session.texts:
        session.leave(session.round())


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_after_plain_rounds_the_drafts_logits_are_those_of_a_fresh_pass(architecture: str) -> None:
    session = session_of(architecture)
    finish(session)
    assert {gamma for gamma, _ in session.accepted} == {0, 1, 2, 3}
    assert session.compared > 150
