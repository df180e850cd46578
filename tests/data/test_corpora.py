"""Documents from every kind of source, what is refused, and splits that leak nothing."""

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkit.config import DataConfig
from draftkit.config.text import CORPUS, PACKAGED, QUESTIONS
from draftkit.data.corpora import Document, read_documents
from draftkit.data.splits import SPLITS, split_documents
from draftkit.data.store import hash_order
from pipelines.configuration import compose_config

ROWS = [{"text": f"A story about number {number}."} for number in range(5)]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path | str, **options: Any) -> list[Document]:
    return list(read_documents(DataConfig(**{"name": "local", "path": str(path)} | options)))


def refusal(act: Callable[[], object]) -> str:
    """The one line that a person sees."""
    with pytest.raises(ValueError, match=r"data\b") as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Files


def test_json_lines_and_parquet_hold_the_same_documents(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "x"}
    rows = [{"messages": [{"role": "user", "content": f"Say {n}"}, answer]} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "same.parquet")
    one = load(jsonl(tmp_path / "same.jsonl", rows))
    assert [document.row for document in one] == rows
    for name in ("same.json", "same.parquet"):
        other = load(jsonl(tmp_path / name, rows) if name.endswith("json") else tmp_path / name)
        assert [replace(document, origin="") for document in other] == [
            replace(document, origin="") for document in one
        ]
    assert {document.domain for document in one} == {"same"}


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n   \n{"text": "two"}')
    assert [document.row["text"] for document in load(path)] == ["one", "two"]


