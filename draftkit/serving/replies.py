"""What a client is told, in OpenAI's words: whole answers, chunks of a stream, usage.

JSON values made from the pieces of the engine; nothing here waits, sends or decides.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftkit.online.buffer import Served
from draftkit.serving.jobs import Job, Piece, TokenScore
from draftkit.serving.protocol import Json
from draftkit.serving.texts import Texts

LEAST_LOG_PROB = -9999.0  # JSON knows no infinity; OpenAI's word for it


def bounded(log_prob: float | None) -> float | None:
    """A log-probability as JSON knows it; None for a prompt's first token, which has none."""
    return None if log_prob is None else max(LEAST_LOG_PROB, log_prob)


def speculative(speculations: Sequence[Served]) -> Json:
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


@dataclass(kw_only=True)
class CompletionReply:
    """The reply to one request while it grows, in the words of `/v1/completions`."""

    prefix = "cmpl"
    whole = chunk = "text_completion"  # the object that a reply is, and a chunk of a stream

    texts: Texts
    model: str
    jobs: Sequence[Job]  # one for each choice
    prompt_tokens: int
    has_logprobs: bool
    streams: bool
    tells_usage: tuple[bool, bool]  # at the end of a stream, and in each of its chunks
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.pieces: list[list[Piece]] = [[] for _ in self.jobs]  # what a stream sends is not kept
        self.tokens = 0

    def push(self, index: int, piece: Piece) -> None:
        """Take in what came for a choice."""
        self.tokens += len(piece.scores)
        if not self.streams:
            self.pieces[index].append(piece)

    def response(self) -> Json:
        """The whole reply."""
        parts, speculations = [], []
        for index, pieces in enumerate(self.pieces):
            text = self.message("".join(piece.text for piece in pieces))
            scores = [score for piece in pieces for score in (*piece.prompt, *piece.scores)]
            parts.append(self._part(index, text, scores, pieces[-1].finish_reason))
            speculations += [piece.speculation for piece in pieces if piece.speculation]
        head = self._head(self.whole, parts)
        return {**head, "usage": self._usage(), "speculative": speculative(speculations)}

    def opening(self) -> list[Json]:
        """The chunks before the first text."""
        return []

    def piece(self, index: int, piece: Piece) -> Json:
        """A chunk of a stream; the last one of a choice tells of its speculation."""
        scores = (*piece.prompt, *piece.scores)
        part = self._part(index, self.delta(piece.text), scores, piece.finish_reason)
        chunk = self._head(self.chunk, [part])
        if self.tells_usage[1]:
            chunk["usage"] = self._usage()  # of all choices so far
        if piece.speculation is not None:
            chunk["speculative"] = speculative([piece.speculation])
        return chunk

    def closing(self) -> list[Json]:
        """The chunk that tells the usage, where it is wanted."""
        return [self._head(self.chunk, []) | {"usage": self._usage()}] * self.tells_usage[0]

    def _head(self, kind: str, parts: list[Json]) -> Json:
        name = f"{self.prefix}-{self.name}"
        own = {"id": name, "created": self.created, "model": self.model}
        return {**own, "object": kind, "choices": parts}

    def _part(
        self, index: int, text: Json, scores: Sequence[TokenScore], finish_reason: str | None
    ) -> Json:
        logprobs = self.scored(scores) if self.has_logprobs else None
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _usage(self) -> Json:
        read, written = self.prompt_tokens, self.tokens
        counts = {"prompt_tokens": read, "completion_tokens": written}
        return counts | {"total_tokens": read + written}

    def message(self, text: str) -> Json:
        """The text as a whole response holds it."""
        return {"text": text}

    def delta(self, text: str) -> Json:
        """The text as a chunk holds it."""
        return {"text": text}

    def scored(self, scores: Sequence[TokenScore]) -> Json:
        """Log-probabilities of tokens that follow each other: three lists, an entry a token.

        Alternatives of the same text count once, the likeliest.
        """
        shown = self.texts.shown
        return {
            "tokens": [shown(score.token_id).readable for score in scores],
            "token_logprobs": [bounded(score.log_prob) for score in scores],
            "top_logprobs": [self._alternatives(score) for score in scores],
        }

    def _alternatives(self, score: TokenScore) -> Json | None:
        if score.log_prob is None:
            return None
        pairs = [*score.top, (score.token_id, score.log_prob)] if score.top else []
        by_text: Json = {}
        for token_id, log_prob in pairs:
            by_text.setdefault(self.texts.shown(token_id).readable, bounded(log_prob))
        return by_text


class ChatReply(CompletionReply):
    """The reply to one request while it grows, in the words of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def opening(self) -> list[Json]:
        delta = {"delta": {"role": "assistant", "content": ""}}
        ends = {"logprobs": None, "finish_reason": None}
        parts = [{"index": index, **delta, **ends} for index in range(len(self.jobs))]
        return [self._head(self.chunk, [part]) for part in parts]

    def message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def scored(self, scores: Sequence[TokenScore]) -> Json:
        """One list with an entry a token."""
        content = [
            self._entry(score.token_id, score.log_prob)
            | {"top_logprobs": [self._entry(*pair) for pair in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, log_prob: float | None) -> Json:
        shown = self.texts.shown(token_id)
        return {"token": shown.text, "logprob": bounded(log_prob), "bytes": shown.values}
