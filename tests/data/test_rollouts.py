"""Rollouts come back exactly, and a damaged file is named."""

import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftkit.data import rollouts
from draftkit.data.rollouts import OPTIONAL, SCHEMA, Record, read_parts, read_records
from draftkit.data.rollouts import write_records as write
from draftkit.data.store import UNREADABLE

PLAIN = Record(
    prompt_ids=[1, 70_000],
    output_ids=[5, 6, 2],
    sampler="target",
    sampler_version="main@3",
    sampling={"temperature": 0.7, "top_k": 0.0, "top_p": 1.0, "repetition_penalty": 1.1},
    seed=2**62 + 1,
    row=2**40,
)
FULL = replace(
    PLAIN,
    document="python:json/decoder.py",
    domain="python",
    proposals=[5, 9, -1],
    rejected=[False, True, False],
    topk_ids=[[5, 1], [6, 9], [2, 5]],
    topk_log_probs=[[-0.1, -math.pi], [-1e-17, -math.inf], [-5e-324, -1 / 3]],
    tail_mass=[0.1, 1e-300, 1.0 - 2**-53],
    loss_tail_mass=[0.3, 0.25, 0.0],
)
EMPTY = replace(PLAIN, output_ids=[], topk_ids=[], topk_log_probs=[], tail_mass=[])


def test_records_come_back_exactly(tmp_path: Path) -> None:
    """To the bit; what is absent is no empty list, and names of folders are no columns."""
    path = tmp_path / "seed=7" / "extra=1" / "rollouts.parquet"
    odd = replace(FULL, tail_mass=[math.nan, 0.0, -0.0], topk_ids=[[], [2**31 - 1], [-1, 0]])
    for records in ([], [PLAIN, FULL, EMPTY, odd]):
        write(path, records)
        assert repr(read_records(path)) == repr(records)


def test_several_files_read_as_one_sequence_and_few_of_them_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "KEPT", 2)
    opened: list[str] = []
    read = rollouts._read

    def noted(path: Path) -> Any:
        opened.append(path.name)
        return read(path)

    monkeypatch.setattr(rollouts, "_read", noted)
    sizes = [3, 0, 1, 4]
    records = [replace(PLAIN, row=row) for row in range(sum(sizes))]
    for number in range(4):
        some = records[sum(sizes[:number]) : sum(sizes[: number + 1])]
        write(tmp_path / f"part-{number}.parquet", some)
    parts = read_parts(tmp_path)
    assert (len(parts), opened) == (8, [])
    assert list(parts) == records
    assert list(parts[2:7:2]) == records[2:7:2]
    assert opened == ["part-0.parquet", "part-2.parquet", "part-3.parquet", "part-0.parquet"]
    assert parts[-1] == records[-1]
    assert len(opened) == 4
    assert list(read_parts(tmp_path / "none")) == []


def test_every_field_has_its_column() -> None:
    beside = "features"  # which lie in a file of their own
    assert [*SCHEMA.names, beside] == [field.name for field in fields(Record)]
    assert {field.name for field in SCHEMA if field.nullable} == set(OPTIONAL)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "columns": (
        lambda path: pq.write_table(pq.read_table(path).drop_columns(["seed"]), path),
        r"is not a whole rollout file \(other columns",
    ),
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 100), "is not a whole rollout"),
    "text": (lambda path: path.write_bytes(b"no\nparquet\n"), "is not a whole rollout file"),
    "empty": (lambda path: path.write_bytes(b""), "is not a whole rollout file"),
    "missing": (Path.unlink, "is not a file: make the rollouts first"),
}


@pytest.mark.parametrize(("damage", "words"), REFUSED.values(), ids=REFUSED)
def test_what_holds_no_whole_rollouts_is_one_line_that_names_it(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    path = tmp_path / "part-0.parquet"
    write(path, [replace(FULL, row=row) for row in range(50)])
    damage(path)
    with pytest.raises(ValueError, match=rf"^\S*part-0\.parquet {words}") as caught:
        read_records(path)
    assert "\n" not in str(caught.value)
    if path.exists() and damage is not REFUSED["columns"][0]:
        with pytest.raises(ValueError, match=words):
            read_parts(tmp_path)  # at once


def test_no_flipped_bit_gives_other_records(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    records = [replace(FULL, row=row, seed=row * 7919 % 1009) for row in range(50)]
    write(path, records)
    whole = path.read_bytes()
    refused = 0
    for offset in range(4, len(whole), 37):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
        try:
            assert read_records(path) == records
        except ValueError:
            refused += 1
    assert refused > 10


def test_a_flipped_bit_in_the_number_of_rows_drops_none(tmp_path: Path) -> None:
    path = tmp_path / "part-0.parquet"
    write(path, [PLAIN] * 50)
    whole = path.read_bytes()

    def says(offset: int) -> int | None:
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 4]) + whole[offset + 1 :])
        try:
            return pq.read_metadata(path).num_rows
        except UNREADABLE:
            return None

    assert any(says(offset) == 48 for offset in reversed(range(len(whole))))
    for read in (read_records, lambda path: list(read_parts(path.parent))):
        with pytest.raises(ValueError, match=r"part-0\.parquet is not a whole .* \(another number"):
            read(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [PLAIN])
    with pytest.raises(ValueError, match="a row cannot be stored: "):
        write(path, [FULL, replace(PLAIN, seed=2**70)])
    assert read_records(path) == [PLAIN]
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("name", OPTIONAL)
def test_lists_per_token_must_match_the_output(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 2 entries for 3 output tokens"):
        replace(FULL, **{name: getattr(FULL, name)[:2]})


def test_lots_of_another_size_are_made_anew(tmp_path: Path) -> None:
    records = [replace(PLAIN, row=row) for row in range(10)]

    def written(size: int) -> list[int]:
        made: list[int] = []

        def make(rows: range) -> list[Any]:
            made.append(rows.start)
            return records[rows.start : rows.stop]

        parts = rollouts.write_parts(tmp_path, 10, size=size, make=make)
        assert [one for part in parts for one in part] == records
        assert list(read_parts(tmp_path)) == records
        return made

    assert written(2) == [0, 2, 4, 6, 8]
    assert written(2) == []
    assert written(4) == [0, 4]  # the last two records are the same lot
    assert written(4) == []
