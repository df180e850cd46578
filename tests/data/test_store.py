"""Sequences on disk behave as lists do, and what exceeds memory is read all the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkit.data.store import Mapped, Picked, Stored, write_rows

SCHEMA = pa.schema([("number", pa.int64()), ("words", pa.list_(pa.string()))])
COUNT = 2500  # more than two batches


def row(number: int) -> dict[str, object]:
    return {"number": number, "words": [str(number)] * (number % 3)}


ROWS = [row(number) for number in range(COUNT)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored[dict[str, object]]:
    path = tmp_path_factory.mktemp("store") / "rows.arrow"
    write_rows(path, SCHEMA, map(row, range(COUNT)))
    return Stored(path, dict)


def test_what_is_stored_comes_back_in_order(stored: Stored[dict[str, object]]) -> None:
    assert len(stored) == COUNT
    assert list(stored) == ROWS
    assert [stored[place] for place in (0, 1023, 1024, 2499, -1)] == [
        ROWS[place] for place in (0, 1023, 1024, 2499, -1)
    ]
    for place in (COUNT, -COUNT - 1):
        with pytest.raises(IndexError):
            stored[place]


@given(st.slices(COUNT), st.slices(COUNT))
def test_a_slice_is_that_of_a_list(stored, first: slice, second: slice) -> None:
    found = stored[first]
    assert len(found) == len(ROWS[first])
    assert list(found[:3]) == ROWS[first][:3]
    assert len(found[second]) == len(ROWS[first][second])


def test_picked_and_mapped_rows_are_made_when_they_are_asked_for() -> None:
    asked: list[int] = []

    def double(number: int) -> int:
        asked.append(number)
        return 2 * number

    doubled = Mapped(double, range(10))
    chosen = Picked(doubled, [7, 3])
    assert (len(doubled), len(chosen), asked) == (10, 2, [])
    assert (chosen[0], chosen[-1], asked) == (14, 6, [7, 3])
    assert list(doubled) == list(range(0, 20, 2))


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
from draftkit.data.corpora import read_documents, store_documents
from draftkit.data.prompts import make_splits
from draftkit.models.vocabulary import train_byte_bpe

folder, how, room = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
data = DataConfig(name="local", path=str(folder / "rows.jsonl"), max_length=2048)
tokenizer = train_byte_bpe(["draft target " * 20], 300)
tokenizer(["warm up"] * 300)
status = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
limit = int(status["VmData"].split()[0]) * 1024 + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if how == "memory":
    documents = list(read_documents(data))
else:
    documents = store_documents(data, folder / "documents.arrow")
splits = make_splits(documents, data, tokenizer, folder)
tokens = sum(len(example.token_ids) for example in splits.train)
print(json.dumps({"tokens": tokens, "examples": len(splits.train)}))
"""


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_text_larger_than_memory_is_split_and_tokenised(tmp_path: Path) -> None:
    """120 MB of text in a process that may take 80 MB more; kept in a list it does not fit."""
    text = "draft target " * 100
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(120_000_000 // len(text)):
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")

    def run(how: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", READ, str(tmp_path), how, str(80 << 20)]
        # Arrow's usual allocator takes memory ahead of need.
        environment = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    found = run("disk")
    assert found.returncode == 0, found.stderr[-2000:]
    assert json.loads(found.stdout)["examples"] > 70_000
    refused = run("memory")
    assert refused.returncode != 0
    assert "MemoryError" in refused.stderr or "allocate" in refused.stderr
