"""Pieces of text and stop strings: the same at any cut into rounds as for the whole text.

The reference decodes all ids after every single token and looks for the stop strings in that.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from draftkit.decoding.streaming import (
    REPLACEMENT,
    WINDOW,
    Detokenize,
    Stop,
    TextStream,
    final_text,
)
from tests import tiny
from tests.trained import train_byte_bpe

TEXT = (
    "The cat sat on the mat.\n\tdef f(x):  return 'ä' * 3\r\nGrüße, 日本語 und 👩‍👩‍👧 oder 🇩🇪!"
    "\n\n  END of é́ text 😀😀😀😀 STOP here"
)
ALPHABET = "ab \n.ENDéä日語😀👧\u200d"
BYTE = "<0x{:02X}>"


@cache
def byte_level() -> Tokenizer:
    """One token a byte."""
    return tiny.byte_tokenizer().backend_tokenizer


@cache
def byte_bpe() -> Tokenizer:
    """Tokens across characters and words, merged bytes of characters among them."""
    return train_byte_bpe([TEXT, "日本語 😀 " * 9, "the cat " * 9], 400).backend_tokenizer


@cache
def metaspace() -> Tokenizer:
    """Words with their space in front, bytes for all that is no word; the first space drops."""
    words = ["▁", "▁the", "▁The", "▁cat", "▁E", "ND", "▁sat", ".", "a", "é", "日", "t", "o", "\n"]
    pieces = [("<unk>", -20.0), *((BYTE.format(byte), -15.0) for byte in range(256))]
    pieces += [(word, -2.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    return tokenizer


@cache
def llama() -> Tokenizer:
    """The same words, spelt back as Llama 2 does: all fused, one space stripped."""
    tokenizer = Tokenizer.from_str(metaspace().to_str())
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


TOKENIZERS: list[Callable[[], Tokenizer]] = [byte_level, byte_bpe, metaspace, llama]
tokenizers = pytest.mark.parametrize("make", TOKENIZERS)
sizes = st.lists(st.integers(1, 7), min_size=1, max_size=8)
texts = st.text(st.sampled_from(ALPHABET), max_size=60)


def in_rounds(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    """Cut `ids` into rounds of `sizes`, over and over."""
    start = number = 0
    while start < len(ids):
        size = sizes[number % len(sizes)]
        yield ids[start : start + size]
        start, number = start + size, number + 1


def pieces(stream: TextStream, rounds: Iterator[Sequence[int]]) -> list[str]:
    return [*(stream.push(ids) for ids in rounds), stream.flush()]


def first_stop(ids: Sequence[int], stops: Sequence[str], decode: Detokenize) -> Stop | None:
    """By definition: all the text after each token, the earliest of the longest in it."""
    for count in range(len(ids) + 1):
        text = final_text(list(ids[:count]), decode)
        places = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
        if places:
            place, _, string = min(places)
            needed = (n for n in range(count + 1) if decode(list(ids[:n]))[:place] == text[:place])
            return Stop(string, next(needed), place)
    return None


def watched(rounds: Iterator[Sequence[int]], stream: TextStream) -> Stop | None:
    """What the stream says after the first round that completes a stop string."""
    for ids in rounds:
        stream.push(ids)
        if stream.stop is not None:
            break
    return stream.stop


# Pieces


@tokenizers
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_pieces_together_are_the_text_of_all_ids(make: Callable[[], Tokenizer], size: int) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT * 5).ids
    whole = tokenizer.decode(ids)
    assert REPLACEMENT not in whole
    assert len(ids) > 4 * WINDOW
    found = pieces(TextStream(tokenizer.decode), in_rounds(ids, [size]))
    assert "".join(found) == whole
    assert not any(REPLACEMENT in piece for piece in found)


@pytest.mark.parametrize("make", [byte_level, byte_bpe])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=sizes)
def test_pieces_of_ill_formed_bytes_are_their_text_too(
    make: Callable[[], Tokenizer], data: st.DataObject, sizes: list[int]
) -> None:
    tokenizer = make()
    size = tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), min_size=30, max_size=120))
    stream = TextStream(tokenizer.decode)
    assert "".join(pieces(stream, in_rounds(ids, sizes))) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [metaspace, llama])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), sizes=sizes)
def test_ill_formed_byte_tokens_cost_no_character_but_replacement_signs(
    make: Callable[[], Tokenizer], data: st.DataObject, sizes: list[int]
) -> None:
    tokenizer = make()
    broken = st.integers(1 + 0x80, 1 + 0xFF)
    words = st.integers(257, tokenizer.get_vocab_size() - 1)
    ids = data.draw(st.lists(broken | words, max_size=150))
    found = "".join(pieces(TextStream(tokenizer.decode), in_rounds(ids, sizes)))
    expected = tokenizer.decode(ids)
    assert [c for c in found if c.isascii()] == [c for c in expected if c.isascii()]


def test_text_behind_a_long_run_of_ill_formed_byte_tokens_is_not_lost() -> None:
    tokenizer = llama()
    emoji = tokenizer.encode("😀" * 40).ids[1:]
    ids = [1 + 0x80, *emoji, *tokenizer.encode("cat").ids]
    found = pieces(TextStream(tokenizer.decode), in_rounds(ids, [1]))
    assert "".join(found) == tokenizer.decode(ids) == REPLACEMENT * 161 + " cat"


def test_byte_fallback_waits_for_the_whole_run_of_a_round() -> None:
    """Its unfinished run shows a sign for every byte, finished characters included."""
    tokenizer = llama()
    ids = tokenizer.encode("😀😀").ids[1:]
    assert tokenizer.decode(ids[:5]) == REPLACEMENT * 5
    stream = TextStream(tokenizer.decode)
    assert [stream.push(ids[:5]), stream.push(ids[5:])] == ["😀", "😀"]


def test_a_text_that_ends_inside_a_character_is_flushed_with_a_replacement_sign() -> None:
    decode = byte_level().decode
    ids = byte_level().encode("ab😀").ids[:-1]
    stream = TextStream(decode)
    assert [stream.push(ids), stream.flush(), stream.flush()] == ["ab", REPLACEMENT, ""]


# Stop strings


@tokenizers
@pytest.mark.parametrize("stop", ["STOP", "END of", "\n\n  END", "語 und 👩", "😀😀😀😀 S", "T"])
def test_a_stop_string_ends_a_text_many_windows_long(
    make: Callable[[], Tokenizer], stop: str
) -> None:
    tokenizer = make()
    text = "a long beginning. " * 30 + TEXT
    ids = tokenizer.encode(text).ids
    for size in (1, 4, 9):
        found = watched(in_rounds(ids, [size]), TextStream(tokenizer.decode, [stop]))
        assert found is not None
        assert found.characters == text.index(stop)
        kept = tokenizer.decode(ids[: found.tokens])
        assert kept.startswith(text[: found.characters])
        assert len(tokenizer.decode(ids[: found.tokens - 1]).rstrip(REPLACEMENT)) < len(
            text[: found.characters]
        )


def test_of_several_stop_strings_the_earliest_wins_and_then_the_longest() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("one two three").ids

    def stop(*stops: str) -> str:
        found = watched(iter([ids]), TextStream(tokenizer.decode, stops))
        assert found is not None
        return found.string

    assert stop("three", "two") == "two"
    assert stop("thr", "tw", "t") == "t"
    bpe = byte_bpe()  # where one token brings both
    (token,) = bpe.encode(" cat").ids
    found = watched(iter([[token]]), TextStream(bpe.decode, ["a", "at", "t"]))
    assert found == Stop("at", 1, 2)


def test_text_that_may_begin_a_stop_string_is_held_until_it_does_not() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer.decode, ["\n\nUser:", "\n\nSystem:"])
    sent = [stream.push(tokenizer.encode(part).ids) for part in ("a\n", "\nUs", "ual", "\n\nUse")]
    assert sent == ["a", "", "\n\nUsual", ""]
    assert stream.push(tokenizer.encode("r: b").ids) == ""
    assert stream.stop == Stop("\n\nUser:", 8, 8)
    assert stream.push(tokenizer.encode("more").ids) + stream.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        TextStream(byte_level().decode, ["a", ""])


# Cost


class Counting:
    """A decoder that remembers how many ids it was given at once."""

    def __init__(self, decode: Detokenize) -> None:
        self.decode = decode
        self.longest = 0
        self.total = 0

    def __call__(self, ids: list[int]) -> str:
        self.longest = max(self.longest, len(ids))
        self.total += len(ids)
        return self.decode(ids)


@tokenizers
@pytest.mark.parametrize("text", [TEXT, "😀", "\x80"], ids=["text", "emoji", "ill-formed"])
def test_a_round_costs_the_same_at_any_length_and_a_context_too(
    make: Callable[[], Tokenizer], text: str
) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text).ids
    if text == "\x80":
        ids = ids[-1:]  # its second byte, alone
        assert tokenizer.decode(ids) == REPLACEMENT
    costs = []
    for length in (1000, 4000):
        decode = Counting(tokenizer.decode)
        pieces(TextStream(decode, ["no such"]), in_rounds((ids * 4000)[:length], [4]))
        assert decode.longest <= 2 * WINDOW + 4
        costs.append(decode.total / length)
    assert costs[1] < 1.1 * costs[0]
    decode = Counting(tokenizer.decode)
    TextStream(decode, context=ids * 1000)
    assert decode.total < 1000


def test_tokens_without_text_do_not_hide_the_space_behind_them() -> None:
    tokenizer = metaspace()
    (cat,) = tokenizer.encode("cat").ids

    def decode(ids: list[int]) -> str:
        return tokenizer.decode([i for i in ids if i != 0])  # as special tokens are skipped

    ids = [cat, *[0] * (3 * WINDOW), cat]
    assert decode(ids) == "cat cat"
    assert "".join(pieces(TextStream(decode), in_rounds(ids, [3]))) == "cat cat"


def test_a_stream_says_whether_it_holds_text_back() -> None:
    """Part of a character is text too; after a long text as after a short one."""
    tokenizer = byte_level()
    ids = tokenizer.encode("x" * 3 * WINDOW + "ä stab").ids
    stream = TextStream(tokenizer.decode, ["stop"])
    held, told = [], ""
    for token in ids:
        told += stream.push([token])
        held.append(stream.holds)
    assert [n - 3 * WINDOW for n, holds in enumerate(held) if holds] == [0, 3, 4]
    assert told == "x" * 3 * WINDOW + "ä stab"


# Behind a context: what ids add to the text of those before them, a first space included


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
