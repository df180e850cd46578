"""What a client is told, in OpenAI's words: whole replies, chunks of a stream, usage.

JSON values made from the pieces of the engine; nothing here waits, sends or decides.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from draftkit.online.buffer import Served
from draftkit.serving.answers import Job, Piece, TokenScore
from draftkit.serving.protocol import ChatRequest, CompletionRequest, Json, StreamOptions
from draftkit.serving.texts import Texts

LEAST_LOG_PROB = -9999.0  # JSON knows no infinity; OpenAI's word for it


def bounded(log_prob: float | None) -> float | None:
    """A log-probability as JSON knows it; None for a prompt's first token, which has none."""
    return None if log_prob is None else max(LEAST_LOG_PROB, log_prob)


class Usage(BaseModel):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Speculative(BaseModel):
    """What speculation did for a response: the sum over its choices.

    acceptance_length: tokens for a pass of the target; alpha: mean of sum_x min(p, q) over the
    tested positions. Both are null where nothing was drafted.
    """

    rounds: int
    drafted: int
    accepted: int
    acceptance_length: float | None
    alpha: float | None
    drafter_version: str

    @classmethod
    def of(cls, choices: Sequence[Served]) -> "Speculative":
        rounds, accepted, tested = (
            sum(getattr(one, name) for one in choices) for name in ("rounds", "accepted", "tested")
        )
        return cls(
            rounds=rounds,
            drafted=sum(one.drafted for one in choices),
            accepted=accepted,
            acceptance_length=1 + accepted / rounds if rounds else None,
            alpha=sum(one.acceptance for one in choices) / tested if tested else None,
            drafter_version=", ".join(sorted({one.version for one in choices})),
        )


class ReplyBody(BaseModel):
    """A reply, or a chunk of one that is streamed; what is not set is left out."""

    id: str
    created: int
    model: str
    object: str
    choices: list[Json]
    usage: Usage | None = None
    speculative: Speculative | None = None


class Reply:
    """What is told of the answers to one request, each a choice of it, whole or as they grow."""

    def __init__(
        self, request: CompletionRequest | ChatRequest, jobs: Sequence[Job], texts: Texts
    ) -> None:
        """`jobs`: one for each choice."""
        self.request, self.jobs, self._texts = request, jobs, texts
        self.streams = request.stream
        self._options = request.stream_options or StreamOptions()
        self._is_chat = isinstance(request, ChatRequest)
        self._kind = "chat.completion" if self._is_chat else "text_completion"
        if self._is_chat and self.streams:
            self._kind += ".chunk"
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._name, self._created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self._read = sum(len(job.prompt_ids) for job in jobs) // request.n
        self._written = 0  # tokens that have been sent

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The reply, of all pieces of each choice."""
        self._written = sum(len(piece.scores) for some in pieces for piece in some)
        choices = [self._choice(index, some) for index, some in enumerate(pieces)]
        ends = [some[-1].speculation for some in pieces]
        speculative = Speculative.of([end for end in ends if end is not None])
        return self._body(choices, usage=self._usage(), speculative=speculative)

    def opening(self) -> list[Json]:
        """The chunks of a stream before its first text."""
        if not self._is_chat:
            return []
        delta = {"delta": {"role": "assistant", "content": ""}}
        ends = {"logprobs": None, "finish_reason": None}
        return [self._body([{"index": i, **delta, **ends}]) for i in range(len(self.jobs))]

    def chunk(self, index: int, piece: Piece) -> Json:
        """The next chunk of a stream; the last one of a choice tells of its speculation."""
        self._written += len(piece.scores)
        more: Json = {}
        if self._options.include_usage and self._options.continuous_usage_stats:
            more["usage"] = self._usage()  # of all choices so far
        if piece.speculation is not None:
            more["speculative"] = Speculative.of([piece.speculation])
        return self._body([self._choice(index, [piece])], **more)

    def closing(self) -> list[Json]:
        """The chunk that tells the usage, where it is wanted."""
        wanted = self._options.include_usage
        return [self._body([], usage=self._usage())] if wanted else []

    def _body(self, choices: list[Json], **more: Any) -> Json:
        own: Json = {"id": self._name, "created": self._created, "model": self.request.model}
        body = ReplyBody(**own, object=self._kind, choices=choices, **more)
        return body.model_dump(exclude_unset=True)

    def _usage(self) -> Usage:
        read, written = self._read, self._written
        return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written)

    def _choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        text = "".join(piece.text for piece in pieces)
        content: Json = {"text": text}
        if self._is_chat and self.streams:
            content = {"delta": {"content": text} if text else {}}
        elif self._is_chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        scores = [score for piece in pieces for score in (*piece.prompt, *piece.scores)]
        scored = self._in_a_chat if self._is_chat else self._in_a_text
        logprobs = None if self.request.alternatives is None else scored(scores)
        ends = {"logprobs": logprobs, "finish_reason": pieces[-1].finish_reason}
        return {"index": index, **content, **ends}

    def _in_a_text(self, scores: Sequence[TokenScore]) -> Json:
        """Log-probabilities of tokens that follow each other: three lists, an entry a token.

        Alternatives of the same text count once, the likeliest.
        """
        tops: list[Json | None] = []
        for score in scores:
            pairs = [*score.top, (score.token_id, score.log_prob)] if score.top else []
            by_text: Json = {}
            for token_id, log_prob in pairs:
                by_text.setdefault(self._readable(token_id), bounded(log_prob))
            tops.append(None if score.log_prob is None else by_text)
        return {
            "tokens": [self._readable(score.token_id) for score in scores],
            "token_logprobs": [bounded(score.log_prob) for score in scores],
            "top_logprobs": tops,
        }

    def _readable(self, token_id: int) -> str:
        """A token as text; part of a character as OpenAI writes it, `bytes:\\xe2`."""
        content = self._texts.token_bytes(token_id)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _in_a_chat(self, scores: Sequence[TokenScore]) -> Json:
        """One list with an entry a token."""

        def entry(token_id: int, log_prob: float | None) -> Json:
            content = self._texts.token_bytes(token_id)
            text = content.decode("utf-8", "replace")
            return {"token": text, "logprob": bounded(log_prob), "bytes": [*content]}

        content = [
            entry(score.token_id, score.log_prob)
            | {"top_logprobs": [entry(*pair) for pair in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}
