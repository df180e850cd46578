"""Examples by split, in files that are mapped into memory.

The split goes by document, in the order of a hash, so that no text is in two parts: a source file
stays with its docstrings, a question with all its answers. This module does not know how rows are
read.
"""

import hashlib
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from draftkit.artifacts import read_json, remove, write_json
from draftkit.config import DataConfig
from draftkit.data.corpora import Document
from draftkit.data.lengths import COUNTS, WHOLE, Lengths, Room, lengths_within
from draftkit.data.prompts import Example, RowReader
from draftkit.data.store import Lazy, hash_order, rank_in_group, read_rows, write_rows

SPLITS = ("train", "validation", "test")
ABOUT = "splits.json"  # beside their files: what is known of them
UNSORTED = "unsorted.arrow"
SCHEMA = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("document", pa.string()),
        ("domain", pa.string()),
    ]
)


@dataclass(frozen=True)
class Splits:
    """Examples by split, in an order in which any first n are of as many documents as there are.

    Each document gives one example, in hash order, before any gives a second.
    """

    train: Sequence[Example]
    validation: Sequence[Example]
    test: Sequence[Example]
    sha256: str  # of token ids and masks, in order
    counts: dict[str, int]  # examples by split, and COUNTS
    room: Room  # of sampled answers to their prompts
    left_out: Sequence[str] = ()  # the first bad row of each kind: file, line, reason


def split_documents(keys: np.ndarray, own: Sequence[str], data: DataConfig) -> np.ndarray:
    """The split of each document, by its place in SPLITS [N]; none of them is empty.

    keys, own: of each document its `key` [N] and its `split`, the one that its source has it in. A
    split that the source does not hold out gets the first of the distinct documents left, in hash
    order: `data.test_fraction` or `data.validation_fraction` of all. Raises ValueError if there are
    fewer than 3.
    """
    distinct, number = np.unique(keys, return_inverse=True)  # numbers in hash order
    split_of = np.zeros(len(distinct), np.int8)
    for name, fraction in (("test", data.test_fraction), ("validation", data.validation_fraction)):
        left = np.flatnonzero(split_of == 0)
        held_out = np.intersect1d(left, number[np.asarray(own, str) == name])
        share = left[: max(1, math.floor(len(distinct) * fraction))]
        split_of[held_out if len(held_out) else share] = SPLITS.index(name)
    if len(np.unique(split_of)) < len(SPLITS):
        count = len(distinct)
        raise ValueError(
            f"data.path {data.path} gives {count} different documents, and train, validation "
            "and test need one each: give more text (in a text file, blank lines part documents; "
            f"texts with the same first data.prompt_tokens={data.prompt_tokens} are one: a larger "
            "number tells more of them apart)"
        )
    return split_of[number]


def make_splits(
    documents: Iterable[Document],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    context: int = WHOLE,
    start: int | None = None,
) -> Splits:
    """Split and tokenise `documents`, those of `data`; the examples go to files in `folder`.

    Every example is within the lengths of `data` and fits `context`, the tokens of the longest
    text that the models take; its first token is prompt. Texts with the same prompt are one
    document. Where a prompt is in two splits all the same (that of a later window, or what is left
    of a longer one) it is held out: no training or validation example has a prompt of test.

    start: as for `RowReader`. Documents are read once; of each, and of each example, some hashes
    are in memory. Raises ValueError, one line, for too many rows that cannot be used, and for a
    split without a usable row.
    """
    lengths = lengths_within(context, data)
    reader, unsorted = RowReader(tokenizer, data, lengths, start=start), folder / UNSORTED
    keys, own, sizes = array("Q"), [], []  # of every document
    contents, prompts = array("Q"), array("Q")  # of every example

    def read() -> Iterator[Example]:
        for document, examples in reader.read(documents):
            keys.append(document.key)
            own.append(document.split)
            sizes.append(len(examples))
            for example in examples:
                contents.append(hash_order(f"{example.document} {example.token_ids}"))
                prompts.append(hash_order(str(example.prompt_ids)))
                yield example

    try:
        write_rows(unsorted, SCHEMA, read())
        of_document, split_of = np.asarray(keys), split_documents(np.asarray(keys), own, data)
        splits, documents_of = np.repeat(split_of, sizes), np.repeat(of_document, sizes)
        chosen = _in_turn(splits, documents_of, np.asarray(contents), np.asarray(prompts))
        if empty := [split for split in SPLITS if not len(chosen[split])]:
            equal = bool((splits == SPLITS.index(empty[0])).any())
            too_long = reader.counts["rows_dropped"] > 0
            raise _unusable(empty[0], data, lengths, equal=equal, too_long=too_long)
        sha256 = _write_splits(read_rows(unsorted, Example), chosen, folder)
    finally:
        remove(unsorted)
    counts = reader.counts | Counter({split: len(rows) for split, rows in chosen.items()})
    counts["prompts_shared"] = len(prompts) - sum(map(len, chosen.values()))
    tested = np.asarray(prompts)[chosen["test"]]
    counts["test_prompts_repeated"] = len(tested) - len(np.unique(tested))
    numbers = {name: counts[name] for name in (*SPLITS, *COUNTS)}
    room = lengths.room(data, texts=counts["windows"] > 0, chats=counts["rows"] > 0)
    about = {"sha256": sha256, "counts": numbers, "room": vars(room), "left_out": reader.bad.lines}
    write_json(folder / ABOUT, about)
    return read_splits(folder)


