"""Sequences on disk behave as lists do, and what exceeds memory is read all the same."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkit.data.store import Lazy, pack, read_rows, write_rows

SCHEMA = pa.schema([("number", pa.int64()), ("words", pa.list_(pa.string()))])
COUNT = 2500  # more than two batches


@dataclass
class Row:
    number: int
    words: list[str]


ROWS = [Row(number, [str(number)] * (number % 3)) for number in range(COUNT)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Lazy[Row]:
    path = tmp_path_factory.mktemp("store") / "rows.arrow"
    write_rows(path, SCHEMA, iter(ROWS))
    return read_rows(path, Row)


def test_what_is_stored_comes_back_in_order(stored: Lazy[Row]) -> None:
    assert list(stored) == ROWS
    assert all(stored[at] == ROWS[at] for at in (0, 1023, 1024, 2499, -1))
    for at in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            stored[at]


@given(st.slices(COUNT), st.slices(COUNT))
def test_a_slice_is_that_of_a_list(stored, first: slice, second: slice) -> None:
    some = stored[first]
    assert len(some) == len(ROWS[first])
    assert list(some[:3]) == ROWS[first][:3]
    assert len(some[second]) == len(ROWS[first][second])


def test_items_are_made_when_they_are_asked_for() -> None:
    made: list[int] = []

    def double(number: int) -> int:
        made.append(number)
        return 2 * number

    for items in (range(10), list(range(10)), np.arange(10), Lazy(int, range(10))):
        made.clear()
        doubled = Lazy(double, items)
        chosen = Lazy(doubled.__getitem__, np.array([7, 3]))
        assert (len(doubled), len(chosen), len(doubled[2:]), made) == (10, 2, 8, [])
        assert (chosen[0], chosen[-1], doubled[2:][0], made) == (14, 6, 4, [7, 3, 2])
        assert list(doubled) == list(range(0, 20, 2))


@pytest.mark.parametrize("wrong", [2**63, "seven"])
def test_a_value_that_its_column_cannot_hold_is_refused_in_one_line(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"^a row cannot be stored: .*$"):
        pack([ROWS[0], replace(ROWS[1], number=wrong)], SCHEMA)


def test_rows_that_cannot_be_made_leave_no_file(tmp_path: Path) -> None:
    def rows():
        yield from ROWS[:1500]
        raise ValueError("row 1501")

    with pytest.raises(ValueError, match="row 1501"):
        write_rows(tmp_path / "a.arrow", SCHEMA, rows())
    assert list(tmp_path.iterdir()) == []


READ = """
import json, resource, sys
from pathlib import Path
from draftkit.config import DataConfig
from draftkit.data.corpora import read_documents
from draftkit.data.splits import make_splits
from tests.trained import train_byte_bpe

file, how, room = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
data = DataConfig(name="local", path=str(file), max_length=2048)
tokenizer = train_byte_bpe(["draft target " * 20], 300)
tokenizer(["warm up"] * 300)
status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
limit = int(status["VmData"].split()[0]) * 1024 + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
documents = read_documents(data)
documents = list(documents) if how == "list" else documents
splits = make_splits(documents, data, tokenizer, file.parent)
tokens = sum(len(example.token_ids) for example in splits.train)
print(json.dumps({"tokens": tokens, "examples": len(splits.train)}))
"""


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt"])
def test_text_larger_than_memory_is_split_and_tokenised(tmp_path: Path, name: str) -> None:
    """120 MB of text in a process that may take 80 MB more; kept in a list it does not fit."""
    text = "draft target " * 150
    with (tmp_path / name).open("w") as file:
        for number in range(120_000_000 // len(text)):
            row = f"{number} {text}"
            file.write((json.dumps({"text": row}) if name.endswith("jsonl") else f"{row}\n") + "\n")

    def run(how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", READ, str(tmp_path / name), how, str(80 << 20)]
        # Arrow's usual allocator takes memory ahead of need.
        environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    whole = run("in turn")
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert json.loads(whole.stdout)["examples"] > 50_000
    refused = run("list")
    assert refused.returncode != 0
    assert "MemoryError" in refused.stderr or "allocate" in refused.stderr
