"""What a client may ask, in OpenAI's words: the request bodies and how a wrong one is answered.

A parameter of OpenAI's that this server does not do is taken at the value that changes nothing; an
unknown one is refused unless it is null: a misspelt one would be ignored in silence. Errors have
OpenAI's form with one line of reason. This module knows no engine, no tokenizer and no routes.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.responses import Response

from draftkit.config import SamplingConfig

Json = dict[str, Any]
LARGEST_SEED = 2**63 - 1
MOST_STOPS = 16
TOP_LOGPROBS = 20  # the most alternatives that a request may ask for
MOST_CHOICES = 16  # of a prompt
COMPLETION_TOKENS = 16  # where a completion names no bound, as OpenAI's
MOST_PROMPTS = 4096  # no longer list is looked through
SHOWN = 60  # characters of a wrong value that an error message repeats
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


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

    @property
    def body(self) -> Json:
        other = "invalid_request_error" if self.status_code < 500 else "server_error"
        name = ERROR_TYPES.get(self.status_code, other)
        error = {"message": self.detail, "type": name, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> Response:
        return json_response(self.body, self.status_code, self.headers)


def _known_temperature(value: float) -> float:
    """Temperatures between 0 and 0.001 would overflow float32 logits: they are refused."""
    if 0 < value < 1e-3:
        raise ValueError("must be 0 (greedy) or lie in [0.001, 10]")
    return value


def _well_formed(text: str) -> str:
    """JSON can name half of a character, which has no bytes: UnicodeEncodeError for that."""
    text.encode()
    return text


def _listed(value: Any) -> Any:
    """One text, or the ids of one, as a list of it."""
    first = value[0] if isinstance(value, list) and value else value
    return [value] if isinstance(value, str) or isinstance(first, int) else value


Text = Annotated[str, AfterValidator(_well_formed)]
Temperature = Annotated[float, Field(ge=0, le=10), AfterValidator(_known_temperature)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Prompts = (
    Annotated[list[Text], Field(fail_fast=True)]
    | Annotated[list[Annotated[Ids, Field(min_length=1)]], Field(fail_fast=True)]
)
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
# What OpenAI defines and this server does not do: only the value that changes nothing.
_UNDONE = "or absent: this server does not do it"
Zero = Annotated[float, Field(ge=0, le=0, description=f"0 {_UNDONE}")]
Empty = Annotated[
    list[Any] | dict[str, Any] | str, Field(max_length=0, description=f"empty {_UNDONE}")
]
Ignored = Any


class Strict(BaseModel):
    """Nothing unknown. Null is absence: clients send it for whatever their user has left out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None}


class PlainText(Strict):
    """The one format of an answer."""

    type: Literal["text"]


class StreamOptions(Strict):
    """What a stream brings beside the text."""

    include_usage: bool = False  # at its end
    continuous_usage_stats: bool = False  # then in each chunk too
    include_obfuscation: Ignored = None


class GenerationRequest(Strict):
    """What completions and chats share. Of sampling the server has its own defaults."""

    model: Text
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    temperature: Temperature = 1.0
    top_p: float = Field(1.0, ge=1e-6, le=1)
    top_k: int = Field(-1, ge=-1, le=2**31 - 1)  # 0 or -1: all
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED)
    stop: Annotated[list[StopString], BeforeValidator(_listed)] = Field(
        [],
        max_length=MOST_STOPS,
        description=f"a string or a list of at most {MOST_STOPS}, each of 1 to 256 characters",
    )
    stop_token_ids: Ids = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: PlainText | None = None
    frequency_penalty: Zero = 0.0
    presence_penalty: Zero = 0.0
    min_p: Zero = 0.0  # benchmarks send it
    logit_bias: Empty = ""
    user: Ignored = None
    metadata: Ignored = None

    def check(self) -> None:
        """Raise ApiError for parameters that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream to be true", param="stream_options")

    def sampling(self, served: SamplingConfig) -> SamplingConfig:
        """The served sampling with what the request names in its place."""
        names = {field.name for field in fields(served)}
        named = self.model_dump(include=names, exclude_unset=True)
        return replace(served, **named | ({"top_k": 0} if named.get("top_k") == -1 else {}))


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    prompt: Annotated[Prompts, BeforeValidator(_listed)] = Field(
        min_length=1,
        max_length=MOST_PROMPTS,
        description=f"a string, token ids, or a list of 1 to {MOST_PROMPTS} of either",
    )
    max_tokens: int = Field(COMPLETION_TOKENS, ge=0)  # 0: the prompt alone, echoed
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=TOP_LOGPROBS)
    best_of: int | None = None  # equal to n: nothing is ranked
    suffix: Empty = ""

    @property
    def alternatives(self) -> int | None:
        """How many likeliest tokens each one is shown with; None: not even its own score."""
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n):
            raise ApiError(f"best_of must equal n, got {self.best_of}", param="best_of")
        if self.max_tokens == 0 and not self.echo:
            reason = "max_tokens 0 asks for nothing: give it at least 1, or set echo to true"
            raise ApiError(reason, param="max_tokens")


class ChatRequest(GenerationRequest):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Json], Field(fail_fast=True, min_length=1)]  # for `read_messages`
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=TOP_LOGPROBS)
    tools: Empty = ""
    tool_choice: Literal["none", "auto"] = "none"
    parallel_tool_calls: Ignored = None
    modalities: list[Literal["text"]] = []
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
        return self.top_logprobs if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if self.max_tokens is not None and self.max_tokens != self.most_tokens:
            raise ApiError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.most_tokens} differ",
                param="max_tokens",
            )


def explain(errors: Sequence[Mapping[str, Any]], request: type[BaseModel]) -> ApiError:
    """The one line about a body that `request` refuses, from the first of pydantic's `errors`."""
    error = errors[0]
    path, kind = [str(part) for part in error["loc"][1:]], error["type"]
    if kind == "json_invalid":
        reason = error.get("ctx", {}).get("error", "malformed")
        return ApiError(f"the body is no JSON: {reason}", code="invalid_json")
    if not path:
        return ApiError("the body must be a JSON object", code="invalid_body")
    name = path[0][:SHOWN]
    if name not in request.model_fields:
        message = f"there is no parameter {name!r}"
        return ApiError(message, param=name, code="unknown_parameter")
    if kind == "missing" and len(path) == 1:
        return ApiError(f"{name} is missing", param=name, code="missing_parameter")
    # Of the alternatives of a type pydantic tells each apart: then the field says what it may be.
    rule = request.model_fields[name].description
    parts = [part for part in path if part.isidentifier() or part.isdigit()]
    where, reason = (name, f"should be {rule}") if rule else (".".join(parts), error["msg"])
    return ApiError(f"{where[:SHOWN]}: {reason}, got {repr(error['input'])[:SHOWN]}", param=name)