def read_splits(folder: Path) -> Splits:
    """What `make_splits` left in `folder`, mapped into memory."""
    about: dict[str, Any] = read_json(folder / ABOUT)
    about |= {split: read_rows(folder / f"{split}.arrow", Example) for split in SPLITS}
    about["room"] = Room(**about["room"])
    return Splits(**about)


def _in_turn(
    splits: np.ndarray, documents: np.ndarray, contents: np.ndarray, prompts: np.ndarray
) -> dict[str, np.ndarray]:
    """The numbers of the examples of each split, tests first, in the order that `Splits` has.

    splits, documents, contents, prompts: of every example [N], the last three as hashes. Examples
    with a prompt that an earlier split holds are left out. The others are scattered by what they
    hold: the order of the rows in a file says nothing.
    """
    chosen: dict[str, np.ndarray] = {}
    for split in reversed(SPLITS):
        held_out = np.concatenate([prompts[:0], *(prompts[rows] for rows in chosen.values())])
        rows = np.flatnonzero(splits == SPLITS.index(split))
        rows = rows[~np.isin(prompts[rows], held_out, kind="sort")]  # of hashes, no table
        by_hash = rows[np.argsort(contents[rows], kind="stable")]
        rank = rank_in_group(documents[by_hash])
        chosen[split] = by_hash[np.argsort(rank, kind="stable")]
    return chosen


def _write_splits(examples: Sequence[Example], chosen: dict[str, np.ndarray], folder: Path) -> str:
    """Write the `chosen` examples of each split; the SHA-256 of their ids and masks, in order."""
    digest = hashlib.sha256()

    def hashed(example: Example) -> Example:
        length = len(example.token_ids)
        digest.update(np.asarray([length, *example.token_ids], "<i8").tobytes())
        digest.update(np.asarray(example.loss_mask, bool).tobytes())
        return example

    for split, numbers in chosen.items():
        digest.update(split.encode())
        own = Lazy(examples.__getitem__, numbers)
        write_rows(folder / f"{split}.arrow", SCHEMA, map(hashed, own))
    return digest.hexdigest()


def _unusable(
    split: str, data: DataConfig, lengths: Lengths, *, equal: bool, too_long: bool
) -> ValueError:
    """The refusal of a split without a usable row."""
    reason = "too short; lower data.prompt_tokens or give more text"
    if equal:
        reason = (
            "equal in their prompts to held-out ones: give other text, or raise "
            "data.max_prompt_tokens or data.prompt_tokens, to which prompts are cut"
        )
    elif too_long:
        reason = (
            f"longer than {lengths.prompt} tokens of prompt: raise data.max_prompt_tokens, use "
            "shorter rows, or models of a longer context"
        )
    where = f"data.path {data.path}"
    return ValueError(f"{where}: no row of the {split} split is usable, all are {reason}")
