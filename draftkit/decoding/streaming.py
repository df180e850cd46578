"""From token ids to text while they arrive: pieces that stay, and stop strings.

A token is no unit of text. It may hold part of a character, a stop string may begin inside one
and end rounds later, and decoders drop the space before the first word. So ids are decoded
together with some that came before them, those of a prompt at first, and only the difference
counts. That context is bounded: a round costs the same at any length of the answer.

`detokenize` is any function from ids to text that only appends: more ids extend the text, except
that they may replace U+FFFD signs at its end, which stand for characters with bytes still missing.
Byte-level and SentencePiece decoders are such functions once nothing cleans up spaces behind
them. Byte fallback is one while its bytes are well-formed; in a run that is not, it takes back
characters it has shown. They stay here, and U+FFFD signs may be counted differently.

Knows no models and no tensors; characters are code points.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Detokenize = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"
MISSING = 3  # of a character's at most 4 bytes, each perhaps a token
WINDOW = 32  # ids that are decoded again; above that, the older half goes
CONTEXT = (8, 32)  # ids of what comes before a text; more where fewer have no text


class Stop(NamedTuple):
    """Where a stop string ends an answer."""

    string: str
    tokens: int  # the fewest whose text contains the answer
    characters: int  # of the answer: the text before the stop string


def final_text(ids: list[int], detokenize: Detokenize) -> str:
    """The part of the text of `ids` that no further id can change.

    One U+FFFD at the end may be an unfinished character. Several may also be finished ones that
    share a run of byte tokens with it (byte fallback shows all or nothing of a run): then the text
    without the last few tokens tells. Where it does not, the bytes are ill-formed and stay so.
    """
    text = detokenize(ids)
    stable = text.rstrip(REPLACEMENT)
    if len(text) - len(stable) <= 1:
        return stable
    for missing in range(1, MISSING + 1):
        shorter = detokenize(ids[:-missing])
        if not shorter.endswith(REPLACEMENT):
            return max(stable, shorter, key=len)
    return text[:-1]


def context_of(ids: Sequence[int], detokenize: Detokenize) -> list[int]:
    """The last of `ids` that text behind them depends on.

    They have text themselves, lest a space behind them be dropped, and begin with a character: in
    byte fallback one that is cut off spoils the run of bytes behind it.
    """
    for count in CONTEXT:
        for start in range(len(ids) - count, len(ids) - count - MISSING - 1, -1):
            kept = list(ids[max(0, start) :])
            text = final_text(kept, detokenize)
            if start <= 0 or (text and not text.startswith(REPLACEMENT)):
                return kept
    return list(ids[-CONTEXT[0] :])


class TextStream:
    """The text of one row in pieces: together they are `detokenize` of all its ids, up to a stop.

    With a `context`, ids that come before the row, they are what the row's ids add to its text,
    where a first space stays. Held back are unfinished characters and what may be the beginning of
    one of `stops`. Once one is complete, `stop` says where the text has ended; later ids yield
    none. A plain loop over tokens would end there too: the first token that completes a stop string
    decides; among the stop strings in the text up to it, the earliest wins, then the longest. So
    the answer does not depend on how many tokens a round brings. Nothing is looked for in the
    context. Raises ValueError for an empty stop string.
    """

    def __init__(
        self, detokenize: Detokenize, stops: Sequence[str] = (), context: Sequence[int] = ()
    ) -> None:
        if "" in stops:
            raise ValueError("a stop string is empty: it would end every answer before it begins")
        self.stop: Stop | None = None
        self._detokenize = detokenize
        self._stops = tuple(stops)
        self._reach = max(map(len, stops), default=1) - 1  # of a stop string still incomplete
        # The last ids, and their final text. What came before is counted from the row's beginning:
        # below 0, it lies in the context.
        self._ids = context_of(context, detokenize)
        self._text = final_text(self._ids, detokenize)
        self._tokens_before = -len(self._ids)
        self._characters_before = -len(self._text)
        self._sent = 0  # characters

    @property
    def holds(self) -> bool:
        """Whether text of the ids so far has not been sent: a later id may end before it."""
        return self._characters_before + len(self._detokenize(self._ids)) > self._sent

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is final with them, perhaps none."""
        if self.stop is None:
            if len(self._ids) > WINDOW:
                self._trim()
            self._ids += ids
            self._text = final_text(self._ids, self._detokenize)
            if self._matches(self._text):
                self.stop = self._locate()
        text = self._text
        ends = range(max(0, -self._characters_before, len(text) - self._reach), len(text))
        held = (end for end in ends if any(stop.startswith(text[end:]) for stop in self._stops))
        return self._send(text, next(held, len(text)))

    def flush(self) -> str:
        """Return what was held back; the row ends here."""
        text = self._detokenize(self._ids)
        return self._send(text, len(text))

    def _send(self, text: str, end: int) -> str:
        if self.stop is not None:
            end = self.stop.characters - self._characters_before
        piece = text[self._sent - self._characters_before : end]
        self._sent += len(piece)
        return piece

    def _trim(self) -> None:
        """Drop the older half of the ids, where a character begins; one of a few neighbours does.

        Characters that may begin a stop string stay.
        """
        half = len(self._ids) // 2
        for start in range(half, half - MISSING - 1, -1):
            text = final_text(self._ids[start:], self._detokenize)
            if self._text.endswith(text) and len(text) > self._reach:
                self._tokens_before += start
                self._characters_before += len(self._text) - len(text)
                self._ids = self._ids[start:]
                return

    def _matches(self, text: str) -> list[tuple[int, int, str]]:
        """Stop strings in `text`, each with its index; the least one counts."""
        starts = ((text.find(stop, max(0, -self._characters_before)), stop) for stop in self._stops)
        return [(start, -len(stop), stop) for start, stop in starts if start >= 0]

    def _locate(self) -> Stop:
        """Walk the ids by tokens, as a decoder without speculation would have."""
        first = max(0, -self._tokens_before)
        prefixes = [self._ids[:count] for count in range(first, len(self._ids) + 1)]
        texts = (final_text(prefix, self._detokenize) for prefix in prefixes)
        text = next(text for text in texts if self._matches(text))
        start, _, string = min(self._matches(text))
        # Text that is the context's needs none of the row's ids, even where its last character
        # shows with one of them only.
        at_once = self._characters_before + start == 0
        tokens = next(
            count
            for count, prefix in enumerate(prefixes, first)
            if at_once or self._detokenize(prefix).startswith(text[:start])
        )
        return Stop(string, self._tokens_before + tokens, self._characters_before + start)
