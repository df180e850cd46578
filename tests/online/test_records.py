"""A record's checksum, and its side of the held-out split."""

from dataclasses import replace

import numpy as np

from draftkit.online.records import checksum, split
from tests.online.traffic import record


def test_a_checksum_stands_for_the_bytes_and_for_each_column() -> None:
    given = checksum(b"content", "route", 1.0)
    assert given == checksum(b"content", "route", 1.0)
    others = [(b"Content", "route", 1.0), (b"content", "rout", 1.0), (b"content", "route", 2.0)]
    assert given not in [checksum(*other) for other in others]


def test_a_conversation_has_one_number_in_the_split_and_they_are_spread_evenly() -> None:
    def side(*prompt: int, document: str = "") -> float:
        return split(replace(record(0), prompt_ids=list(prompt), document=document))

    places = np.sort([side(number, 1) for number in range(4000)])
    assert side(7, 1) == side(7, 1) != side(1, 7)
    assert side(7, 1, document="talk") == side(2, document="talk") != side(7, 1)
    # Kolmogorov: at 4000 places a larger distance has a chance below 1e-6.
    assert np.abs(places - (np.arange(4000) + 0.5) / 4000).max() < 2.7 / 4000**0.5
