"""What a client may ask, in OpenAI's words: the request bodies and how a wrong one is answered.

A description of a field is its rule, and the message about a value that breaks it: "temperature
must be 0 (greedy) or lie in [0.001, 10], got -1". What OpenAI defines and this server does not
do is accepted at its neutral value only; an unknown parameter is refused, since a misspelt one
would be ignored in silence. Errors have OpenAI's form with one line of reason. This module knows no
engine, no tokenizer and no routes.
"""

import difflib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from draftkit.config import SamplingConfig

Json = dict[str, Any]
LARGEST_SEED = 2**63 - 1
MOST_STOPS = 16
MOST_CHOICES = 16  # of a prompt
COMPLETION_TOKENS = 16  # where a completion names no bound, as OpenAI's
MOST_PROMPTS = 4096  # no longer list is looked through
_PARTS = ("role", "content", "type", "text")  # of a message, that an error may lie in
SHOWN = 60  # characters of a wrong value that an error message repeats
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


def encode(value: object) -> bytes:
    """JSON as it is sent, half of a character as an escape. Raises ValueError for NaN, infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_response(
    content: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(encode(content), status, headers, "application/json")


class ApiError(HTTPException):
    """Why a request is not answered: the status, OpenAI's code, and the parameter to blame."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    def __str__(self) -> str:
        return self.detail

    @property
    def body(self) -> Json:
        other = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = _KINDS.get(self.status_code, other)
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status_code, self.headers)


def _known_temperature(value: object) -> object:
    """Temperatures between 0 and 0.001 would overflow float32 logits: they are refused."""
    if isinstance(value, float) and 0 < value < 1e-3:
        raise ValueError("too close to 0")
    return value


def _neutral(*values: object) -> BeforeValidator:
    """Only these values of a parameter that may be named but not used."""

    def check(value: object) -> object:
        if not any(value == known and type(value) is type(known) for known in values):
            raise ValueError("not supported")
        return None

    return BeforeValidator(check)


def _well_formed(text: str) -> str:
    """JSON can name half of a character, which has no bytes: UnicodeEncodeError for that."""
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_well_formed)]
Temperature = Annotated[float, BeforeValidator(_known_temperature), Field(ge=0, le=10)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
StopStrings = Annotated[list[StopString], Field(fail_fast=True, max_length=MOST_STOPS)]
Absent = Annotated[
    Any, _neutral(None, [], {}, ""), Field(description="be absent: this server does not do it")
]
Zero = Annotated[
    Any,
    _neutral(None, 0, 0.0),
    Field(description="be 0: this penalty is not supported, repetition_penalty is"),
]
PlainText = Annotated[
    Any, _neutral(None, {"type": "text"}), Field(description='be {"type": "text"}')
]
NoTool = Annotated[
    Any,
    _neutral(None, "none", "auto"),
    Field(description='be "none" or "auto": tools are not supported'),
]
TextOnly = Annotated[Any, _neutral(None, ["text"]), Field(description='be ["text"]')]
Ignored = Annotated[Any, Field(description="be anything: it has no effect")]


class StreamOptions(BaseModel):
    """What a stream brings beside the text."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class GenerationRequest(BaseModel):
    """What completions and chats share."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: Text = Field(description="be the name of a model that /v1/models lists")
    n: int | None = Field(
        None, ge=1, le=MOST_CHOICES, description=f"be an integer from 1 to {MOST_CHOICES}"
    )
    temperature: Temperature | None = Field(None, description="be 0 (greedy) or lie in [0.001, 10]")
    top_p: float | None = Field(None, ge=1e-6, le=1, description="lie in [0.000001, 1]")
    top_k: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="be a positive integer, or 0 or -1 to keep all"
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="lie in [0.01, 100] (1: none)"
    )
    seed: int | None = Field(
        None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED, description="be an integer of at most 64 bits"
    )
    stop: StopString | StopStrings | None = Field(
        None,
        description=f"be a string or a list of at most {MOST_STOPS}, each of 1 to 256 characters",
    )
    max_tokens: int | None = Field(None, ge=1, description="be an integer of at least 1")
    stream: bool | None = Field(None, description="be true or false")
    stream_options: StreamOptions | None = Field(
        None, description='be {"include_usage": true or false}'
    )
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Absent = None
    user: Ignored = None
    metadata: Ignored = None

    @property
    def choices(self) -> int:
        """How many answers each prompt gets."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raise ApiError for parameters that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream to be true", param="stream_options")

    def sampling(self, served: SamplingConfig) -> SamplingConfig:
        """The served sampling with what the request names in its place."""
        names = {field.name for field in fields(served)}
        named = self.model_dump(include=names, exclude_none=True)
        return replace(served, **named | ({"top_k": 0} if self.top_k == -1 else {}))


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    ) = Field(
        description=f"be a string, token ids, or a list of at most {MOST_PROMPTS} of either, "
        "and not empty"
    )
    echo: bool | None = Field(None, description="be true or false")
    logprobs: int | None = Field(None, ge=0, description="be an integer of at least 0")
    best_of: int | None = Field(None, description="equal n: nothing is ranked")
    suffix: Absent = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One text or list of ids for each prompt."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or COMPLETION_TOKENS

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens each one is shown with; None: not even its own score."""
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.choices):
            raise ApiError(f"best_of must equal n, got {self.best_of}", param="best_of")
        if self.echo and self.logprobs is not None:
            raise ApiError(
                "echo with logprobs is not supported: tokens of the prompt are not scored",
                param="echo",
            )


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(strict=True)
    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One turn of a chat; what clients send back with an answer beside these is ignored."""

    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] = Field(
        description="be a list of messages, each with a role and a content that is text"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="be an integer of at least 1")
    logprobs: bool | None = Field(None, description="be true or false")
    top_logprobs: int | None = Field(None, ge=0, description="be an integer of at least 0")
    response_format: PlainText = None
    tools: Absent = None
    tool_choice: NoTool = None
    parallel_tool_calls: Ignored = None
    modalities: TextOnly = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    @property
    def most_tokens(self) -> int | None:
        """The bound on the answer under either name, None for what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """As a completion's."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.max_tokens is not None and self.max_tokens != self.most_tokens:
            raise ApiError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.most_tokens} differ",
                param="max_tokens",
            )


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, str) else repr(value[:SHOWN])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def explain(errors: Sequence[Mapping[str, Any]], request: type[BaseModel]) -> ApiError:
    """The one line about a body that `request` refuses, from pydantic's list of `errors`.

    Of several errors the first one counts.
    """
    error = errors[0]
    path, known = [str(part) for part in error["loc"][1:]], request.model_fields
    if error["type"] == "json_invalid":
        reason = error.get("ctx", {}).get("error", "malformed")
        return ApiError(f"the body is no JSON: {reason}", code="invalid_json")
    if not path:
        return ApiError("the body must be a JSON object", code="invalid_body")
    name = path[0]
    if name not in known:
        near = difflib.get_close_matches(name[:SHOWN], known, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        return ApiError(
            f"there is no parameter {_shown(name)}{hint}",
            param=name[:SHOWN],
            code="unknown_parameter",
        )
    if error["type"] == "missing" and len(path) == 1:
        return ApiError(f"{name} is missing", param=name, code="missing_parameter")
    # Of the alternatives of a type pydantic names each: no word to a client.
    plain = list(itertools.takewhile(lambda part: part.isdigit() or part in _PARTS, path[1:]))
    where = f" (at {'.'.join([name, *plain])})" if plain else ""
    return ApiError(
        f"{name} must {known[name].description}, got {_shown(error['input'])}{where}", param=name
    )
