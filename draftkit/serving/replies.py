"""What a client is told, in OpenAI's words: whole answers, chunks of a stream, usage, errors.

JSON values made from the pieces of the engine; nothing here waits, sends or decides. Lists with an
entry a token are iterators, so that a long answer is made while it is encoded, a little at a time.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from draftkit.serving.jobs import Piece, Speculation, TokenScore
from draftkit.serving.texts import Offsets, Texts

LEAST_LOG_PROB = -9999.0  # JSON knows no infinity; OpenAI's word for it

Json = dict[str, Any]


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encode(value: object) -> bytes:
    """JSON as it is sent. Raises ValueError for NaN and infinity."""
    return in_utf8("".join(bits(value)))


def in_utf8(text: str) -> bytes:
    """JSON text in bytes, half of a character as JSON escapes it."""
    return text.encode("utf-8", "backslashreplace")


def bits(value: object) -> Iterator[str]:
    """`value` as JSON, each bit of it made when it is wanted.

    Iterators in it are lists; an entry of an iterator is one bit. Raises ValueError for NaN and
    infinity.
    """
    if isinstance(value, dict):
        yield "{"
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else ''}{_ENCODER.encode(name)}:"
            yield from bits(each)
        yield "}"
    elif isinstance(value, list | Iterator):
        yield "["
        for number, each in enumerate(value):
            if number:
                yield ","
            yield from bits(each) if isinstance(value, list) else [_ENCODER.encode(each)]
        yield "]"
    else:
        yield _ENCODER.encode(value)


class Failed(Exception):
    """A response in OpenAI's form that is no answer."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body: Json = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }
        self.status, self.headers = status, dict(headers or {})

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of plain JSON."""
    return Response(encode(content), status, headers, "application/json")


def speculative(found: Sequence[Speculation]) -> Json:
    """What speculation did for a response: the sum over its choices.

    acceptance_length: tokens for a pass of the target; alpha: mean of sum_x min(p, q) over the
    tested positions. Both are null where nothing was drafted.
    """
    rounds = sum(one.rounds for one in found)
    accepted = sum(one.accepted for one in found)
    tested = sum(one.tested for one in found)
    return {
        "rounds": rounds,
        "drafted": sum(one.drafted for one in found),
        "accepted": accepted,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "alpha": sum(one.acceptance for one in found) / tested if tested else None,
        "drafter_version": ", ".join(sorted({one.version for one in found})),
    }


@dataclass
class Choice:
    """One answer while it grows."""

    index: int
    offsets: Offsets
    keeps: bool  # what has come; a stream has sent it
    text: list[str] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None
    speculation: Speculation | None = None

    def push(self, piece: Piece) -> None:
        if self.keeps:
            self.text.append(piece.text)
            self.scores += piece.scores
        self.tokens += len(piece.scores)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.speculation = piece.speculation or self.speculation


class Form(ABC):
    """How one of the two kinds of response is written."""

    prefix: str
    whole: str  # the object that a response is
    chunk: str

    def __init__(self, texts: Texts, *, model: str, name: str, logprobs: bool) -> None:
        """`name`: of the response; `logprobs`: whether the client wants them."""
        self._texts = texts
        self._logprobs = logprobs
        self._head = {"id": f"{self.prefix}-{name}", "created": int(time.time()), "model": model}

    def response(self, choices: Sequence[Choice], echoes: Sequence[str], used: Json) -> Json:
        """The whole answer, for `bits`; each of its texts begins with its entry of `echoes`."""
        found = [choice.speculation for choice in choices if choice.speculation is not None]
        return {
            **self._head,
            "object": self.whole,
            "choices": [
                {
                    "index": choice.index,
                    **self.said(echo + "".join(choice.text)),
                    "logprobs": self._scored(choice.scores, choice.offsets),
                    "finish_reason": choice.finish_reason,
                }
                for choice, echo in zip(choices, echoes, strict=True)
            ],
            "usage": used,
            "speculative": speculative(found),
        }

    def piece(self, choice: Choice, piece: Piece) -> Json:
        """A chunk of a stream, for `bits`; the last one of a choice tells of its speculation."""
        part = {
            "index": choice.index,
            **self.added(piece.text),
            "logprobs": self._scored(piece.scores, choice.offsets),
            "finish_reason": piece.finish_reason,
        }
        chunk: Json = {**self._head, "object": self.chunk, "choices": [part]}
        if piece.speculation is not None:
            chunk["speculative"] = speculative([piece.speculation])
        return chunk

    def opening(self, choice: Choice) -> Json | None:
        """The chunk before the first text, if there is one."""
        return None

    def closing(self, used: Json) -> Json:
        """The chunk that tells the usage."""
        return {**self._head, "object": self.chunk, "choices": [], "usage": used}

    def _scored(self, scores: Sequence[TokenScore], offsets: Offsets) -> Json | None:
        return self.scored(scores, offsets) if self._logprobs else None

    @abstractmethod
    def said(self, text: str) -> Json:
        """The text as a whole response holds it."""

    @abstractmethod
    def added(self, text: str) -> Json:
        """The text as a chunk holds it."""

    @abstractmethod
    def scored(self, scores: Sequence[TokenScore], offsets: Offsets) -> Json:
        """Log-probabilities of tokens that follow each other, in iterators."""


class CompletionForm(Form):
    """`/v1/completions`."""

    prefix = "cmpl"
    whole = chunk = "text_completion"

    def said(self, text: str) -> Json:
        """The text under its name."""
        return {"text": text}

    added = said

    def scored(self, scores: Sequence[TokenScore], offsets: Offsets) -> Json:
        """Four lists, an entry a token; alternatives of the same text count once, the likeliest."""
        shown = self._texts.shown
        return {
            "tokens": (shown(score.token_id).readable for score in scores),
            "token_logprobs": (max(LEAST_LOG_PROB, score.log_prob) for score in scores),
            "top_logprobs": (self._alternatives(score) for score in scores),
            "text_offset": (offsets.push([score.token_id])[0] for score in scores),
        }

    def _alternatives(self, score: TokenScore) -> dict[str, float]:
        shown = self._texts.shown
        pairs = [*score.top, (score.token_id, score.log_prob)] if score.top else []
        found: dict[str, float] = {}
        for token_id, log_prob in pairs:
            found.setdefault(shown(token_id).readable, max(LEAST_LOG_PROB, log_prob))
        return found


class ChatForm(Form):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def said(self, text: str) -> Json:
        """The text as a message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def added(self, text: str) -> Json:
        """The text as a change of the message."""
        return {"delta": {"content": text} if text else {}}

    def opening(self, choice: Choice) -> Json:
        part = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return {**self._head, "object": self.chunk, "choices": [part]}

    def scored(self, scores: Sequence[TokenScore], offsets: Offsets) -> Json:
        """A list with an entry a token."""
        content = (
            self._entry(score.token_id, score.log_prob)
            | {"top_logprobs": [self._entry(*pair) for pair in score.top]}
            for score in scores
        )
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, log_prob: float) -> Json:
        shown = self._texts.shown(token_id)
        return {
            "token": shown.text,
            "logprob": max(LEAST_LOG_PROB, log_prob),
            "bytes": shown.values,
        }
