"""A `Record` as compact bytes and back, its checksum, and its side of the held-out split.

Ids are int32, log-probabilities and masses float32, the rest JSON. The bytes say themselves what
they hold. This module knows no database and no file.
"""

import hashlib
import json
import struct
from itertools import chain
from typing import Any

import numpy as np

from draftkit.data.rollouts import Record

_FORMAT = 1  # the first byte
_HEAD = struct.Struct("<BI")  # format, bytes of the JSON that follows
_TOLD = ("sampler", "sampler_version", "sampling", "seed", "row", "document", "domain")
_TYPES = {
    "prompt_ids": "<i4",
    "output_ids": "<i4",
    "proposals": "<i4",
    "rejected": "|u1",
    "tail_mass": "<f4",
    "loss_tail_mass": "<f4",
    "topk_widths": "<i4",  # how many alternatives each output token has
    "topk_ids": "<i4",
    "topk_log_probs": "<f4",
}
_NESTED = ("topk_ids", "topk_log_probs")
_SPLIT_BITS = 53  # what a float holds exactly


def _numbers(name: str, values: Any) -> np.ndarray:
    """`values` in the type of `name`. Raises ValueError for an id beyond 32 bits."""
    kind = np.dtype(_TYPES[name])
    found = np.asarray(values)
    if kind.kind == "i" and found.size:
        limits = np.iinfo(kind)
        if found.dtype.kind not in "iu" or found.min() < limits.min or found.max() > limits.max:
            raise ValueError(f"{name} holds something that is no id of 32 bits")
    return found.astype(kind, copy=False)


def _widths(rows: Any) -> list[int]:
    return [len(row) for row in rows]


def _flat(rows: Any) -> Any:
    return rows.reshape(-1) if isinstance(rows, np.ndarray) else list(chain.from_iterable(rows))


def encode(record: Record) -> bytes:
    """The bytes of `record`, whose lists may be arrays of numpy too (cheaper).

    Raises ValueError for an id beyond 32 bits, or alternatives without as many log-probabilities.
    """
    arrays: dict[str, np.ndarray] = {}
    values = {name: getattr(record, name, None) for name in _TYPES}
    if record.topk_ids is not None:
        values["topk_widths"] = _widths(record.topk_ids)
        other = record.topk_log_probs
        if other is None or _widths(other) != values["topk_widths"]:
            raise ValueError("topk_ids and topk_log_probs differ in shape")
        values["topk_ids"], values["topk_log_probs"] = _flat(record.topk_ids), _flat(other)
    for name, found in values.items():
        if found is not None:
            arrays[name] = _numbers(name, found)
    told: dict[str, Any] = {name: getattr(record, name) for name in _TOLD}
    told["arrays"] = {name: len(array) for name, array in arrays.items()}
    text = json.dumps(told, separators=(",", ":")).encode()
    parts = [_HEAD.pack(_FORMAT, len(text)), text, *(array.tobytes() for array in arrays.values())]
    return b"".join(parts)


def _rows(flat: np.ndarray, widths: np.ndarray) -> list[list[Any]]:
    if len(widths) and (widths == widths[0]).all():
        return flat.reshape(len(widths), int(widths[0])).tolist()
    ends = np.cumsum(widths)
    return [flat[end - width : end].tolist() for end, width in zip(ends, widths, strict=True)]


def decode(content: bytes) -> Record:
    """The record of `encode`. Raises ValueError for bytes that are none of this format."""
    try:
        found, length = _HEAD.unpack_from(content)
        if found != _FORMAT:
            raise ValueError(f"format {found} instead of {_FORMAT}")
        told = json.loads(content[_HEAD.size : _HEAD.size + length])
        place = _HEAD.size + length
        arrays: dict[str, Any] = {}
        for name, count in told.pop("arrays").items():
            arrays[name] = np.frombuffer(content, _TYPES[name], count, place)
            place += arrays[name].nbytes
        if place != len(content):
            raise ValueError("bytes are left over")
        widths = arrays.pop("topk_widths", None)
        lists: dict[str, Any] = {
            name: _rows(array, widths) if name in _NESTED else array.tolist()
            for name, array in arrays.items()
        }
        if "rejected" in lists:
            lists["rejected"] = [bool(value) for value in lists["rejected"]]
        return Record(**told, **lists)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a stored record ({error})") from error


def checksum(content: bytes, *columns: Any) -> bytes:
    """8 bytes that stand for `content` and what is stored beside it."""
    digest = hashlib.blake2b(repr(columns).encode(), digest_size=8)
    digest.update(content)
    return digest.digest()


def conversation_of(record: Record) -> str | tuple[int, ...]:
    """What `record` shares with all that it is not independent of: `document`, else the prompt."""
    return record.document or tuple(record.prompt_ids)


def split(record: Record) -> float:
    """A number in [0, 1), uniform over conversations, the same for all records of one.

    A record is held out where it is below the gate's fraction.
    """
    known = conversation_of(record)
    if isinstance(known, str):
        content, person = known.encode(), b"conversation"
    else:
        content, person = _numbers("prompt_ids", known).tobytes(), b"held out"
    digest = hashlib.blake2b(content, digest_size=8, person=person).digest()
    return (int.from_bytes(digest, "little") >> (64 - _SPLIT_BITS)) / (1 << _SPLIT_BITS)
