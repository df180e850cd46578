"""A row of a file or data set, as people have it, in one of three forms.

`messages` (+ `tools`), `prompt` (+ `completion`), or `text`: one table says which columns may hold
them. A record of served traffic is a fourth: the ids of a prompt and of its answer. Rows that ask
the same have the same name. This module does not know where rows come from.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from draftkit.config import DataConfig
from draftkit.data.messages import read_messages

# Where a row may hold what is read: the first of these that holds something is. Of a question the
# columns of its answer, and of what belongs to the question.
CHATS = ("messages", "conversations", "conversation")
ANSWERS = {
    "prompt": ("completion", "response"),
    "instruction": ("output", "response"),
    "question": ("answer", "response"),
}
COLUMNS = ("messages", "prompt", "text", *CHATS[1:], *[*ANSWERS][1:])
IDS = ("prompt_ids", "output_ids")  # of a record
TARGET = b"draftkit_target"  # in the metadata of a part: the checksum of the model that wrote it
MORE = {"instruction": ("input", "context"), "question": ("context",)}
TURNS = ({"role", "content"}, {"from", "value"})  # keys by which JSON text is a chat


def row_form(row: dict[str, Any], data: DataConfig) -> dict[str, Any]:
    """The part of `row` that is used, under the names of one of the three forms.

    Raises ValueError, a reason without file and line, for a row that cannot be used.
    """
    there = f"columns found: {', '.join(map(str, row))}"
    filled = {name: value for name, value in row.items() if value is not None}
    columns, answers, more = COLUMNS, ANSWERS, MORE
    named = {"prompt_column": data.prompt_column, "completion_column": data.completion_column}
    if {*IDS} <= filled.keys() and not any(named.values()):
        if not all(_are_ids(filled[name]) for name in IDS):
            raise ValueError(f"{' and '.join(IDS)} must be lists of whole numbers")
        return {name: filled[name] for name in (*IDS, "document") if name in filled}
    if any(name is not None for name in named.values()):
        columns, more = (data.prompt_column or "prompt",), {}
        answers = {columns[0]: (data.completion_column or "completion",)}
    for key, name in named.items():
        if name is not None and name not in row:
            raise ValueError(f"data.{key} {name!r} is not in it; {there}")
    column = next((name for name in columns if name in filled), None)
    if column is None:
        wanted = "messages, prompt or text" if columns is COLUMNS else columns[0]
        raise ValueError(
            f"nothing under {wanted}; {there}; "
            "name yours by data.prompt_column and data.completion_column"
        )
    form: dict[str, Any]
    if column in answers:
        answer = next((name for name in answers[column] if name in filled), None)
        form = _question(filled, column, answer, more.get(column, ()))
    elif column == "text":
        form = {"text": _text(row, column)}
    else:
        form = {"messages": read_messages(row[column])}
    tools = None if "text" in form else row.get("tools")  # a list or its JSON, for the template
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "null")
        except json.JSONDecodeError as error:
            raise ValueError(f"tools must be a list, or its JSON ({error.msg})") from error
    if tools:
        if "messages" not in form:
            raise ValueError("tools go with messages: leave them out, or write the chat so")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("tools must be a list of objects")
        form["tools"] = tools
    json.dumps(form, ensure_ascii=False, default=str).encode()  # half a character has no code
    return form


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and i >= 0 for i in value)


def _question(
    row: dict[str, Any], column: str, answer: str | None, more: Sequence[str]
) -> dict[str, Any]:
    """What `column` asks: text, a chat, or a list of user turns, of which the first is taken."""
    question, reply = row[column], row.get(answer or "")
    if (turns := _turns(question)) is not None:
        if answer is not None and (reply := _turns(reply)) is None:
            reply = [{"role": "assistant", "content": _text(row, answer)}]
        return {"messages": [*read_messages(turns), *(read_messages(reply) if reply else [])]}
    if isinstance(question, list) and question:
        row = row | {column: question[0]}
    texts = [_text(row, name) for name in (column, *more) if name == column or row.get(name)]
    form = {"prompt": "\n\n".join(texts)}
    return form if answer is None else form | {"completion": _text(row, answer)}


def _turns(value: Any) -> list[Any] | None:
    """The turns of a chat, a list or its JSON text; None for what is none."""
    turns = value
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            turns = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    is_chat = bool(turns) and (turns is value or any(keys <= turns[0].keys() for keys in TURNS))
    return turns if is_chat else None


def _text(row: dict[str, Any], column: str) -> str:
    if not isinstance(row[column], str):
        raise ValueError(f"the {column} must be text, got {type(row[column]).__name__}")
    return row[column]


def question_id(form: dict[str, Any]) -> str:
    """16 hex digits of the question: rows that differ in the answer alone share a split.

    Of a chat that is what comes up to its first user turn, but for a system turn: there the same
    question may come under another date. Of a text it is all of it; its first tokens, which are
    the prompt, `data.prompts` looks at. White space makes no difference.
    """
    question: Any = form.get("text", form.get("prompt"))
    if IDS[0] in form:  # all turns of a conversation are one document
        question = form.get("document") or form[IDS[0]]
    if "messages" in form:
        turns = [turn for turn in form["messages"] if turn["role"] not in ("system", "developer")]
        roles = [turn["role"] for turn in turns]
        first = roles.index("user") + 1 if "user" in roles else len(turns)
        question = turns[:first] or form["messages"]
    return name_of(question)


def name_of(question: Any) -> str:
    """16 hex digits that texts or turns share if they differ in white space alone."""
    canonical = json.dumps(_spaced_once(question), sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _spaced_once(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, dict):
        return {key: _spaced_once(one) for key, one in value.items()}
    return [*map(_spaced_once, value)] if isinstance(value, list) else value
