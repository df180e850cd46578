"""From a valid request to jobs for the engine: prompts as ids, limits, routes, defaults.

Raises BadRequest for what the request asks and this server cannot give; knows no streams and no
sockets.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers

from draftkit.config import DEFAULT_ROUTE, SamplingConfig, ServeConfig
from draftkit.decoding.streaming import final_text
from draftkit.serving.jobs import Job
from draftkit.serving.protocol import (
    SHOWN,
    BadRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from draftkit.serving.replies import ChatForm, Choice, CompletionForm, Form
from draftkit.serving.texts import Offsets, Texts

ROUTE_HEADER = "x-draftkit-route"
RECORD_HEADER = "x-draftkit-record"
COMPLETION_TOKENS = 16  # where a completion names no bound, as OpenAI's


class UnknownModel(Exception):
    """No model of that name is served."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request, ready for the engine."""

    jobs: list[Job]
    choices: list[Choice]  # one for each job
    echoes: list[str]  # what each answer begins with
    prompt_tokens: int
    form: Form
    streams: bool
    includes_usage: bool


class Intake:
    """What requests are measured against."""

    def __init__(
        self,
        texts: Texts,
        settings: ServeConfig,
        *,
        max_length: int,
        sampling: SamplingConfig,
        routes: Sequence[str],
        model_name: str,
    ) -> None:
        """`max_length`: tokens of prompt and answer; `sampling`: where a request names none."""
        self._texts = texts
        self._settings = settings
        self._max_length = max_length
        self._sampling = sampling
        self._routes = routes
        self._model_name = model_name

    async def completion(self, body: CompletionRequest, headers: Headers, name: str) -> Asked:
        """The jobs of a completion; `name` is the request's own."""
        self._check_model(body)
        body.check()
        self._check_top(body.logprobs, "logprobs")
        prompts = body.prompts
        self._check_count(body, len(prompts))
        most = body.max_tokens or COMPLETION_TOKENS
        ids = [await self._ids(prompt, most) for prompt in prompts]
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = [await self._echo(prompt) for prompt in prompts]
        wants = body.logprobs is not None
        form = CompletionForm(self._texts, model=self._model_name, name=name, logprobs=wants)
        return self._asked(
            body,
            headers,
            form,
            ids=ids,
            echoes=echoes,
            most=most,
            top=body.logprobs or 0,
        )

    async def chat(self, body: ChatRequest, headers: Headers, name: str) -> Asked:
        """The jobs of a chat."""
        self._check_model(body)
        body.check()
        self._check_top(body.top_logprobs, "top_logprobs")
        self._check_count(body, 1)
        messages = [{"role": turn.role, "content": turn.text} for turn in body.messages]
        self._check_size(sum(len(turn["content"]) for turn in messages), "messages")
        try:
            ids = await asyncio.to_thread(self._texts.chat, messages)
        except ValueError as error:
            raise BadRequest(str(error), param="messages", code="chat_template") from error
        most = body.most_tokens or max(self._max_length - len(ids), 1)
        bound = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self._check_length(len(ids), most, param="messages", bound=bound)
        wants = bool(body.logprobs)
        form = ChatForm(self._texts, model=self._model_name, name=name, logprobs=wants)
        return self._asked(
            body,
            headers,
            form,
            ids=[ids],
            echoes=[""],
            most=most,
            top=body.top_logprobs or 0,
            conversation=conversation_of(messages),
        )

    def _asked(
        self,
        body: GenerationRequest,
        headers: Headers,
        form: Form,
        *,
        ids: list[list[int]],
        echoes: list[str],
        most: int,
        top: int,
        conversation: str = "",
    ) -> Asked:
        shared = {
            "max_new_tokens": most,
            "continues": isinstance(body, CompletionRequest),
            "sampling": body.sampling(self._sampling),
            "seed": body.seed,
            "stops": body.stops,
            "top_logprobs": top,
            "route": self._route(headers),
            "conversation": conversation,
            "records": _records(headers),
            "deadline": time.monotonic() + self._settings.request_seconds,
        }
        # The same prompt and seed give the same answers, whatever else the request asks.
        jobs = [
            Job(prompt_ids=prompt, row=row, **shared)
            for prompt in ids
            for row in range(body.choices)
        ]
        starts = [echo for echo in echoes for _ in range(body.choices)]
        return Asked(
            jobs=jobs,
            choices=[
                Choice(
                    index,
                    Offsets(self._texts, len(start), before=job.prompt_ids),
                    keeps=not body.stream,
                )
                for index, (job, start) in enumerate(zip(jobs, starts, strict=True))
            ],
            echoes=starts,
            prompt_tokens=sum(map(len, ids)),
            form=form,
            streams=bool(body.stream),
            includes_usage=body.includes_usage,
        )

    async def _ids(self, prompt: str | list[int], most: int) -> list[int]:
        """The ids of a prompt that fits together with `most` tokens of an answer.

        Encoding long texts takes a while: not on the event loop.
        """
        if isinstance(prompt, str):
            self._check_size(len(prompt), "prompt")
            ids = await asyncio.to_thread(self._texts.encode, prompt)
        else:
            ids = prompt
        if not ids:
            raise BadRequest("prompt must not be empty: it has no token", param="prompt")
        self._check_length(len(ids), most, param="prompt", bound="max_tokens")
        size = self._texts.vocab_size
        if (wrong := max(ids)) >= size:
            raise BadRequest(f"prompt: token id {wrong} is not below {size}", param="prompt")
        return ids

    async def _echo(self, prompt: str | list[int]) -> str:
        """What an answer to `prompt` begins with: a character that it cuts off is the answer's."""
        if isinstance(prompt, str):
            return prompt
        return await asyncio.to_thread(final_text, prompt, self._texts.decode)

    def _check_model(self, body: GenerationRequest) -> None:
        if body.model != self._model_name:
            raise UnknownModel(body.model)

    def _check_top(self, asked: int | None, param: str) -> None:
        most = self._settings.top_logprobs
        if (asked or 0) > most:
            raise BadRequest(f"{param} must be at most {most}, got {asked}", param=param)

    def _check_count(self, body: GenerationRequest, prompts: int) -> None:
        most, room = self._settings.max_choices, self._settings.queue + self._settings.slots
        if body.choices > most:
            raise BadRequest(f"n must be at most {most}, got {body.choices}", param="n")
        if prompts * body.choices > room:
            raise BadRequest(
                f"{prompts} prompts with n={body.choices} are more answers than there is room for "
                f"({room}): send fewer at once",
                param="prompt",
            )

    def _check_size(self, characters: int, param: str) -> None:
        """Refuse texts that cannot fit before they are encoded."""
        least = characters // self._texts.longest_token
        if least > self._max_length:
            raise self._too_long(f"{param} of at least {least} tokens", param)

    def _check_length(self, tokens: int, most: int, *, param: str, bound: str) -> None:
        """`param` holds the prompt's tokens, `bound` how many may follow."""
        what = f"{param} of {tokens} tokens"
        if tokens >= self._max_length:
            raise self._too_long(what, param)
        if tokens + most > self._max_length:
            raise self._too_long(f"{what} with {bound} {most}", bound)

    def _too_long(self, what: str, param: str) -> BadRequest:
        return BadRequest(
            f"{what} does not fit the {self._max_length} tokens of a prompt and its answer",
            param=param,
            code="context_length_exceeded",
        )

    def _route(self, headers: Headers) -> str:
        route = headers.get(ROUTE_HEADER, DEFAULT_ROUTE)
        if route not in self._routes:
            raise BadRequest(
                f"{ROUTE_HEADER} must be one of {', '.join(self._routes)}, got {route[:SHOWN]!r}",
                param=ROUTE_HEADER,
                code="unknown_route",
            )
        return route


def conversation_of(messages: Sequence[Mapping[str, str]]) -> str:
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
        raise BadRequest(f"{RECORD_HEADER} must be yes or no, got {shown!r}", param=RECORD_HEADER)
    return "no" not in words
