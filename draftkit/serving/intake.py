"""From a valid request to jobs for the engine: prompts as ids, limits, routes, defaults.

`Texts` is the tokenizer as the server needs it. Raises ApiError for what the request asks and this
server cannot give; knows no answers and no sockets.
"""

import copy
import functools
import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from starlette.datastructures import Headers
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from draftkit.config import DEFAULT_ROUTE, DataConfig, SamplingConfig, ServeConfig
from draftkit.data.chats import TemplateRefusal, chat_format, text_ids
from draftkit.data.messages import read_messages
from draftkit.data.prompts import begun
from draftkit.serving.answers import Job
from draftkit.serving.protocol import SHOWN, ApiError, ChatRequest, CompletionRequest

ROUTE_HEADER = "x-draftkit-route"
RECORD_HEADER = "x-draftkit-record"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece tokens
_SHOWN_TOKENS = 1 << 16  # whose bytes are remembered


class Texts:
    """A tokenizer for many callers; ids are below `vocab_size`.

    Chats become what the same chats are in training, as `data` says; the date is today's. What a
    turn says is text: no name of a special token in it is that token. Encoding runs on a copy and
    one call at a time: the engine's thread decodes with the original meanwhile, and a fast
    tokenizer that is changed while it is read raises. start: of an encoder-decoder model the id
    that begins an answer, and ends what its encoder reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        data: DataConfig | None = None,
        *,
        start: int | None = None,
    ) -> None:
        self.vocab_size, self.start = vocab_size, start
        self._tokenizer: Any = copy.deepcopy(tokenizer)
        data = data or DataConfig()
        self._format = chat_format(self._tokenizer, data, fixed_date=False)
        self._lock = threading.Lock()
        self.token_bytes = functools.lru_cache(_SHOWN_TOKENS)(self._token_bytes)
        self.special_ids = set(tokenizer.all_special_ids)  # that a text does not show
        self._byte_of = {c: b for b, c in bytes_to_unicode().items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        serialised = {} if backend is None else json.loads(backend.to_str())
        self._is_byte_level = '"ByteLevel"' in json.dumps(serialised.get("decoder"))

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with what the tokenizer puts before a text. Slow for long texts."""
        with self._lock:
            return text_ids(self._tokenizer, [text], literal=self.start is not None)[0]

    def answer(
        self, text: str, *, ends: bool, chat: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The ids of an answer, in `chat` or to a text, with its end where it `ends`."""
        with self._lock:
            if chat is not None and ends:
                turns = [*chat, {"role": "assistant", "content": text}]
                ids = self._format.answer(turns, self._format.context(chat)) or []
                if ids[-1:] and ids[-1] in self.special_ids:  # by which turns of the model end
                    return ids
            (ids,) = text_ids(self._tokenizer, [text], special=False, literal=True)
        return ids + [self._tokenizer.eos_token_id] * ends

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a chat that awaits its answer.

        Raises ValueError where the tokenizer has no chat template, or its template refuses.
        """
        if not self._format.has_template or self.start is not None:
            raise ValueError(
                "the tokenizer of this model has no chat template: use /v1/completions"
            )
        with self._lock:
            try:
                return self._format.context(messages)
            except TemplateRefusal as error:
                raise ValueError(
                    f"the chat template of this model refuses the messages ({error})"
                ) from error

    def _token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text; a special token's name, for a text does not show it."""
        piece = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if token_id in self.special_ids:
            return piece.encode()
        if self._is_byte_level and all(c in self._byte_of for c in piece):
            return bytes(self._byte_of[c] for c in piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte.group(1))
        return piece.replace(_SPACE, " ").encode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True)
class Intake:
    """What requests are measured against."""

    texts: Texts
    settings: ServeConfig
    max_length: int  # tokens of prompt and answer
    sampling: SamplingConfig  # of requests that name none
    routes: Sequence[str]  # what ROUTE_HEADER may say
    model_name: str

    def prepare(self, body: CompletionRequest | ChatRequest, headers: Headers) -> list[Job]:
        """The jobs of a request, one for each choice of each prompt. Slow for long texts."""
        # What a request cannot have, however long it is.
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
        route = headers.get(ROUTE_HEADER, DEFAULT_ROUTE)
        if route not in self.routes:
            raise ApiError(
                f"{ROUTE_HEADER} must be one of {', '.join(self.routes)}, got {route[:SHOWN]!r}",
                param=ROUTE_HEADER,
                code="unknown_route",
            )
        shared: dict[str, Any] = {
            "sampling": body.sampling(self.sampling),
            "seed": body.seed,
            "stops": tuple(body.stop),
            "stop_token_ids": frozenset(body.stop_token_ids),
            "ignores_eos": body.ignore_eos,
            "top_logprobs": body.alternatives or 0,
            "route": route,
            # What follows an end of text is nothing that a drafter should learn.
            "records": _records(headers) and not body.ignore_eos,
            "deadline": time.monotonic() + self.settings.request_seconds,
        }
        echoes: list[str] = []
        if isinstance(body, ChatRequest):
            messages, ids = self._chat(body)
            texts, most = [ids], body.most_tokens or self.max_length - len(ids)
            shared |= {"continues": False, "conversation": conversation_of(messages)}
        else:
            most = body.max_tokens
            if body.echo and self.texts.start is not None:
                raise ApiError("echo: an encoder reads this model's prompts", param="echo")
            texts = [self._ids(prompt, most) for prompt in body.prompt]
            echoes = [text if isinstance(text, str) else "" for text in body.prompt if body.echo]
        # The same prompt and seed give the same answers, whatever else the request asks.
        return [
            Job(prompt_ids=ids, echo=echo, row=row, max_new_tokens=most, **shared)
            for ids, echo in zip_longest(texts, echoes)
            for row in range(body.n)
        ]

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
