"""Random conversations by four ways: a file of JSON, one of Parquet, a call, a request.

The ids are those of the template on the form that it expects, however a conversation is written.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.datastructures import Headers
from transformers import PreTrainedTokenizerFast as Fast

from draftkit.config import DataConfig, SamplingConfig, ServeConfig
from draftkit.data.corpora import read_documents
from draftkit.data.prompts import RowReader
from draftkit.prompts import examples_of
from draftkit.serving.intake import Intake, Texts
from draftkit.serving.protocol import ChatRequest
from tests.templates import SHAPES, shaped

KINDS = [name for name in SHAPES if name != "r1"]  # it takes no arguments that are objects
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "string"}}}}]
PIECES = ["hi", "the draft", "Grüße", "猫", '"quoted"', "\n", "  ", "{{ x }}", "<b>", "it's", "\\n"]
LONG = 100_000
Turns = list[dict[str, Any]]


def text(draw: random.Random) -> str:
    return "x" + "".join(draw.choices(PIECES, k=draw.randrange(5)))


def value(draw: random.Random, levels: int = 2) -> Any:
    plain = (text(draw), draw.randrange(99), 0.5, True, None, [], {})
    if not levels or draw.random() < 0.6:
        return draw.choice(plain)
    inner = [value(draw, levels - 1) for _ in range(draw.randrange(3))]
    return inner if draw.random() < 0.5 else {text(draw): one for one in inner}


def answer(draw: random.Random, *, calls: bool) -> dict[str, Any]:
    """An answer as templates expect it: with reasoning, or none, and tool calls."""
    turn: dict[str, Any] = {"role": "assistant", "content": text(draw)}
    kind = draw.choice(["none", "inside", "reasoning_content", "thinking"])
    if kind == "inside":
        turn["content"] = f"<think>\n{text(draw)}\n</think>\n\n{turn['content']}"
    elif kind != "none":
        turn[kind] = text(draw)
    if calls:
        arguments = {text(draw): value(draw) for _ in range(draw.randrange(4))}
        function = {"name": "f", "arguments": arguments}
        turn["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
        if draw.random() < 0.3:
            del turn["content"]
    return turn


def conversation(draw: random.Random) -> Turns:
    turns: Turns = []
    if draw.random() < 0.5:
        turns.append({"role": "system", "content": text(draw)})
    for _ in range(draw.randrange(1, 4)):
        turns.append({"role": "user", "content": text(draw)})
        if draw.random() < 0.3:
            turns[-1]["name"] = "ann"
        if draw.random() < 0.4:
            turns.append(answer(draw, calls=True))
            result = {"role": "tool", "tool_call_id": "c1", "name": "f", "content": text(draw)}
            turns.append(result)
        turns.append(answer(draw, calls=False))
    return turns if draw.random() < 0.5 else turns[:-1]


def written(turns: Turns, draw: random.Random, *, parts: bool, names: bool) -> Turns:
    """`turns` as somebody may write them. parts: of text; names: those of ShareGPT."""
    spoken = {"user": "human", "assistant": "gpt", "tool": "observation"}
    made = []
    for turn in json.loads(json.dumps(turns)):
        if names and draw.random() < 0.3 and "content" in turn:
            turn = {
                "from": spoken.get(turn["role"], turn["role"]),
                "value": turn.pop("content"),
            } | {key: one for key, one in turn.items() if key != "role"}
        for call in turn.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        if "content" not in turn and "value" not in turn:
            turn["content"] = None
        elif parts and "content" in turn and draw.random() < 0.5:
            cut = draw.randrange(len(turn["content"]) + 1)
            halves = (turn["content"][:cut], turn["content"][cut:])
            turn["content"] = [{"type": "text", "text": half} for half in halves]
        for key, empty in (("refusal", None), ("audio", None), ("function_call", None)):
            if draw.random() < 0.3:
                turn[key] = empty
        if draw.random() < 0.3:
            turn.setdefault("tool_calls", draw.choice([None, []]))
        made.append(turn)
    return made


def expected(tokenizer: Fast, turns: Turns, tools: Any, *, fixed: bool) -> list[int]:
    template = str(tokenizer.chat_template)
    if fixed:
        template = template.replace("strftime_now('%Y-%m-%d')", "'2026-01-01'")
    return tokenizer.apply_chat_template(
        turns, tools=tools, chat_template=template, add_generation_prompt=True
    )["input_ids"]


def prompts_of(path: Path, tokenizer: Fast) -> list[list[list[int]]]:
    """The prompts that training reads, of each row in a file."""
    data = DataConfig(name="local", path=str(path))
    read = RowReader(tokenizer, data).read(read_documents(data))
    return [[example.prompt_ids for example in made] for _, made in read]


def served(tokenizer: Fast, tools: Any, chats: list[Turns]) -> list[list[int]]:
    """The prompts that a server reads."""
    options = {} if tools is None else {"tools": tools}
    intake = Intake(
        texts=Texts(tokenizer, len(tokenizer), DataConfig(template_options=options)),
        settings=ServeConfig(),
        max_length=LONG,
        sampling=SamplingConfig(),
        routes=("default",),
        model_name="m",
    )
    bodies = [ChatRequest(model="m", messages=turns, max_tokens=1) for turns in chats]
    return [intake.prepare(body, Headers())[0].prompt_ids for body in bodies]


@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_template_by_every_way(kind: str, count: int, tmp_path: Path) -> None:
    draw, tokenizer = random.Random(f"{kind} {count}"), shaped(kind)
    # A template that knows tools is given some in every second chat.
    given = [
        None,
        TOOLS if "tools" in str(tokenizer.chat_template) and kind != "phi4-mini" else None,
    ]
    for tools in given[: 1 + (given[1] is not None)]:
        chats = [conversation(draw) for _ in range(count // len({*map(str, given)}))]
        row = {} if tools is None else {"tools": tools}
        ends = [
            [n for n in range(1, len(turns)) if turns[n]["role"] == "assistant"]
            + [len(turns)] * (turns[-1]["role"] != "assistant")
            for turns in chats
        ]
        wanted = [
            [expected(tokenizer, turns[:end], tools, fixed=True) for end in of_chat]
            for turns, of_chat in zip(chats, ends, strict=True)
        ]
        loose = [written(turns, draw, parts=True, names=True) for turns in chats]
        lines = tmp_path / "rows.jsonl"
        lines.write_text("".join(json.dumps({"messages": one} | row) + "\n" for one in loose))
        assert prompts_of(lines, tokenizer) == wanted

        even = [written(turns, draw, parts=False, names=False) for turns in chats]
        columns = [{"messages": turns, "tools": json.dumps(tools)} for turns in even]
        pq.write_table(pa.Table.from_pylist(columns), tmp_path / "rows.parquet")
        assert prompts_of(tmp_path / "rows.parquet", tokenizer) == wanted

        target: Any = SimpleNamespace(
            tokenizer=tokenizer, adapter=SimpleNamespace(vocab_size=len(tokenizer), start_id=None)
        )
        rows: list[Any] = [{"messages": one, **row} for one in loose] if row else loose
        examples = examples_of(rows, target, DataConfig(), context=LONG)
        assert [one.prompt_ids for one in examples] == [
            ids for of_chat in wanted for ids in of_chat
        ]

        asked = [turns[: of_chat[-1]] for turns, of_chat in zip(chats, ends, strict=True)]
        bodies = [written(turns, draw, parts=True, names=False) for turns in asked]
        assert served(tokenizer, tools, bodies) == [
            expected(tokenizer, turns, tools, fixed=False) for turns in asked
        ]
