"""Request bodies: what is taken, what is refused, and with which line."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from draftkit.config import SamplingConfig
from draftkit.serving.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    explain,
)
from tests.serving.fakes import chat, completion

NAN, INFINITY = float("nan"), float("inf")
SERVED = SamplingConfig(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1)


def refusal(kind: type[GenerationRequest], body: Any) -> ApiError:
    """How `body` is refused, as the app would say it."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    errors: list[Any] = caught.value.errors()
    return explain([{**error, "loc": ("body", *error["loc"])} for error in errors], kind)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]],) * 2],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: Any) -> None:
    assert CompletionRequest.model_validate(completion(prompt=prompt)).prompt == prompts


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 1], [1, -1], [1.5], [True], {}, 3, "\ud800", ["a"] * 4097]
)
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    wrong = refusal(CompletionRequest, completion(prompt=prompt))
    assert wrong.param == "prompt"
    assert wrong.detail.startswith(
        "prompt: should be a string, token ids, or a list of 1 to 4096 of"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("temperature", value)
            for value in (-1, 11, float("nan"), float("inf"), "1", True, 1e-9)
        ),
        *(("top_p", value) for value in (0, 1.1, -0.5, NAN, [])),
        *(("top_k", value) for value in (-2, 1.5, 2**40)),
        *(("repetition_penalty", value) for value in (0, -1, 1e9)),
        *(("n", value) for value in (0, -1, 17, 1.5, "2", True)),
        *(("max_tokens", value) for value in (-5, 1e3, NAN)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, 0.5)),
        *(("stop", value) for value in ("", [""], ["a"] * 17, "a" * 257, 7, "\ud800")),
        *(("stream", value) for value in (1, "true")),
        ("stream_options", {"usage": True}),
        *(("stop_token_ids", value) for value in (3, [-1], ["a"])),
        ("ignore_eos", "yes"),
        ("response_format", {"type": "json_object"}),
        *(("frequency_penalty", value) for value in (0.5, True, False, "0")),
        ("presence_penalty", 1),
        *(("min_p", value) for value in (0.05, -1)),
        ("logit_bias", {"5": 10}),
        ("model", 7),
    ],
)
def test_a_value_that_breaks_its_rule_is_named_with_the_rule(name: str, value: Any) -> None:
    for kind, body in ((CompletionRequest, completion), (ChatRequest, chat)):
        wrong = refusal(kind, body(**{name: value}))
        assert wrong.param == name
        assert wrong.detail.startswith(name)
        assert re.fullmatch(r"[a-z_.0-9]+: .+, got .+", wrong.detail)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0, "top_p": 1, "top_k": -1, "n": 3, "seed": -(2**63), "stop": None},
        {"temperature": 0.001, "max_tokens": 1, "stop": ["a", "b"], "seed": 2**63 - 1},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "user": "u"},
        {"stream": True, "stream_options": {"include_usage": True}, "metadata": {"a": "b"}},
        {"ignore_eos": True, "min_p": 0.0, "stop_token_ids": [], "stop": []},
        {"response_format": {"type": "text"}, "prompt_logprobs": None, "min_tokens": None},
    ],
)
def test_bounds_and_neutral_values_are_taken(body: dict[str, Any]) -> None:
    CompletionRequest.model_validate(completion(**body))
    ChatRequest.model_validate(chat(**body))


@pytest.mark.parametrize(
    ("kind", "body", "name", "neutral", "other"),
    [
        (CompletionRequest, completion(), "suffix", "", "b"),
        (ChatRequest, chat(), "echo", None, True),
        (ChatRequest, chat(), "tools", [], [{"type": "function"}]),
        (ChatRequest, chat(), "prompt_logprobs", None, 1),
        (ChatRequest, chat(), "max_tokens", None, 0),
    ],
)
def test_what_one_of_both_knows_is_taken_where_it_is_neutral(
    kind: type[GenerationRequest], body: Any, name: str, neutral: Any, other: Any
) -> None:
    kind.model_validate(body | {name: neutral}).check()
    assert refusal(kind, body | {name: other}).param == name


@pytest.mark.parametrize(
    ("kind", "body"), [(CompletionRequest, completion()), (ChatRequest, chat())]
)
def test_null_is_absence(kind: type[GenerationRequest], body: dict[str, Any]) -> None:
    """Clients send it for whatever their user has left out."""
    nulls = dict.fromkeys(kind.model_fields.keys() - body.keys())
    assert kind.model_validate(nulls | body).model_dump() == kind.model_validate(body).model_dump()


def test_a_misspelt_parameter_is_refused() -> None:
    wrong = refusal(CompletionRequest, completion(temprature=0))
    assert wrong.detail == "there is no parameter 'temprature'"
    assert wrong.param == "temprature"
    assert refusal(ChatRequest, chat(prompt="p")).detail == "there is no parameter 'prompt'"


def test_alternatives_are_as_many_as_a_round_lists() -> None:
    rule = "Input should be less than or equal to 20, got 21"
    assert refusal(CompletionRequest, completion(logprobs=21)).detail == f"logprobs: {rule}"
    assert refusal(ChatRequest, chat(top_logprobs=21)).detail == f"top_logprobs: {rule}"


def test_a_missing_parameter_is_named() -> None:
    assert refusal(CompletionRequest, {"model": "m"}).detail == "prompt is missing"
    assert refusal(ChatRequest, {"messages": []}).detail == "model is missing"
    assert refusal(ChatRequest, []).detail == "the body must be a JSON object"


def test_long_values_and_names_are_shortened() -> None:
    assert len(refusal(CompletionRequest, completion(n="9" * 10_000)).detail) < 200
    assert len(refusal(CompletionRequest, completion(**{"x" * 10_000: 1})).detail) < 200


def test_what_a_request_names_replaces_the_served_sampling() -> None:
    plain = CompletionRequest.model_validate(completion())
    assert plain.sampling(SERVED) == SERVED
    all_kept = CompletionRequest.model_validate(completion(temperature=0, top_k=-1, top_p=1))
    assert all_kept.sampling(SERVED) == SamplingConfig(temperature=0, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, completion(best_of=2), "best_of"),
        (CompletionRequest, completion(best_of=0), "best_of"),
        (CompletionRequest, completion(max_tokens=0), "max_tokens"),
        (CompletionRequest, completion(max_tokens=0, echo=False), "max_tokens"),
        (ChatRequest, chat(top_logprobs=2), "top_logprobs"),
        (ChatRequest, chat(max_tokens=3, max_completion_tokens=4), "max_tokens"),
        (CompletionRequest, completion(stream_options={"include_usage": True}), "stream_options"),
    ],
)
def test_parameters_that_contradict_each_other(kind: Any, body: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        kind.model_validate(body).check()
    assert caught.value.param == param


def test_parameters_that_agree() -> None:
    CompletionRequest.model_validate(completion(best_of=2, n=2)).check()
    assert CompletionRequest.model_validate(completion(max_tokens=0, echo=True)).max_tokens == 0
    both = ChatRequest.model_validate(chat(max_tokens=3, max_completion_tokens=3))
    both.check()
    assert both.most_tokens == 3
    ChatRequest.model_validate(chat(logprobs=True, top_logprobs=2)).check()


@pytest.mark.parametrize("wrong", [[], ["a"], [{"role": "user", "content": "a"}, 5], "hello", {}])
def test_messages_are_a_list_of_objects(wrong: Any) -> None:
    assert refusal(ChatRequest, chat(messages=wrong)).param == "messages"
