"""What stands for a stored record: its checksum, its conversation, its side of the held-out split.

This module knows no database and no file.
"""

import hashlib
from typing import Any

import numpy as np

from draftkit.data.rollouts import Record

_SPLIT_BITS = 53  # what a float holds exactly


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
        content, person = np.asarray(known, "<i4").tobytes(), b"held out"
    digest = hashlib.blake2b(content, digest_size=8, person=person).digest()
    return (int.from_bytes(digest, "little") >> (64 - _SPLIT_BITS)) / (1 << _SPLIT_BITS)
