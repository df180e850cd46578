"""From requests to jobs: limits and defaults."""

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers

from draftkit.config import SamplingConfig, ServeConfig
from draftkit.serving.intake import Intake, conversation_of
from draftkit.serving.protocol import ApiError, ChatRequest, CompletionRequest
from draftkit.serving.replies import CompletionReply
from draftkit.serving.texts import Texts
from tests.serving.fakes import chat, chat_tokenizer, completion
from tests.tiny import VOCAB_SIZE

TEXTS = Texts(chat_tokenizer(), VOCAB_SIZE)


def intake(texts: Texts = TEXTS, max_length: int = 40, **settings: Any) -> Intake:
    return Intake(
        texts=texts,
        settings=ServeConfig(**settings),
        max_length=max_length,
        sampling=SamplingConfig(),
        routes=("default", "code"),
        model_name="tiny",
    )


def complete(found: Intake, headers: dict[str, str] | None = None, **rest: Any) -> CompletionReply:
    body = CompletionRequest.model_validate(completion(**rest))
    return asyncio.run(found.prepare(body, Headers(headers)))


def converse(found: Intake, **rest: Any) -> CompletionReply:
    return asyncio.run(found.prepare(ChatRequest.model_validate(chat(**rest)), Headers()))


def test_a_prompt_and_its_answer_fit_exactly() -> None:
    assert len(complete(intake(), prompt="a" * 39, max_tokens=1).jobs) == 1
    with pytest.raises(ApiError, match=r"prompt of 40 tokens does not fit the 40 tokens"):
        complete(intake(), prompt="a" * 40, max_tokens=1)
    with pytest.raises(ApiError, match=r"prompt of 30 tokens with max_tokens 11 does not fit"):
        complete(intake(), prompt="a" * 30, max_tokens=11)


def test_what_does_not_fit_is_named() -> None:
    long = [{"role": "user", "content": "a" * 40}]
    short = long[0]["content"][:20]
    for options, param in (
        ({"messages": long}, "messages"),
        ({"max_tokens": 39}, "max_tokens"),
        ({"max_completion_tokens": 39}, "max_completion_tokens"),
    ):
        with pytest.raises(ApiError, match="does not fit the 40 tokens") as caught:
            converse(intake(), **options)
        assert caught.value.param == param
        assert f"{param} " in caught.value.detail
    with pytest.raises(ApiError, match="prompt of 20 tokens with max_tokens 21") as caught:
        complete(intake(), prompt=short, max_tokens=21)
    assert caught.value.param == "max_tokens"


def test_numbers_are_bounded_by_the_settings() -> None:
    small = intake(queue=4, slots=1)
    with pytest.raises(ApiError, match="2 prompts with n=3 are more answers"):
        complete(small, prompt=["a", "b"], n=3)
    assert len(complete(small, prompt=["a"] * 5).jobs) == 5


def test_routes_and_recording() -> None:
    plain = complete(intake()).jobs[0]
    assert (plain.route, plain.records) == ("default", True)
    named = complete(intake(), {"X-Draftkit-Route": "code", "X-Draftkit-Record": " No "}).jobs[0]
    assert (named.route, named.records) == ("code", False)
    with pytest.raises(ApiError, match=r"must be one of default, code, got '\.\./x'"):
        complete(intake(), {"x-draftkit-route": "../x"})
    with pytest.raises(ApiError, match="must be yes or no, got 'never'"):
        complete(intake(), {"x-draftkit-record": "never"})


def test_one_no_among_several_suffices() -> None:
    raw = [(b"x-draftkit-record", b"yes"), (b"x-draftkit-record", b"no")]
    body = CompletionRequest.model_validate(completion())
    for headers in (raw, raw[::-1]):
        asked = asyncio.run(intake().prepare(body, Headers(raw=headers)))
        assert not asked.jobs[0].records


def test_other_models_and_empty_prompts() -> None:
    with pytest.raises(ApiError, match="there is no model 'tinier'") as caught:
        complete(intake(), model="tinier")
    assert (caught.value.status_code, caught.value.code) == (404, "model_not_found")
    with pytest.raises(ApiError, match="prompt must not be empty"):
        complete(intake(), prompt="")


def test_a_conversation_is_known_by_what_comes_before_its_first_answer() -> None:
    """So all its turns are on one side of the held-out split: later ones hold earlier answers."""
    system = {"role": "system", "content": "s"}
    first, other = ({"role": "user", "content": text} for text in ("a", "b"))
    later = [{"role": "assistant", "content": "x"}, other]
    assert conversation_of([system, first]) == conversation_of([system, first, *later])
    assert len({conversation_of([t]) for t in (system, first, other)}) == 3
    assert conversation_of([first]) != conversation_of([system, first])
    (text,), (turn,) = complete(intake(), prompt="a").jobs, converse(intake(), max_tokens=1).jobs
    assert (text.conversation, text.continues) == ("", True)
    assert (turn.conversation, turn.continues) == (
        conversation_of([{**first, "content": "Hi"}]),
        False,
    )
