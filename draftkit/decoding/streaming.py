"""From token ids to text while they arrive: pieces that stay, and stop strings.

A token is no unit of text. It may hold part of a character, a stop string may begin inside one
and end rounds later, and decoders drop the space before the first word. So ids are decoded
together with some that came before them, those of a prompt at first, and only the difference
counts. That context is bounded: a round costs the same at any length of the answer.

`decode` is any function from ids to text that only appends: more ids extend the text, except that
they may replace U+FFFD signs at its end, which stand for characters with bytes still missing.
Byte-level and SentencePiece decoders are such functions once nothing cleans up spaces behind
them. Byte fallback is one while its bytes are well-formed; in a run that is not, it takes back
characters it has shown. They stay here, and U+FFFD signs may be counted differently.

Knows no models and no tensors; characters are code points.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"
MISSING = 3  # of a character's at most 4 bytes, each perhaps a token
WINDOW = 32  # ids that are decoded again; above that, the older half goes
CONTEXT = (8, 32)  # ids of what comes before a text; more where fewer have no text


class Stop(NamedTuple):
    """Where a stop string ends an answer."""

    string: str
    tokens: int  # the fewest whose text contains the answer
    characters: int  # of the answer: the text before the stop string


def final_text(ids: list[int], decode: Decode) -> str:
    """The part of the text of `ids` that no further id can change.

    One U+FFFD at the end may be an unfinished character. Several may also be finished ones that
    share a run of byte tokens with it (byte fallback shows all or nothing of a run): then the text
    without the last few tokens tells. Where it does not, the bytes are ill-formed and stay so.
    """
    text = decode(ids)
    stable = text.rstrip(REPLACEMENT)
    if len(text) - len(stable) <= 1:
        return stable
    for missing in range(1, MISSING + 1):
        shorter = decode(ids[:-missing])
        if not shorter.endswith(REPLACEMENT):
            return max(stable, shorter, key=len)
    return text[:-1]


def context_of(ids: Sequence[int], decode: Decode) -> list[int]:
    """The last of `ids` that text behind them depends on.

    They have text themselves, lest a space behind them be dropped, and begin with a character: in
    byte fallback one that is cut off spoils the run of bytes behind it.
    """
    for count in CONTEXT:
        for start in range(len(ids) - count, len(ids) - count - MISSING - 1, -1):
            kept = list(ids[max(0, start) :])
            text = final_text(kept, decode)
            if start <= 0 or (text and not text.startswith(REPLACEMENT)):
                return kept
    return list(ids[-CONTEXT[0] :])


class _Window:
    """The last ids of a row and their final text; what came before is counted.

    Tokens and characters of `context` stand before the row, so their places are below 0. At least
    `reach` + 1 characters that were final before a push are still there after it.
    """

    def __init__(self, decode: Decode, reach: int, context: Sequence[int]) -> None:
        self.ids = context_of(context, decode)
        self.text = final_text(self.ids, decode)
        self.tokens_before = -len(self.ids)
        self.characters_before = -len(self.text)
        self._decode = decode
        self._reach = reach

    @property
    def first_token(self) -> int:
        """The place in `ids` of the row's first token, or of the first that is still there."""
        return max(0, -self.tokens_before)

    @property
    def first_character(self) -> int:
        """As `first_token`, in `text`."""
        return max(0, -self.characters_before)

    def push(self, ids: Sequence[int]) -> None:
        if len(self.ids) > WINDOW:
            self._trim()
        self.ids += ids
        self.text = final_text(self.ids, self._decode)

    def _trim(self) -> None:
        """Drop the older half, where a character begins; one of a few neighbours does."""
        half = len(self.ids) // 2
        for start in range(half, half - MISSING - 1, -1):
            text = final_text(self.ids[start:], self._decode)
            if self.text.endswith(text) and len(text) > self._reach:
                self.tokens_before += start
                self.characters_before += len(self.text) - len(text)
                self.ids = self.ids[start:]
                return


class StopStrings:
    """Watches one row for the first of `stops`: a plain loop over tokens would end there too.

    The first token that completes a stop string decides; among the stop strings in the text up to
    it, the earliest wins, then the longest. So the answer does not depend on how many tokens a
    round brings. `context` is what comes before the row, in which nothing is looked for. Raises
    ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], decode: Decode, context: Sequence[int] = ()) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty: it would end every answer before it begins")
        self.strings = tuple(stops)
        self.found: Stop | None = None
        self.reach = max(map(len, stops), default=1) - 1  # of a stop string still incomplete
        self.window = _Window(decode, self.reach, context)
        self._decode = decode

    def push(self, ids: Sequence[int]) -> Stop | None:
        """Take the next ids of the row; return where the answer stops, once it does."""
        if self.found is None:
            self.window.push(ids)
            if self._matches(self.window.text):
                self.found = self._locate()
        return self.found

    def _matches(self, text: str) -> list[tuple[int, int, str]]:
        """Stop strings in `text`, each with its place; the least one counts."""
        first = self.window.first_character
        places = ((text.find(s, first), s) for s in self.strings)
        return [(place, -len(s), s) for place, s in places if place >= 0]

    def _locate(self) -> Stop:
        """Walk the window by tokens, as a decoder without speculation would have."""
        window, first = self.window, self.window.first_token
        prefixes = [window.ids[:count] for count in range(first, len(window.ids) + 1)]
        texts = (final_text(prefix, self._decode) for prefix in prefixes)
        text = next(text for text in texts if self._matches(text))
        place, _, string = min(self._matches(text))
        tokens = next(
            count
            for count, prefix in enumerate(prefixes, first)
            if self._decode(prefix).startswith(text[:place])
        )
        return Stop(string, window.tokens_before + tokens, window.characters_before + place)


class TextStream:
    """The text of one row in pieces: together they are `decode` of all its ids, up to a stop.

    With a `context` they are what the ids add to its text, where a first space stays. Held back are
    unfinished characters and what may be the beginning of one of `stops`.
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._watch = StopStrings(stops, decode, context)
        self._sent = 0  # characters

    @property
    def stop(self) -> Stop | None:
        """The stop string that has ended the text, if any; later ids yield no text."""
        return self._watch.found

    @property
    def holds(self) -> bool:
        """Whether text of the ids so far has not been sent: a later id may end before it."""
        window = self._watch.window
        return window.characters_before + len(self._decode(window.ids)) > self._sent

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is final with them, perhaps none."""
        self._watch.push(ids)
        text = self._watch.window.text
        first = self._watch.window.first_character
        ends = range(max(first, len(text) - self._watch.reach), len(text))
        held = (end for end in ends if self._begins_a_stop(text[end:]))
        return self._send(text, next(held, len(text)))

    def flush(self) -> str:
        """Return what was held back; the row ends here."""
        text = self._decode(self._watch.window.ids)
        return self._send(text, len(text))

    def _begins_a_stop(self, tail: str) -> bool:
        return any(string.startswith(tail) for string in self._watch.strings)

    def _send(self, text: str, end: int) -> str:
        before = self._watch.window.characters_before
        if self.stop is not None:
            end = self.stop.characters - before
        piece = text[self._sent - before : end]
        self._sent += len(piece)
        return piece
