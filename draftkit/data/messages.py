"""Conversations as people have them to the turns that chat templates expect.

Clients and files write a conversation in several ways: OpenAI's `role` and `content`, ShareGPT's
`from` and `value`, text in parts, JSON text in place of a list, arguments of tool calls as JSON
text. Templates are written for one of each. Rows, callers of the library and requests to the server
all come through here, so that the same conversation gives the same ids.

This module does not know templates or tokens.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

# What the speakers are called, and what templates call them.
ROLES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "chatbot"), "assistant"),
    **dict.fromkeys(("function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("function_response", "tool_response", "tool_result"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),  # an assistant's; its text is JSON
}
KEYS = {"from": "role", "value": "content"}  # of a turn in ShareGPT's form
DEEPEST = 100  # levels of a message


def read_messages(value: Any) -> list[dict[str, Any]]:
    """The turns of a conversation, `value`: a list of them, or its JSON text.

    A turn has a role of OpenAI's, and as content text, which an assistant that calls tools may
    leave out; its other keys stay. The arguments of a call are an object where they are the JSON
    text of one. A key with null, or with an empty list or object, is left out: clients send such
    keys back with an answer, and templates take them for present. Nulls further in stay.

    Raises ValueError, a reason without file and line, for what is none.
    """
    if isinstance(value, str):
        value = _from_json(value, "messages")
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("messages must be a list of at least one message, or its JSON")
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(value)]


def change_arguments(turn: dict[str, Any], change: Callable[[Any], Any]) -> None:
    """Put `change` of them in the place of the arguments of every call in `turn`."""
    calls = turn.get("tool_calls")
    for call in [*(calls if isinstance(calls, list) else []), turn.get("function_call")]:
        for holder in (call, call.get("function")) if isinstance(call, dict) else ():
            if isinstance(holder, dict) and "arguments" in holder:
                holder["arguments"] = change(holder["arguments"])


def _turn(message: Any, name: str) -> dict[str, Any]:
    turn = _plain(dict(message), name) if isinstance(message, Mapping) else {}
    content = turn.get("content")
    for key in ("tool_calls", "function_call"):
        if isinstance(held := _from_json(turn.get(key), name), list | dict):
            turn[key] = held
    turn = {key: one for key, one in turn.items() if one not in (None, [], {})}
    for key, own in KEYS.items():
        if own not in turn:
            turn = {own if old == key else old: one for old, one in turn.items()}
    role = ROLES.get(str(turn.get("role")).lower())
    if role is None:
        known = [name for name, own in ROLES.items() if name == own]
        got = f", got {turn['role']!r:.40}" if "role" in turn else ""
        raise ValueError(f"{name} must have a role, one of {', '.join(known)}{got}")
    if role == "call":
        calls = _from_json(turn.pop("content", None), name)
        calls = calls if isinstance(calls, list) else [calls]
        if not all(isinstance(call, dict) for call in calls):
            raise ValueError(f"{name}.content must be the JSON of a call, or of a list of calls")
        turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    turn["role"] = "assistant" if role == "call" else role
    # The object that the text of arguments holds; text of none stays text.
    change_arguments(
        turn, lambda given: held if isinstance(held := _from_json(given, name), dict) else given
    )
    if "content" in turn or not turn.keys() & {"tool_calls", "function_call"}:
        turn["content"] = _content(turn.get("content", content), f"{name}.content")
    return turn


def _from_json(text: Any, name: str) -> Any:
    """What a text of JSON holds; None for what is no such text."""
    try:
        held = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return _plain(held, name)


def _content(content: Any, name: str) -> str:
    """What a message says: text, or parts of text, which are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{name} must be text, got {type(content).__name__}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part, dict):
            raise ValueError(
                f"{name}[{index}] is of the type {str(kind)[:40]!r}: a part of a message must be "
                "text here, leave such rows out"
            )
        if not isinstance(part.get("text"), str):
            kind = type(part.get("text")).__name__
            raise ValueError(f"{name}[{index}] must be text, got {kind}")
    return "".join(part["text"] for part in content)


def _plain(value: Any, name: str) -> Any:
    """A copy of `value` in the kinds that JSON has; of others, as dates of Parquet, their text."""
    try:
        copy = json.loads(json.dumps(value, ensure_ascii=False, default=str).encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half a character ({error.reason})") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no JSON ({str(error)[:80]})") from error
    level: list[Any] = [[copy]]
    for _ in range(DEEPEST + 1):
        held = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for inner in held for one in inner if isinstance(one, dict | list)]
    if level:
        raise ValueError(f"{name} nests deeper than {DEEPEST} levels")
    return copy
