"""From token ids to text while they arrive: pieces that stay, and stop strings.

A token is no unit of text. It may hold part of a character, a stop string may begin inside one
and end rounds later, and decoders drop the space before the first word. So ids are decoded
together with some that came before them, and only the difference counts. That context is bounded:
a round costs the same at any length of the answer.

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


class _Window:
    """The last ids of a row and their final text; what came before is counted.

    At least `reach` + 1 characters that were final before a push are still there after it.
    """

    def __init__(self, decode: Decode, reach: int) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.tokens_before = 0
        self.characters_before = 0
        self._decode = decode
        self._reach = reach

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
    round brings. Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty: it would end every answer before it begins")
        self.strings = tuple(stops)
        self.found: Stop | None = None
        self.reach = max(map(len, stops), default=1) - 1  # of a stop string still incomplete
        self.window = _Window(decode, self.reach)
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
        return [(text.index(s), -len(s), s) for s in self.strings if s in text]

    def _locate(self) -> Stop:
        """Walk the window by tokens, as a decoder without speculation would have."""
        window = self.window
        prefixes = [window.ids[:count] for count in range(len(window.ids) + 1)]
        texts = (final_text(prefix, self._decode) for prefix in prefixes)
        text = next(text for text in texts if self._matches(text))
        place, _, string = min(self._matches(text))
        tokens = next(
            count
            for count, prefix in enumerate(prefixes)
            if self._decode(prefix).startswith(text[:place])
        )
        return Stop(string, window.tokens_before + tokens, window.characters_before + place)


class TextStream:
    """The text of one row in pieces: together they are `decode` of all its ids, up to a stop.

    Held back are unfinished characters and what may be the beginning of one of `stops`.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._watch = StopStrings(stops, decode)
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
        ends = range(max(0, len(text) - self._watch.reach), len(text))
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