def test_max_rows_reads_no_further(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    with path.open("a") as file:
        file.write("{broken\n")
    assert [document.row for document in load(path, max_rows=5)] == ROWS
    assert "not valid JSON" in load(path, max_rows=6)[-1].fault


TURN = '{"role": "user", "content": "a"}'
REFUSED: list[tuple[bytes | str, str]] = [
    (b'{"text": "a"', "not valid JSON (Expecting ',' delimiter at column 13); each line"),
    (b"[1, 2]", "a JSON list; each line is one object"),
    (b'{"text": "caf\xe9"}', "not UTF-8 text (invalid continuation byte)"),
    ('{"text": 5}', "text must be text, got int"),
    ('{"text": "\\ud800"}', "holds half a character (surrogates"),
    ('{"text": null}', "nothing under messages, prompt or text; columns found: text"),
    ('{"query": "a", "reply": "b"}', "columns found: query, reply; name yours by"),
    ('{"question": "a", "context": {"x": 1}}', "the context must be text, got dict"),
    ('{"conversations": [{"from": "bot", "value": "a"}]}', "messages[0] must have a role, one"),
    ('{"prompt": ' + "[" * 100_000, "nested too deep to be read"),
    ('{"prompt": "a", "completion": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ('{"messages": []}', "messages must be a list of at least one message"),
    (f'{{"messages": [{TURN}], "tools": "f"}}', "tools must be a list,"),
    (f'{{"messages": [{TURN}], "tools": ["f"]}}', "tools must be a list of objects"),
    ('{"prompt": "a", "tools": [{"name": "f"}]}', "tools go with messages"),
    ('{"prompt": "a", "completion": 3}', "the completion must be text, got int"),
    ('{"prompt": [], "completion": "a"}', "the prompt must be text, got list"),
]


@pytest.mark.parametrize(("line", "reason"), REFUSED)
def test_a_row_that_cannot_be_used_is_one_line_with_its_place(
    tmp_path: Path, line: bytes | str, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + (line.encode() if isinstance(line, str) else line))
    fine, bad = load(path)
    assert (fine.row, fine.fault, bad.row) == ({"text": "fine"}, "", {})
    assert bad.origin == f"data.path {path}, line 2"
    assert reason in bad.fault
    assert "\n" not in bad.fault


def test_one_row_of_a_parquet_file_may_be_bad(tmp_path: Path) -> None:
    texts = pa.array([b"fine", b"caf\xe9", None, b"fine"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    documents = load(tmp_path / "a.parquet")
    assert [document.row for document in documents] == [{"text": "fine"}, {}, {}, {"text": "fine"}]
    assert documents[1].fault == "not UTF-8 text (unexpected end of data)"
    assert documents[2].fault.startswith("nothing under messages, prompt or text")
    assert documents[2].origin.endswith("a.parquet, row 3")


def test_paths_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    for suffix in ("jsonl", "txt", "parquet"):
        (tmp_path / f"empty.{suffix}").write_text("" if suffix == "parquet" else "\n \n\n")
    for name, reason in (
        ("no.jsonl", "does not exist: name a file (.jsonl, "),
        ("", "is a folder: name one file in it (it holds cut.parquet, empty.jsonl, "),
        ("rows.csv", "rows.csv has none of the known suffixes: .jsonl"),
        ("latin.txt", "latin.txt: not UTF-8 text"),
        ("cut.parquet", "cut.parquet: not readable (ArrowInvalid"),
        ("empty.parquet", "empty.parquet: not readable (ArrowInvalid"),
        ("empty.jsonl", "empty.jsonl is empty"),
        ("empty.txt", "empty.txt is empty"),
    ):
        assert reason in refusal(lambda name=name: load(tmp_path / name))


def test_short_paragraphs_of_a_text_are_joined_and_long_ones_stay_whole(tmp_path: Path) -> None:
    speeches = [f"SPEAKER {number}:\nA line\nand another." for number in range(300)]
    play = "\r\n\r\n \r\n".join(speeches)
    (tmp_path / "play.txt").write_bytes(f"\ufeff \n  {play} \t\n\f\n".encode())
    documents = load(tmp_path / "play.txt")
    texts = [document.row["text"] for document in documents]
    assert "\n\n".join(texts) == "\n\n".join(speeches)
    assert all(1900 < len(text) <= 2002 for text in texts[:-1])
    kept = ["short", "long " * 2000, "last"]
    (tmp_path / "long.txt").write_text("\n\n".join(kept))
    assert [document.row["text"] for document in load(tmp_path / "long.txt")] == kept


@pytest.mark.parametrize("key", ["prompt_column", "completion_column"])
def test_an_unknown_column_is_answered_with_those_found(tmp_path: Path, key: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "text": "c"}])
    (document,) = load(path, **{key: "qestion"})
    assert document.fault == (
        f"data.{key} 'qestion' is not in it; columns found: prompt, completion, text"
    )


CHAT = [{"role": "user", "content": "a"}]
CALL = {"role": "assistant", "tool_calls": [{"name": "f"}]}
TOOLS = [{"name": "f", "about": {"x": 1}}]


def test_nulls_by_which_parquet_fills_absent_keys_are_absent(tmp_path: Path) -> None:
    called = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": some}}]}
        for some in ({"city": "SF"}, {"zip": 1, "more": [{"a": 1}, {"b": 2}]})
    ]
    rows = [{"messages": [*CHAT, CALL, *called], "tools": [*TOOLS, {"name": "g"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() != rows
    assert load(tmp_path / "a.parquet")[0].row == rows[0]


# Hub data sets


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("hub_cache")
def test_a_hub_data_set_gives_the_documents_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "stories").mkdir()
    path = jsonl(tmp_path / "stories" / "train.jsonl", ROWS)
    jsonl(tmp_path / "stories" / "test.jsonl", [{"text": "held out"}])
    found = load(path.parent, name="hub", split="train[:4]")
    assert [document.id for document in found] == [document.id for document in load(path)][:4]
    assert load(path.parent, name="hub", split="test")[0].row == {"text": "held out"}
    message = refusal(lambda: load(path.parent, name="hub", split="dev"))
    assert message.startswith(f"data.path {path.parent} could not be loaded (ValueError: Unknown")


# Splits


def documents_of(sizes: dict[str, int]) -> list[Document]:
    return [
        Document(f"{domain}:{number}", domain, {"text": f"{domain} {number}"})
        for domain, size in sizes.items()
        for number in range(size)
    ]


OF_A_FILE = DataConfig(name="local", path="rows.jsonl")


def split(documents: Sequence[Document], data: DataConfig) -> dict[str, list[Document]]:
    keys = np.array([document.key for document in documents], np.uint64)
    splits = split_documents(keys, [document.split for document in documents], data)
    parts = {name: [*itertools.compress(documents, splits == n)] for n, name in enumerate(SPLITS)}
    assert sum(map(len, parts.values())) == len(documents)
    return parts


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 80), st.floats(0.001, 0.499), st.floats(0.001, 0.499))
def test_no_split_is_empty_or_too_large(count: int, validation: float, test: float) -> None:
    data = replace(OF_A_FILE, validation_fraction=validation, test_fraction=test)
    parts = split(documents_of({"a": count}), data)
    sizes = {name: len(part) for name, part in parts.items()}
    assert min(sizes.values()) >= 1
    assert sizes["test"] <= max(1, count * test)
    assert sizes["validation"] <= max(1, count * validation)


def test_fewer_than_three_documents_are_refused(tmp_path: Path) -> None:
    data = DataConfig(name="local", path=str(tmp_path / "a.jsonl"))
    jsonl(tmp_path / "a.jsonl", [*ROWS[:2], ROWS[0]])
    message = refusal(lambda: split(load(str(data.path)), data))
    assert message.startswith(f"data.path {tmp_path / 'a.jsonl'} gives 2 different documents")


def test_gsm8k_keeps_its_own_test_split() -> None:
    data = compose_config(["data=gsm8k"]).data
    documents = list(read_documents(data))
    parts = split(documents, data)
    rows = pq.read_table(data.file).to_pylist()
    own = {row["prompt"] for row in rows if row["split"] == "test"}
    assert {document.row["prompt"] for document in parts["test"]} == own
    assert {document.domain for document in documents} == {"gsm8k"}
    assert [len(parts[name]) for name in ("train", "validation", "test")] == [3120, 180, 300]
    few = split(documents[:40], data)  # none is kept for tests
    assert [len(few[name]) for name in ("train", "validation", "test")] == [36, 2, 2]


def test_the_questions_that_come_along_are_of_all_kinds_and_no_passage_is_in_two_splits() -> None:
    data = compose_config(["data=questions"]).data
    documents = [*read_documents(data)]
    counts = Counter(one.domain for one in documents)
    assert {*counts} == {*PACKAGED[QUESTIONS]}
    assert 230 < min(counts.values()) <= max(counts.values()) < 280
    parts = split(documents, data)
    domains = {name: {one.domain for one in part} for name, part in parts.items()}
    assert domains == {name: {*counts} for name in parts}
    splits_of = defaultdict[str, set[str]](set)  # of 28 words in a row
    for row in pq.read_table(data.file).to_pylist():
        words = re.findall(r"\w+", row["prompt"].lower())
        for at in range(len(words) - 27):
            splits_of[" ".join(words[at : at + 28])].add(row["split"])
    assert not [passage for passage, own in splits_of.items() if len(own) > 1]


def test_one_kind_of_the_questions_can_be_read_alone() -> None:
    data = compose_config(["data=questions", "data.domains=[code,math]"]).data
    assert {one.domain for one in read_documents(data)} == {"code", "math"}


HELD_OUT = ("accelerate/", "rich/", "hydra/", "omegaconf/", "asyncio/", "email/")
HELD_OUT += ("torch/include/c10/", "torch/include/pybind11/", "pyarrow/include/arrow/compute/")


def test_the_corpus_holds_out_packages_that_the_embedded_target_never_saw() -> None:
    """The target's own recipe held out the same ones, and the same files for validation."""
    rows = pq.read_table(DataConfig().file).to_pylist()
    assert all((row["split"] == "test") == row["name"].startswith(HELD_OUT) for row in rows)
    by_hash = [row for row in rows if row["split"] != "test"]
    for row in by_hash:
        late = hash_order(f"part {row['name']}") >> 56 < 0x0D
        assert late == (row["split"] == "validation"), row["name"]
    parts = split([*read_documents(DataConfig())], DataConfig())
    assert {name: len(part) for name, part in parts.items()} == Counter(r["split"] for r in rows)


@pytest.mark.parametrize(
    ("path", "row"),
    [
        (CORPUS, r"^\| ([\w-]+)\b.* \| (\d+) \| \S+ \|$"),
        (QUESTIONS, r"^\| ([\w-]+) \| (\d+) \| [A-Z][^|]+ \| [^|]+ \|$"),
    ],
)
def test_each_source_of_text_that_comes_along_stands_in_its_card_with_a_licence(
    path: str, row: str
) -> None:
    file = DataConfig(path=path).file
    rows = re.findall(row, file.with_suffix(".md").read_text(), re.M)
    counts = Counter(pq.read_table(file)["source"].to_pylist())
    assert {source: int(count) for source, count in rows} == counts
    licences = file.with_name(f"{file.stem}_licences.txt").read_text().lower()
    licences += file.with_name("gsm8k.md").read_text().lower()
    assert not [source for source in counts if source.lower() not in licences]


def test_the_first_rows_of_the_corpus_are_of_all_domains_and_splits() -> None:
    some = [*read_documents(DataConfig(max_rows=60))]
    assert {(one.domain, one.split) for one in some} == set(
        itertools.product(("python", "prose", "cpp"), ("train", "validation", "test"))
    )
    (domain,) = {one.domain for one in read_documents(DataConfig(domains=["cpp"], max_rows=9))}
    assert domain == "cpp"


SAID = {"role": "assistant", "content": "ok"}
GREETING = {"role": "assistant", "content": "hello"}


@pytest.mark.parametrize(
    "rows",
    [
        [{"prompt": f"a b{space}", "completion": space} for space in ("", " ", "\n")],
        [{"messages": [{"role": "system", "content": day}, *CHAT, SAID]} for day in "xy"],
        [{"messages": [GREETING, *CHAT, *[SAID] * count]} for count in range(3)],
    ],
    ids=["white space and answers", "system turns", "a log that grows"],
)
def test_rows_of_one_question_are_one_document(rows: list[Any], tmp_path: Path) -> None:
    other = {"messages": [GREETING, {"role": "user", "content": "b"}]}
    ids = [one.id for one in load(jsonl(tmp_path / "a.jsonl", [*rows, other]))]
    assert len({*ids[:-1]}) == 1
    assert ids[-1] not in ids[:-1]
