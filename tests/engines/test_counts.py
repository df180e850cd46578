"""Passes are counted as engines count them: to the limit, and behind an end of text."""

import pytest

from draftkit.decoding.generation import Completion, TraceRound
from tests.engines.counts import accepted_by_pass

END = 5
# Rounds: proposals, how many were accepted, the token behind them.
ROUNDS = (([1, 2, 3], 3, 4), ([1, END, 2], 2, 0), ([1, 1, 1], 3, 2), ([0, 0, 0], 1, 1))
TRACED = Completion([1], steps=[TraceRound(p, n, token, n + 1) for p, n, token in ROUNDS])


@pytest.mark.parametrize(
    ("limit", "ends", "capped", "expected"),
    [
        (20, (), False, [3, 2, 3, 1]),
        (20, (END,), False, [3, 2]),  # the pass with the end counts whole, none behind it
        (9, (), False, [3, 2, 3]),  # the last began at token 7
        (9, (), True, [3, 2, 1]),  # and had room for one proposal and its own token
        (7, (), True, [3, 2]),
        (8, (), True, [3, 2, 0]),  # room for no proposal
    ],
)
def test_passes_are_counted_as_the_engine_counts_them(
    limit: int, ends: tuple[int, ...], capped: bool, expected: list[int]
) -> None:
    assert accepted_by_pass(TRACED, limit=limit, ends=ends, capped=capped) == expected
