"""Rollouts come back exactly, and a damaged file is named."""

import math
import os
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftkit.data import rollouts
from draftkit.data.rollouts import (
    OPTIONAL,
    SCHEMA,
    Record,
    from_bytes,
    read_parts,
    read_records,
    to_bytes,
)
from draftkit.data.rollouts import write_records as write

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
    """To the bit, by files and by bytes; what is absent is no empty list, and names of folders are
    no columns."""
    path = tmp_path / "seed=7" / "extra=1" / "rollouts.parquet"
    odd = replace(FULL, tail_mass=[math.nan, 0.0, -0.0], topk_ids=[[], [2**31 - 1], [-1, 0]])
    for records in ([], [PLAIN, FULL, EMPTY, odd]):
        write(path, records)
        assert repr(read_records(path)) == repr(records)
        assert [repr(from_bytes(to_bytes(one))) for one in records] == [*map(repr, records)]


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


def other_format(path: Path) -> None:
    table = pq.read_table(path).replace_schema_metadata({"draftkit.format": "rollouts-0"})
    pq.write_table(table, path)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "format": (other_format, r"is not a whole rollout file \(format rollouts-0 instead of"),
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
    if path.exists() and damage not in (other_format, REFUSED["columns"][0]):
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


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, [PLAIN])
    with pytest.raises(OverflowError):
        write(path, [FULL, replace(PLAIN, seed=2**70)])
    assert read_records(path) == [PLAIN]
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("name", OPTIONAL)
def test_lists_per_token_must_match_the_output(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 2 entries for 3 output tokens"):
        replace(FULL, **{name: getattr(FULL, name)[:2]})


# Bytes


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**70])
def test_an_id_beyond_32_bits_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match="cannot be stored"):
        to_bytes(replace(PLAIN, output_ids=[wrong]))


def test_other_bytes_are_refused_with_one_line() -> None:
    content = to_bytes(FULL)
    packed = zlib.compress(b"x" * 99)
    for wrong in (b"", content[:-1], b"\7" + content[1:], content[:9], b"x" * 99, packed):
        with pytest.raises(ValueError, match="not a stored record") as caught:
            from_bytes(wrong)
        assert "\n" not in str(caught.value)
