"""Captured rounds are eager ones, bound to what they read for as long as that stays.

On a pretended device: a tape in the place of CUDA graphs replays on the tensors it was made on.
"""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from draftkit.decoding import graphs
from draftkit.decoding.composite import HybridProposer
from draftkit.decoding.decoder import Decoder
from draftkit.decoding.ngrams import PromptLookup
from draftkit.decoding.proposers import DraftModelProposer
from draftkit.decoding.state import Request
from tests.decoding.driving import Answer, assert_same, drive, request
from tests.decoding.pretended import Tape, pretended_captures, pretended_device, put_on_device
from tests.tabular import random_adapter, relative

SLOTS = 4


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tape]]:
    monkeypatch.setattr(graphs, "BATCHES", (SLOTS,))
    with pretended_captures() as made:
        yield made


def decoder_of(*names: str, captures: bool = True) -> Decoder:
    """With a draft model of each name."""
    decoder = Decoder(random_adapter(8, 1), slots=SLOTS, capacity=48, captured=captures)
    decoder._units._captures = captures
    for seed, name in enumerate(names, start=2):
        proposer = DraftModelProposer(relative(decoder.target, seed), version=name)
        decoder.attach(name, proposer)
    return decoder


def requests(
    *names: str, new: int = 6, gammas: tuple[int, ...] = (2,), first: int = 1
) -> list[Request]:
    return [
        request(
            [first, 2, row % 3],
            proposer_id=names[row % len(names)],
            row=row,
            new=new,
            gamma=gammas[row % len(gammas)],
        )
        for row in range(SLOTS)
    ]


def check_as_eager(play: Callable[[Decoder], list[Answer]], *names: str) -> None:
    """What a decoder is made to do with captures is what it does without."""
    found = [play(decoder_of(*names, captures=captures)) for captures in (True, False)]
    assert_same(found[0], found[1], atol=1e-10)


def test_rounds_of_two_proposers_and_two_gammas_in_turns_are_eager_rounds(
    tapes: list[Tape],
) -> None:
    """Verification reads proposals where the last proposer of its shape left them, or copies."""
    wanted = requests("one", "two", "two", "one", gammas=(2, 3), new=14)
    check_as_eager(lambda decoder: drive(decoder, wanted), "one", "two")
    assert len(tapes) == 6  # four of proposals, two of verification
    assert all(tape.replays > 1 for tape in tapes)


def test_captured_rounds_that_are_read_late_have_left_before_the_next_replay(
    tapes: list[Tape],
) -> None:
    """What a capture returns is written over by its next replay, and copied out before."""
    wanted = requests("one", new=20)
    expected = drive(decoder_of("one", captures=False), wanted)
    decoder = decoder_of("one")
    decoder.late = True
    with pretended_device():
        assert_same(drive(put_on_device(decoder), wanted), expected, atol=1e-10)
    assert len(tapes) == 2


@pytest.mark.parametrize("shared", [False, True], ids=["again", "by another"])
def test_a_proposer_whose_caches_are_renewed_is_captured_anew(
    tapes: list[Tape], shared: bool
) -> None:
    def renewed(decoder: Decoder) -> list[Answer]:
        answers = drive(decoder, requests("one"))
        model = decoder._proposers["one"]
        assert isinstance(model, DraftModelProposer)
        if shared:
            decoder.attach("two", HybridProposer(PromptLookup(min_ngram=3), model))
        else:
            decoder.attach("one", model)
        return answers + drive(decoder, requests("one", first=5))

    check_as_eager(renewed, "one")
    assert len(tapes) == 3


def test_a_replaced_proposer_goes_with_its_captures(tapes: list[Tape]) -> None:
    decoder = decoder_of("one")
    drive(decoder, requests("one"))
    gone = weakref.ref(decoder._proposers["one"])
    decoder.attach("one", DraftModelProposer(relative(decoder.target, 3)))
    assert gone() is None
    assert len(decoder._units._captured) == 1


def test_a_decoder_goes_when_nobody_holds_it_and_takes_its_captures_along(
    tapes: list[Tape],
) -> None:
    """By counting references: were they a cycle, collecting it could break a later capture."""
    gc.collect()
    gc.disable()
    try:
        decoder = decoder_of("one")
        drive(decoder, requests("one"))
        assert len(tapes) == 2
        gone = [weakref.ref(decoder), *map(weakref.ref, tapes)]
        tapes.clear()
        del decoder
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()


def test_no_garbage_is_collected_during_a_capture(tapes: list[Tape]) -> None:
    assert gc.isenabled()
    drive(decoder_of("one"), requests("one"))
    assert [tape.collects for tape in tapes] == [False, False]
    assert gc.isenabled()


def test_captures_are_as_many_as_are_allowed_those_used_last(
    tapes: list[Tape], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MOST_CAPTURED", 3)

    def play(decoder: Decoder) -> list[Answer]:
        answers = []
        for gamma in (1, 2, 3, 3, 2):
            answers += drive(decoder, requests("one", gammas=(gamma,)))
            assert len(decoder._units._captured) <= 3
        return answers

    check_as_eager(play, "one")
    assert len(tapes) == 8  # gamma 1, 2, 3, and 2 again
