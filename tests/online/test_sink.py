"""Records at an address: parts are whole or absent, and another machine reads them as data."""

import multiprocessing
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest

from draftkit.config import DataConfig
from draftkit.data.corpora import parts_at, read_documents
from draftkit.data.lengths import lengths_within
from draftkit.data.prompts import RowReader
from draftkit.data.rollouts import Record
from draftkit.data.rows import row_form
from draftkit.online import sink
from draftkit.online.sink import Sink
from tests.serving.fakes import wait_for
from tests.tiny import byte_tokenizer

TARGET = "a checksum"
sink_at = partial(Sink, target=TARGET)


@pytest.fixture(params=["file", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder on the disk, and one of objects, which are put whole."""
    return f"file://{tmp_path}/sink" if request.param == "file" else f"memory://{tmp_path.name}"


def entry(number: int, tokens: int = 3) -> tuple[str, Record]:
    law = {"temperature": 0.5, "top_k": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}
    return f"route {number % 2}", Record(
        prompt_ids=[number % 200, 7],
        output_ids=[number % 200] * tokens,
        sampler="engine",
        sampler_version="v1",
        sampling=law,
        seed=0,
        row=0,
        document=f"talk {number // 2}",
    )


def parts(address: str) -> list[str]:
    """Those that are there now."""
    parts_at.cache_clear()
    fsspec.url_to_fs(address)[0].invalidate_cache()
    return parts_at(address)[1]


def rows(address: str) -> list[dict[str, Any]]:
    parts_at.cache_clear()
    files, parts = parts_at(address)
    return [row for part in parts for row in pq.read_table(part, filesystem=files).to_pylist()]


def test_what_is_offered_is_there_in_order_when_it_closes(address: str) -> None:
    made = sink_at(address)
    made.offer([entry(number) for number in range(40)])
    made.close()
    assert made.dropped == 0
    for path in [*Path(address.removeprefix("file://")).glob("*")]:  # on a disk its owner's alone
        assert path.stat().st_mode & 0o077 == 0
    found = rows(address)
    assert [row["prompt_ids"][0] for row in found] == [*range(40)]
    assert found[5] == {
        **{"prompt_ids": [5, 7], "output_ids": [5, 5, 5], "document": "talk 2", "domain": ""},
        **{"route": "route 1", "sampler_version": "v1", "temperature": 0.5, "top_k": 0.0},
        **{"top_p": 1.0, "repetition_penalty": 1.0},
    }


def test_a_part_is_sealed_by_its_size_and_by_its_age(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "PART_TOKENS", 50)  # ten records
    made = sink_at(address)
    made.offer([entry(number) for number in range(25)])
    assert wait_for(lambda: len(parts(address)) == 2)
    monkeypatch.setattr(sink, "PART_SECONDS", 0.0)
    assert wait_for(lambda: len(rows(address)) == 25)
    made.close()


def test_two_writers_share_an_address(address: str) -> None:
    both = [sink_at(address), sink_at(address)]
    for number, one in enumerate(both):
        one.offer([entry(100 * number + n) for n in range(10)])
        one.close()
    assert len(rows(address)) == 20
    assert len(parts(address)) == 2


def test_an_address_that_takes_nothing_costs_its_records_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink, "QUEUE", 8)
    made = sink_at("memory://refusing")

    def refuse(*_: Any) -> None:
        raise OSError("it is full")

    monkeypatch.setattr(made._files, "pipe_file", refuse)
    began = time.monotonic()
    made.offer([entry(number) for number in range(100)])
    assert time.monotonic() - began < 5
    made.close()
    assert made.dropped == 100
    assert parts("memory://refusing") == []


@pytest.mark.parametrize(("limit", "value"), [("QUEUE", 8), ("QUEUE_TOKENS", 40)])
def test_an_address_that_hangs_holds_few_records_and_keeps_nobody_at_the_end(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    made, reached, released = sink_at("memory://hanging"), threading.Event(), threading.Event()
    monkeypatch.setattr(made._files, "pipe_file", lambda *_: (reached.set(), released.wait(60)))
    monkeypatch.setattr(sink, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(sink, "PART_TOKENS", 1)
    monkeypatch.setattr(sink, limit, value)
    made.offer([entry(1)])
    assert reached.wait(10)
    made.offer([entry(number) for number in range(30)])  # of five tokens each
    assert made.dropped == 22
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 5
    released.set()


def test_where_files_grow_in_sight_a_part_takes_its_name_when_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink, "OBJECTS", ())
    made = sink_at("memory://growing")
    moved = list[tuple[str, str]]()
    real = made._files.mv
    monkeypatch.setattr(made._files, "mv", lambda a, b: (moved.append((a, b)), real(a, b)))
    made.offer([entry(1)])
    made.close()
    ((before, name),) = moved
    assert before == f"{name}.part"
    assert [*map(Path, parts("memory://growing"))] == [Path(name)]


def test_an_address_of_an_unknown_kind_is_refused_in_one_line() -> None:
    for use, key in ((sink_at, "online.sink"), (parts_at, "data.path")):
        with pytest.raises(ValueError, match=rf"^{key}\W+nowhere://x") as error:
            use("nowhere://x")
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"^online\.sink=nowhere://x/y") as error:
        sink_at("nowhere://me:secret@x/y")
    assert "secret" not in str(error.value)


def write_until_killed(address: str, target: str = TARGET) -> None:
    made, number = Sink(address, target), 0
    while True:
        made.offer([entry(number % 100, tokens=400)])  # the same fifty conversations
        number += 1
        time.sleep(0.0002)


def kill_writers(address: str, target: str = TARGET) -> None:
    """Two at a time, each in the middle of its work, five times, with parts of ten records."""
    sink.PART_TOKENS = 4000
    forking = multiprocessing.get_context("fork")
    for least in (4, 8, 12, 16, 20):
        both = [
            forking.Process(target=write_until_killed, args=(address, target)) for _ in range(2)
        ]
        for process in both:
            process.start()
        assert wait_for(lambda least=least: len(parts(address)) >= least, 60)
        for process in both:
            process.kill()
            process.join()


def test_a_kill_leaves_whole_parts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "PART_TOKENS", 4000)
    address = f"file://{tmp_path}/sink"
    (tmp_path / "sink").mkdir()
    kill_writers(address)
    count = len(rows(address))  # every part can be read
    assert count >= 200
    assert count % 10 == 0


def test_parts_are_data_for_another_machine(address: str) -> None:
    """Ids as they were served, a conversation in one split, and ids of another model left out."""
    made = sink_at(address)
    made.offer([entry(number) for number in range(40)])
    made.close()
    data = DataConfig(name="local", path=address, max_bad_rows=0.5)
    tokenizer = byte_tokenizer()
    reader = RowReader(tokenizer, data, lengths_within(64, data))
    read = [*reader.read(read_documents(data))]
    examples = [one for _, made in read for one in made]
    assert [one.token_ids for one in examples] == [[n, 7, n, n, n] for n in range(40)]
    assert [one.prompt_ids for one in examples] == [[n, 7] for n in range(40)]
    assert len({document.id for document, _ in read}) == 20
    other, shape = sink_at(address), vars(entry(1)[1])
    for odd in ({"output_ids": [999_999]}, {"prompt_ids": [1] * 64}):
        other.offer([("default", Record(**shape | odd))])
    other.close()
    parts_at.cache_clear()
    reader = RowReader(tokenizer, data, lengths_within(64, data))
    assert sum(len(made) for _, made in reader.read(read_documents(data))) == 40
    # Ids of another vocabulary, and a prompt that would have to be cut open.
    assert (reader.counts["rows_bad"], reader.counts["rows_dropped"]) == (1, 1)


def test_parts_of_another_target_are_refused_and_those_that_name_none_are_not(address: str) -> None:
    made = sink_at(address)
    made.offer([entry(number) for number in range(4)])
    made.close()
    data = DataConfig(name="local", path=address)
    parts_at.cache_clear()
    assert len([*read_documents(data, target=TARGET)]) == 4
    with pytest.raises(ValueError, match=r"^data\.path .*: recorded of another target") as error:
        next(read_documents(data, target="another"))
    assert "\n" not in str(error.value)
    files, (part,) = parts_at(address)
    table = pq.read_table(part, filesystem=files).replace_schema_metadata()
    pq.write_table(table, part, filesystem=files)  # as another program writes it
    assert len([*read_documents(data, target="another")]) == 4


@pytest.mark.parametrize(
    ("row", "named", "reason"),
    [
        ({"prompt_ids": [1, None], "output_ids": [2]}, {}, "lists of whole numbers"),
        ({"prompt_ids": ["a"], "output_ids": [2]}, {}, "lists of whole numbers"),
        ({"prompt_ids": [-1], "output_ids": [2]}, {}, "lists of whole numbers"),
        ({"prompt_ids": [], "output_ids": [2]}, {}, "lists of whole numbers"),
        ({"prompt_ids": [1], "output_ids": [2], "q": 1}, {"prompt_column": "q"}, "must be text"),
    ],
)
def test_rows_that_are_no_records_are_told(
    row: dict[str, Any], named: dict[str, str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        row_form(row, DataConfig(name="local", path="a", **named))
