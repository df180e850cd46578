"""Text behind a context: what ids add to the text of those before them, a first space included."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from draftkit.decoding.streaming import Stop, TextStream, final_text
from tests.decoding.test_streaming import (
    ALPHABET,
    first_stop,
    in_rounds,
    llama,
    metaspace,
    pieces,
    sizes,
    texts,
    tokenizers,
    watched,
)


@tokenizers
@settings(max_examples=60, deadline=None)
@given(prompt=texts, text=texts, cut=st.integers(0, 9), sizes=sizes)
def test_pieces_behind_a_context_are_what_they_add_to_its_text(
    make: Callable[[], Tokenizer], prompt: str, text: str, cut: int, sizes: list[int]
) -> None:
    """Of the same words as one text, cut anywhere: no space between the two is lost.

    Also inside of characters; or not at all, so that all is the row's.
    """
    tokenizer = make()
    ids = tokenizer.encode("The cat " * 9 + prompt + text).ids
    if cut:
        cut += len(tokenizer.encode("The cat " * 8).ids)
    stream = TextStream(tokenizer.decode, context=ids[:cut])
    found = "".join(pieces(stream, in_rounds(ids[cut:], sizes)))
    before = final_text(ids[:cut], tokenizer.decode)
    assert before + found == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [metaspace, llama])
def test_a_space_at_the_beginning_stays_where_something_comes_before(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = make()
    the, cat = tokenizer.encode("the cat").ids
    for context, text in (([], "cat"), ([the], " cat"), ([the] * 300, " cat")):
        stream = TextStream(tokenizer.decode, context=context)
        assert stream.push([cat]) + stream.flush() == text
    # Bytes of a character before it, of which the context could begin with a part.
    emoji = tokenizer.encode("😀" * 40).ids[1:]
    for count in range(140, 149):
        stream = TextStream(tokenizer.decode, context=emoji[:count])
        found = "".join(pieces(stream, in_rounds([*emoji[count:], cat], [3])))
        assert found == "😀" * (40 - count // 4) + " cat"


@tokenizers
@settings(max_examples=100, deadline=None)
@given(
    text=texts,
    stops=st.lists(st.text(st.sampled_from(ALPHABET), min_size=1, max_size=4), max_size=3),
    cut=st.integers(0, 12),
    sizes=sizes,
)
def test_a_stop_is_found_where_the_definition_says_and_never_in_the_context(
    make: Callable[[], Tokenizer], text: str, stops: list[str], cut: int, sizes: list[int]
) -> None:
    """At any cut into rounds, as the definition says of the text that the row's ids add."""
    tokenizer = make()
    ids = tokenizer.encode("The cat " * 9 + text).ids
    if cut:
        cut += len(tokenizer.encode("The cat " * 7).ids)
    before = len(final_text(ids[:cut], tokenizer.decode))

    def added(own: list[int]) -> str:
        return tokenizer.decode([*ids[:cut], *own])[before:]

    expected = first_stop(ids[cut:], stops, added)
    first = TextStream(tokenizer.decode, stops, ids[:cut])
    assert watched(in_rounds(ids[cut:], sizes), first) == expected
    stream = TextStream(tokenizer.decode, stops, ids[:cut])
    found = "".join(pieces(stream, in_rounds(ids[cut:], sizes)))
    assert stream.stop == expected
    whole = added(ids[cut:])
    assert found == (whole if expected is None else whole[: expected.characters])


def test_a_stop_string_at_once_behind_half_a_character_keeps_no_token() -> None:
    """The context ends inside of "ä": its "D" shows as bytes until the first own id is there."""
    tokenizer = metaspace()
    *context, last = tokenizer.encode("The cat Dä").ids
    stream = TextStream(tokenizer.decode, ["ä"], context)
    assert stream.push([last]) == ""
    assert stream.stop == Stop("ä", tokens=0, characters=0)


@pytest.mark.parametrize("make", [metaspace, llama])
def test_a_stop_string_that_begins_with_a_space_ends_an_answer_at_its_beginning(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = make()
    the, cat, sat = tokenizer.encode("the cat sat").ids
    for context, ids, stop in (
        ([the, cat, the], [cat, sat], Stop(" cat", 0, 0)),
        ([cat, the], [sat, cat], Stop(" cat", 1, 4)),
    ):
        stream = TextStream(tokenizer.decode, [" cat"], context)
        assert watched(iter([ids]), stream) == stop
