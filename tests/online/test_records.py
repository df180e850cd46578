"""Records as bytes: exact but for the stated rounding, refused when they are not whole."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkit.data.rollouts import OPTIONAL, Record
from draftkit.online.records import checksum, decode, encode, split
from tests.online.traffic import record

ids = st.integers(-1, 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)


@st.composite
def records(draw: st.DrawFn) -> Record:
    count = draw(st.integers(0, 4))

    def each(values: st.SearchStrategy) -> st.SearchStrategy:
        return st.none() | st.lists(values, min_size=count, max_size=count)

    widths = draw(each(st.integers(0, 3)))
    rows = {
        name: None
        if widths is None
        else [draw(st.lists(kind, min_size=width, max_size=width)) for width in widths]
        for name, kind in (("topk_ids", ids), ("topk_log_probs", floats))
    }
    return Record(
        prompt_ids=draw(st.lists(ids, max_size=5)),
        output_ids=draw(st.lists(ids, min_size=count, max_size=count)),
        sampler=draw(st.text(max_size=5)),
        sampler_version=draw(st.text(max_size=5)),
        sampling=draw(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False))),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        row=draw(st.integers(0, 2**40)),
        document=draw(st.text(max_size=5)),
        proposals=draw(each(ids)),
        rejected=draw(each(st.booleans())),
        tail_mass=draw(each(floats)),
        loss_tail_mass=draw(each(floats)),
        **rows,
    )


@given(records())
def test_a_record_comes_back_exactly(given: Record) -> None:
    assert decode(encode(given)) == given


def test_probabilities_are_rounded_to_float32_and_nothing_else() -> None:
    given = replace(record(1, tokens=1, width=1), topk_log_probs=[[-0.1]], tail_mass=[0.2])
    found = decode(encode(given))
    expected = replace(
        given, topk_log_probs=[[float(np.float32(-0.1))]], tail_mass=[float(np.float32(0.2))]
    )
    assert found == expected


def test_arrays_are_taken_as_lists_are() -> None:
    given = record(5)
    arrays = {
        name: np.asarray(getattr(given, name))
        for name in ("prompt_ids", "output_ids", *OPTIONAL)
        if getattr(given, name) is not None
    }
    assert encode(replace(given, **arrays)) == encode(given)


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**70, 0.5])
@pytest.mark.parametrize("as_array", [False, True])
def test_an_id_that_is_none_is_refused(wrong: float, as_array: bool) -> None:
    ids = np.asarray([wrong]) if as_array else [wrong]
    with pytest.raises(ValueError, match="output_ids holds something that is no id"):
        encode(replace(record(1, tokens=1), output_ids=ids))


def test_alternatives_need_their_log_probabilities() -> None:
    for other in (None, [[-1.0]] * 8):
        with pytest.raises(ValueError, match="differ in shape"):
            encode(replace(record(1), topk_log_probs=other))


def test_other_bytes_are_refused_with_one_line() -> None:
    content = encode(record(3))
    for wrong in (b"", content[:-1], content + b"\0", b"\7" + content[1:], content[:9], b"x" * 99):
        with pytest.raises(ValueError, match="not a stored record") as caught:
            decode(wrong)
        assert "\n" not in str(caught.value)


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
