"""From requests to jobs: limits and defaults."""

from typing import Any

import pytest
from starlette.datastructures import Headers

from draftkit.config import DataConfig, SamplingConfig, ServeConfig
from draftkit.data.corpora import row_form
from draftkit.data.messages import read_messages
from draftkit.serving.answers import Job
from draftkit.serving.intake import Intake, Texts, conversation_of
from draftkit.serving.protocol import ApiError, ChatRequest, CompletionRequest
from tests.serving.fakes import chat, chat_tokenizer, completion
from tests.tiny import VOCAB_SIZE, byte_tokenizer

TEXTS = Texts(chat_tokenizer(), VOCAB_SIZE)
LONG = [{"role": "user", "content": "a" * 40}]


def intake(texts: Texts = TEXTS, max_length: int = 40, **settings: Any) -> Intake:
    return Intake(
        texts=texts,
        settings=ServeConfig(**settings),
        max_length=max_length,
        sampling=SamplingConfig(),
        routes=("default", "code"),
        model_name="tiny",
    )


def complete(found: Intake, headers: Any = None, **rest: Any) -> list[Job]:
    body = CompletionRequest.model_validate(completion(**rest))
    return found.prepare(body, Headers(headers))


def converse(found: Intake, **rest: Any) -> list[Job]:
    return found.prepare(ChatRequest.model_validate(chat(**rest)), Headers())


def test_what_fits_exactly_is_taken() -> None:
    assert len(complete(intake(), prompt="a" * 39, max_tokens=1)) == 1
    assert len(complete(intake(queue=4, slots=1), prompt=["a"] * 5)) == 5


@pytest.mark.parametrize(
    ("take", "body", "param", "says"),
    [
        (complete, {"prompt": "a" * 40, "max_tokens": 1}, "prompt", "of 40 tokens does not fit"),
        (
            complete,
            {"prompt": "a" * 30, "max_tokens": 11},
            "max_tokens",
            "prompt of 30 tokens with max_tokens 11 does not fit the 40 tokens",
        ),
        (converse, {"messages": LONG}, "messages", r"messages of \d+ tokens does not fit"),
        (converse, {"max_tokens": 39}, "max_tokens", "with max_tokens 39 does not"),
        (
            converse,
            {"max_completion_tokens": 39},
            "max_completion_tokens",
            "with max_completion_tokens 39 does not",
        ),
        (complete, {"prompt": ["a", "b"], "n": 3}, "prompt", "2 prompts with n=3 are more answers"),
        (complete, {"prompt": ""}, "prompt", "prompt must not be empty"),
        (complete, {"prompt": [1, 258]}, "prompt", "token id 258 is not below 258"),
        (
            complete,
            {"headers": {"x-draftkit-route": "../x"}},
            "x-draftkit-route",
            r"must be one of default, code, got '\.\./x'",
        ),
        (
            complete,
            {"headers": {"x-draftkit-record": "never"}},
            "x-draftkit-record",
            "must be yes or no, got 'never'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_the_parameter_to_blame(
    take: Any, body: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        take(intake(queue=4, slots=1), **body)
    assert caught.value.param == param


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
USER = {"role": "user", "content": "Hi"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "name": "f", "content": "7"}
SENT_BACK = {"refusal": None, "audio": None, "function_call": None, "annotations": []}


@pytest.mark.parametrize(
    "messages",
    [
        [USER, CALLING, RESULT],
        [USER, {**CALLING, "content": None}, RESULT],
        [
            USER,
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
            {**USER, "name": "b"},
        ],
        [USER, {"role": "assistant", "content": "a", "tool_calls": [], **SENT_BACK}, USER],
        [{**USER, "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}],
        [{**USER, "garbage": {"deep": [1, None, {}]}, "cache_control": {"type": "ephemeral"}}],
    ],
)
def test_a_template_is_given_all_that_a_message_holds(messages: list[dict[str, Any]]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}{{ m.name }}"
        "{% if m.tool_calls is defined %}{% for call in m.tool_calls %}{{ call.id }}"
        "{% for key, one in call.function.arguments | items %}{{ key }}={{ one }}{% endfor %}"
        "{% endfor %}!{% endif %}{{ m.tool_call_id }}{{ m.refusal is defined }}\n{% endfor %}"
    )
    parsed = read_messages(messages)
    wanted = tokenizer.apply_chat_template(parsed, add_generation_prompt=True)["input_ids"]
    jobs = converse(intake(Texts(tokenizer, VOCAB_SIZE), 500), messages=messages)
    assert jobs[0].prompt_ids == wanted
    # What training reads of the same messages.
    row = row_form({"messages": messages}, DataConfig())
    assert row["messages"] == parsed


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"role": "king", "content": "a"}, "messages[0] must have a role, one of system, "),
        ({"content": "a"}, "messages[0] must have a role"),
        ({"role": "user"}, "messages[0].content must be text, got NoneType"),
        ({"role": "user", "content": None}, "messages[0].content must be text, got NoneType"),
        ({"role": "user", "content": "\ud800"}, "messages[0] holds half a character"),
        ({"role": "user", "content": "a", "name": "\ud800"}, "messages[0] holds half a character"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0] is of the type 'image_url'",
        ),
        ({"role": "tool", "content": "a"}, "refuses the messages (no tools here)"),
    ],
)
def test_messages_that_no_template_takes_are_refused(turn: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError) as caught:
        converse(intake(), messages=[turn])
    assert says in caught.value.detail
    assert (caught.value.status_code, caught.value.param) == (400, "messages")


