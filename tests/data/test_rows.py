"""Which columns hold what, and the form that comes of them."""

import json
from typing import Any

import pytest

from draftkit.config import DataConfig
from draftkit.data.rows import row_form

CHAT = [{"role": "user", "content": "a"}]
ANSWER = {"role": "assistant", "content": "b"}
SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CALL = {"role": "assistant", "tool_calls": [{"name": "f"}]}
TOOLS = [{"name": "f", "about": {"x": 1}}]
PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image_url": None}]
GSM = {"question": "2+2?", "answer": "4", "level": 1}
NAMES = {"prompt_column": "question", "completion_column": "answer"}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"text": "t", "prompt": "p", "messages": CHAT}, {"messages": CHAT}),
    ({"text": "t", "prompt": "p", "messages": None}, {"prompt": "p"}),
    ({"prompt": CHAT, "completion": "b"}, {"messages": [*CHAT, ANSWER]}),
    ({"prompt": CHAT, "completion": [ANSWER]}, {"messages": [*CHAT, ANSWER]}),
    ({"prompt": CHAT}, {"messages": CHAT}),
    ({"prompt": ["first", "second"]}, {"prompt": "first"}),
    (
        {"messages": [{"role": "user", "content": PARTS}]},
        {"messages": [{"role": "user", "content": "a b"}]},
    ),
    ({"messages": [*CHAT, CALL | {"content": None}]}, {"messages": [*CHAT, CALL]}),
    ({"messages": CHAT, "tools": TOOLS}, {"messages": CHAT, "tools": TOOLS}),
    ({"messages": CHAT, "tools": json.dumps(TOOLS)}, {"messages": CHAT, "tools": TOOLS}),
    ({"prompt": CHAT, "tools": TOOLS}, {"messages": CHAT, "tools": TOOLS}),
    ({"messages": CHAT, "tools": []}, {"messages": CHAT}),
    ({"conversations": SHARED}, {"messages": [*CHAT, ANSWER]}),
    ({"conversation": [*CHAT, ANSWER]}, {"messages": [*CHAT, ANSWER]}),
    ({"messages": json.dumps([*CHAT, ANSWER])}, {"messages": [*CHAT, ANSWER]}),
    ({"conversations": json.dumps(SHARED)}, {"messages": [*CHAT, ANSWER]}),
    ({"prompt": json.dumps(CHAT), "completion": "b"}, {"messages": [*CHAT, ANSWER]}),
    ({"prompt": '[{"a": 1}]', "completion": "[1]"}, {"prompt": '[{"a": 1}]', "completion": "[1]"}),
    ({"prompt": "p", "response": "r"}, {"prompt": "p", "completion": "r"}),
    ({"instruction": "i", "input": "x", "output": "o"}, {"prompt": "i\n\nx", "completion": "o"}),
    ({"instruction": "i", "input": "", "output": "o"}, {"prompt": "i", "completion": "o"}),
    (
        {"instruction": "i", "context": "x", "response": "o"},
        {"prompt": "i\n\nx", "completion": "o"},
    ),
    (GSM, {"prompt": "2+2?", "completion": "4"}),
    ({"text": "t", "conversations": SHARED, "question": "q"}, {"text": "t"}),
    (
        {"messages": CHAT, "tools": [{"name": "f", "default": None}]},
        {"messages": CHAT, "tools": [{"name": "f", "default": None}]},
    ),
]
NAMED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (GSM, NAMES, {"prompt": "2+2?", "completion": "4"}),
    (GSM, {"prompt_column": "question"}, {"prompt": "2+2?"}),
    ({"dialog": SHARED}, {"prompt_column": "dialog"}, {"messages": [*CHAT, ANSWER]}),
    ({"dialog": json.dumps(SHARED)}, {"prompt_column": "dialog"}, {"messages": [*CHAT, ANSWER]}),
    ({"question": "q", "context": "x"}, {"prompt_column": "question"}, {"prompt": "q"}),
]


@pytest.mark.parametrize(
    ("row", "options", "form"), [*((row, {}, form) for row, form in FORMS), *NAMED]
)
def test_a_row_is_read_in_one_of_three_forms(
    row: dict[str, Any], options: dict[str, Any], form: dict[str, Any]
) -> None:
    assert row_form(row, DataConfig(name="local", path="a.jsonl", **options)) == form
