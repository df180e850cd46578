"""What a client is told, in OpenAI's words: whole answers, chunks of a stream, usage.

JSON values made from the pieces of the engine; nothing here waits, sends or decides. Lists with an
entry a token are iterators, so that a long answer is made while it is encoded.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftkit.serving.jobs import Piece, Speculation, TokenScore
from draftkit.serving.texts import Offsets, Texts
from draftkit.serving.wire import Json

LEAST_LOG_PROB = -9999.0  # JSON knows no infinity; OpenAI's word for it


def speculative(speculations: Sequence[Speculation]) -> Json:
    """What speculation did for a response: the sum over its choices.

    acceptance_length: tokens for a pass of the target; alpha: mean of sum_x min(p, q) over the
    tested positions. Both are null where nothing was drafted.
    """
    rounds = sum(one.rounds for one in speculations)
    accepted = sum(one.accepted for one in speculations)
    tested = sum(one.tested for one in speculations)
    return {
        "rounds": rounds,
        "drafted": sum(one.drafted for one in speculations),
        "accepted": accepted,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "alpha": sum(one.acceptance for one in speculations) / tested if tested else None,
        "drafter_version": ", ".join(sorted({one.version for one in speculations})),
    }


@dataclass
class Choice:
    """One answer while it grows."""

    index: int
    offsets: Offsets
    keeps: bool  # what has come; a stream has sent it
    echo: str = ""  # what it begins with
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


class CompletionForm:
    """How a response of `/v1/completions` is written."""

    prefix = "cmpl"
    whole = chunk = "text_completion"  # the object that a response is, and a chunk of a stream

    def __init__(self, texts: Texts, *, model: str, name: str, logprobs: bool) -> None:
        """`name`: of the response; `logprobs`: whether the client wants them."""
        self._texts = texts
        self._logprobs = logprobs
        self._head = {"id": f"{self.prefix}-{name}", "created": int(time.time()), "model": model}

    def response(self, choices: Sequence[Choice], usage: Json) -> Json:
        """The whole answer, for `bits`."""
        parts = []
        for choice in choices:
            text = self.message(choice.echo + "".join(choice.text))
            parts.append(self._part(choice, text, choice.scores, choice.finish_reason))
        return {
            **self._head,
            "object": self.whole,
            "choices": parts,
            "usage": usage,
            "speculative": speculative([one.speculation for one in choices if one.speculation]),
        }

    def piece(self, choice: Choice, piece: Piece) -> Json:
        """A chunk of a stream, for `bits`; the last one of a choice tells of its speculation."""
        text = self.delta(piece.text)
        chunk = self._chunk([self._part(choice, text, piece.scores, piece.finish_reason)])
        if piece.speculation is not None:
            chunk["speculative"] = speculative([piece.speculation])
        return chunk

    def opening(self, choice: Choice) -> Json | None:
        """The chunk before the first text, if there is one."""
        return None

    def closing(self, usage: Json) -> Json:
        """The chunk that tells the usage."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, parts: list[Json]) -> Json:
        return {**self._head, "object": self.chunk, "choices": parts}

    def _part(
        self, choice: Choice, text: Json, scores: Sequence[TokenScore], finish_reason: str | None
    ) -> Json:
        logprobs = self.scored(scores, choice.offsets) if self._logprobs else None
        ends = {"logprobs": logprobs, "finish_reason": finish_reason}
        return {"index": choice.index, **text, **ends}

    def message(self, text: str) -> Json:
        """The text as a whole response holds it."""
        return {"text": text}

    def delta(self, text: str) -> Json:
        """The text as a chunk holds it."""
        return {"text": text}

    def scored(self, scores: Sequence[TokenScore], offsets: Offsets) -> Json:
        """Log-probabilities of tokens that follow each other: four lists, an entry a token.

        Alternatives of the same text count once, the likeliest.
        """
        shown = self._texts.shown
        return {
            "tokens": (shown(score.token_id).readable for score in scores),
            "token_logprobs": (max(LEAST_LOG_PROB, score.log_prob) for score in scores),
            "top_logprobs": (self._alternatives(score) for score in scores),
            "text_offset": (offsets.push(score.token_id) for score in scores),
        }

    def _alternatives(self, score: TokenScore) -> dict[str, float]:
        pairs = [*score.top, (score.token_id, score.log_prob)] if score.top else []
        by_text: dict[str, float] = {}
        for token_id, log_prob in pairs:
            by_text.setdefault(self._texts.shown(token_id).readable, max(LEAST_LOG_PROB, log_prob))
        return by_text


class ChatForm(CompletionForm):
    """How a response of `/v1/chat/completions` is written."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self, choice: Choice) -> Json:
        delta = {"delta": {"role": "assistant", "content": ""}}
        ends = {"logprobs": None, "finish_reason": None}
        return self._chunk([{"index": choice.index, **delta, **ends}])

    def message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def scored(self, scores: Sequence[TokenScore], offsets: Offsets) -> Json:
        """One list with an entry a token."""
        content = (
            self._entry(score.token_id, score.log_prob)
            | {"top_logprobs": [self._entry(*pair) for pair in score.top]}
            for score in scores
        )
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, log_prob: float) -> Json:
        shown = self._texts.shown(token_id)
        log_prob = max(LEAST_LOG_PROB, log_prob)
        return {"token": shown.text, "logprob": log_prob, "bytes": shown.values}
