"""From a valid request to jobs for the engine: prompts as ids, limits, routes, defaults.

Raises ApiError for what the request asks and this server cannot give; knows no streams and no
sockets.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from starlette.datastructures import Headers

from draftkit.config import DEFAULT_ROUTE, SamplingConfig, ServeConfig
from draftkit.data.messages import read_messages
from draftkit.data.prompts import begun
from draftkit.serving.answers import Job
from draftkit.serving.protocol import SHOWN, ApiError, ChatRequest, CompletionRequest
from draftkit.serving.replies import Reply
from draftkit.serving.texts import Texts

ROUTE_HEADER = "x-draftkit-route"
RECORD_HEADER = "x-draftkit-record"


@dataclass(frozen=True, kw_only=True)
class Intake:
    """What requests are measured against."""

    texts: Texts
    settings: ServeConfig
    max_length: int  # tokens of prompt and answer
    sampling: SamplingConfig  # of requests that name none
    routes: Sequence[str]  # what ROUTE_HEADER may say
    model_name: str

    def prepare(self, body: CompletionRequest | ChatRequest, headers: Headers) -> Reply:
        """The reply to a request, with the jobs that make it. Slow for long texts."""
        self._check(body)
        shared: dict[str, Any] = {
            "sampling": body.sampling(self.sampling),
            "seed": body.seed,
            "stops": tuple(body.stop),
            "stop_token_ids": frozenset(body.stop_token_ids),
            "ignores_eos": body.ignore_eos,
            "top_logprobs": body.alternatives or 0,
            "route": self._route(headers),
            # What follows an end of text is nothing that a drafter should learn.
            "records": _records(headers) and not body.ignore_eos,
            "deadline": time.monotonic() + self.settings.request_seconds,
        }
        echoes: list[str] = []
        if isinstance(body, ChatRequest):
            messages, ids = self._chat(body)
            prompts, most = [ids], body.most_tokens or self.max_length - len(ids)
            shared |= {"continues": False, "conversation": conversation_of(messages)}
        else:
            most = body.max_tokens
            if body.echo and self.texts.start is not None:
                raise ApiError("echo: an encoder reads this model's prompts", param="echo")
            prompts = [self._ids(prompt, most) for prompt in body.prompt]
            echoes = [text if isinstance(text, str) else "" for text in body.prompt if body.echo]
        # The same prompt and seed give the same answers, whatever else the request asks.
        jobs = [
            Job(prompt_ids=prompt, echo=echo, row=row, max_new_tokens=most, **shared)
            for prompt, echo in zip_longest(prompts, echoes)
            for row in range(body.n)
        ]
        return Reply(body, jobs, self.texts)

    def _check(self, body: CompletionRequest | ChatRequest) -> None:
        """Refuse what a request cannot have, however long it is."""
        if body.model != self.model_name:
            raise no_model(body.model)
        body.check()
        prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
        room = self.settings.queue + self.settings.slots
        if prompts * body.n > room:
            raise ApiError(
                f"{prompts} prompts with n={body.n} are more answers than there is room for "
                f"({room}): send fewer at once",
                param="prompt",
            )

    def _ids(self, prompt: str | list[int], most: int) -> list[int]:
        """The ids of a prompt that fits together with `most` tokens of an answer."""
        ids = self.texts.encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError("prompt must not be empty: it has no token", param="prompt")
        ids = begun(ids, self.texts.start)
        self._check_length(len(ids), most, "prompt", bound="max_tokens")
        size = self.texts.vocab_size
        if (wrong := max(ids)) >= size:
            raise ApiError(f"prompt: token id {wrong} is not below {size}", param="prompt")
        return ids

    def _chat(self, body: ChatRequest) -> tuple[list[dict[str, Any]], list[int]]:
        """The turns as rows of data have them, with all that a template may read, and their ids."""
        code = None
        try:
            messages = read_messages(body.messages)
            code = "chat_template"
            ids = self.texts.chat(messages)
        except ValueError as error:
            raise ApiError(str(error), param="messages", code=code) from error
        bound = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self._check_length(len(ids), body.most_tokens or 1, "messages", bound=bound)
        return messages, ids

    def _check_length(self, tokens: int, most: int, param: str, *, bound: str) -> None:
        """`param` holds the prompt's tokens, `bound` how many may follow."""
        if tokens + most <= self.max_length:
            return
        what = f"{param} of {tokens} tokens"
        if tokens < self.max_length:
            what, param = f"{what} with {bound} {most}", bound
        raise ApiError(
            f"{what} does not fit the {self.max_length} tokens of a prompt and its answer",
            param=param,
            code="context_length_exceeded",
        )

    def _route(self, headers: Headers) -> str:
        route = headers.get(ROUTE_HEADER, DEFAULT_ROUTE)
        if route not in self.routes:
            raise ApiError(
                f"{ROUTE_HEADER} must be one of {', '.join(self.routes)}, got {route[:SHOWN]!r}",
                param=ROUTE_HEADER,
                code="unknown_route",
            )
        return route


def no_model(name: str) -> ApiError:
    """What to tell who asks for another model."""
    message = f"there is no model {name[:SHOWN]!r}: GET /v1/models lists what there is"
    return ApiError(message, status=404, code="model_not_found", param="model")


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """A name that all turns of a conversation share: a hash of it up to the first user turn.

    Later turns hold the answers to earlier ones, so all of them are learned from, or none.
    """
    first = next((i for i, turn in enumerate(messages) if turn["role"] == "user"), len(messages))
    content = json.dumps(messages[: first + 1], sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _records(headers: Headers) -> bool:
    """Whether the owner lets the request be recorded; one `no` among several headers suffices."""
    words = [value.strip().lower() for value in headers.getlist(RECORD_HEADER)]
    if wrong := [word for word in words if word not in ("yes", "no")]:
        shown = wrong[0][:SHOWN]
        raise ApiError(f"{RECORD_HEADER} must be yes or no, got {shown!r}", param=RECORD_HEADER)
    return "no" not in words
