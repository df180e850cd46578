"""Turns as people write them, and as templates expect them."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from draftkit.data.messages import DEEPEST, read_messages

HI = {"role": "user", "content": "Hi"}
CITY = {"city": "SF", "zip": None}


def call(arguments: Any, **rest: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}} | rest


def answer(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", **keys}


def nested(levels: int) -> Any:
    made: Any = "x"
    for _ in range(levels):
        made = [made]
    return made


ROUND: list[Any] = []
ROUND.append(ROUND)

SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Names of speakers and keys
    ({"from": "human", "value": "Hi"}, HI),
    ({"from": "User", "content": "Hi"}, HI),
    ({"role": None, "content": None, "from": "human", "value": "Hi"}, HI),
    ({"from": "gpt", "value": "a", "weight": 0}, answer(content="a", weight=0)),
    ({"from": "system", "value": "a"}, {"role": "system", "content": "a"}),
    ({"from": "observation", "value": "7"}, {"role": "tool", "content": "7"}),
    (
        {"role": "function", "name": "f", "content": "7"},
        {"role": "tool", "name": "f"} | {"content": "7"},
    ),
    (
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
        },
    ),
    # Arguments: objects where they are the JSON of one
    (answer(tool_calls=[call(json.dumps(CITY))]), answer(tool_calls=[call(CITY)])),
    (answer(tool_calls=[call(CITY)] * 2), answer(tool_calls=[call(CITY)] * 2)),
    (
        answer(tool_calls=[{"name": "f", "arguments": '{"x": [1]}'}]),
        answer(tool_calls=[{"name": "f", "arguments": {"x": [1]}}]),
    ),
    (
        answer(function_call={"name": "f", "arguments": '{"x": 1}'}),
        answer(function_call={"name": "f", "arguments": {"x": 1}}),
    ),
    *(
        (answer(tool_calls=[call(text)]), answer(tool_calls=[call(text)]))
        for text in ("", "SF", '{"city": ', "[1]", "5", "null", "[" * 9999, "9" * 9999, None)
    ),
    (answer(tool_calls=json.dumps([call("{}")])), answer(tool_calls=[call({})])),
    (answer(tool_calls="[]", function_call='{"name": "f"}'), answer(function_call={"name": "f"})),
    ({**HI, "x": nested(DEEPEST - 1)}, {**HI, "x": nested(DEEPEST - 1)}),
    # What clients send back with an answer, and what else a message may hold
    (
        {**HI, "refusal": None, "tool_calls": [], "audio": {}, "annotations": (), "name": "a"},
        {**HI, "name": "a"},
    ),
    (
        answer(content=None, tool_calls=[call("x")]),
        {"role": "assistant", "tool_calls": [call("x")]},
    ),
    (answer(tool_calls="none", function_call=[3]), answer(tool_calls="none", function_call=[3])),
    ({**HI, "x": {"deep": [None, {"y": None}]}}, {**HI, "x": {"deep": [None, {"y": None}]}}),
    (
        {**HI, "at": datetime(2026, 1, 1, tzinfo=UTC), 5: (1,)},
        {**HI, "at": "2026-01-01 00:00:00+00:00", "5": [1]},
    ),
    # Text in parts
    ({"role": "user", "content": [{"type": "text", "text": t} for t in ("H", "i")]}, HI),
    ({"role": "user", "content": []}, {"role": "user", "content": ""}),
]


@pytest.mark.parametrize(("turn", "read"), SAME)
def test_a_turn_is_what_templates_expect(turn: dict[str, Any], read: dict[str, Any]) -> None:
    before = repr(turn)
    assert read_messages([HI, turn]) == [HI, read]
    assert repr(turn) == before
    assert read_messages([read]) == [read]


def test_a_conversation_may_be_json_text() -> None:
    assert read_messages(json.dumps([{"from": "human", "value": "Hi"}])) == [HI]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *((value, "messages must be a list of at least") for value in ([], "", "[]", "Hi", 5, HI)),
        (["Hi"], "messages[0] must have a role, one of system, developer, user, assistant, tool"),
        ([HI, {"content": "a"}], "messages[1] must have a role, one of "),
        ([{"role": "king", "content": "a"}], "assistant, tool, got 'king'"),
        ([{"from": ["user"], "value": "a"}], ", got ['user']"),
        ([{"role": "assistant"}], "messages[0].content must be text, got NoneType"),
        ([{"role": "tool", "content": {"x": 1}}], "messages[0].content must be text, got dict"),
        ([{"from": "function_call", "value": "f()"}], "messages[0].content must be the JSON of a"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0] is of the type 'str'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0] is of the type 'image_url': a part of a message must be text",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 5}]}],
            "messages[0].content[0] must be text, got int",
        ),
        ([{"role": "user", "content": "\ud800"}], "messages[0] holds half a character"),
        ([answer(tool_calls=[call('{"a": "\\ud800"}')])], "messages[0] holds half a character"),
        ([{**HI, "\ud800": 1}], "messages[0] holds half a character"),
        ([{**HI, "x": nested(DEEPEST)}], "messages[0] nests deeper than 100 levels"),
        ([{**HI, "x": nested(5_000)}], "messages[0] is no JSON (maximum recursion"),
        ([{**HI, "x": {(1, 2): 3}}], "messages[0] is no JSON (keys must be"),
        ([{**HI, "x": ROUND}], "messages[0] is no JSON (Circular reference"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^messages") as caught:
        read_messages(value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