def test_whatever_a_template_raises_is_a_400() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(ApiError) as caught:
        converse(intake(Texts(tokenizer, VOCAB_SIZE)))
    assert caught.value.status_code == 400
    reason = "the messages (ZeroDivisionError: division by zero, line 1 of the template)"
    assert caught.value.detail.endswith(reason)


def test_what_follows_an_end_of_text_is_not_recorded() -> None:
    assert not complete(intake(), {"X-Draftkit-Record": "yes"}, ignore_eos=True)[0].records
    assert complete(intake(), ignore_eos=False)[0].records
    assert not converse(intake(), ignore_eos=True, max_tokens=1)[0].records


def test_each_prompt_is_echoed_by_itself() -> None:
    said = complete(intake(), prompt=["a", "bc"], n=2, echo=True)
    assert [job.echo for job in said] == ["a", "a", "bc", "bc"]
    assert [job.echo for job in complete(intake(), prompt=[[1], [2]], echo=True)] == ["", ""]
    assert complete(intake(), prompt="a")[0].echo is None
    assert converse(intake(), max_tokens=1)[0].echo is None
    encodes = intake(Texts(chat_tokenizer(), VOCAB_SIZE, start=5))
    with pytest.raises(ApiError, match="echo: an encoder reads this model's prompts"):
        complete(encodes, echo=True)


def test_one_no_among_several_suffices() -> None:
    raw = [(b"x-draftkit-record", b"yes"), (b"x-draftkit-record", b" No ")]
    body = CompletionRequest.model_validate(completion())
    for headers in (raw, raw[::-1]):
        (taken,) = intake().prepare(body, Headers(raw=headers))
        assert not taken.records


def test_a_conversation_is_known_by_what_comes_before_its_first_answer() -> None:
    """So all its turns are on one side of the held-out split: later ones hold earlier answers."""
    system = {"role": "system", "content": "s"}
    first, other = ({"role": "user", "content": text} for text in ("a", "b"))
    later = [{"role": "assistant", "content": "x"}, other]
    assert conversation_of([system, first]) == conversation_of([system, first, *later])
    assert len({conversation_of([t]) for t in (system, first, other)}) == 3
    assert conversation_of([first]) != conversation_of([system, first])
    (text,), (turn,) = complete(intake(), prompt="a"), converse(intake(), max_tokens=1)
    assert (text.conversation, text.continues) == ("", True)
    assert (turn.conversation, turn.continues) == (
        conversation_of([{**first, "content": "Hi"}]),
        False,
    )
