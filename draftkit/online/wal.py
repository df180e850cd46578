"""What SQLite will make of a write-ahead log, told before it opens it.

SQLite reads a log up to the first frame whose checksum fails and forgets the rest without a word.
This module finds that place, and tells frames that are lost from those that an earlier, finished
use of the file left behind. It reads; it repairs nothing.

The format: https://www.sqlite.org/fileformat2.html#walformat
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_HEADER, _FRAME = 32, 24  # bytes of the file's header, and of a frame's before its page
_MAGIC = 0x377F0682  # the last bit says that checksums read big-endian words
_CHUNK = 1024  # frames checked at once


@dataclass(frozen=True, kw_only=True)
class LogState:
    """Frames of a log. `dropped` counts those of its present use from the first bad one on."""

    frames: int = 0  # whole ones that SQLite will use
    dropped: int = 0
    dropped_commits: int = 0  # transactions that ended in them

    @property
    def damaged(self) -> bool:
        """Whether anything was written that will not come back."""
        return self.dropped > 0


class _Checksum:
    """SQLite's two running sums over pairs of words, as one linear map a frame.

    s0 += x0 + s1; s1 += x1 + s0, modulo 2^32: after n pairs, s is M^n s + sum of M^k N x.
    """

    def __init__(self, pairs: int) -> None:
        step = np.array([[1, 1], [1, 2]], dtype=np.uint32)  # of the sums
        enter = np.array([[1, 0], [1, 1]], dtype=np.uint32)  # of a pair
        power = np.eye(2, dtype=np.uint32)
        weights = np.empty((2, pairs, 2), dtype=np.uint32)
        for pair in reversed(range(pairs)):
            weights[:, pair] = power @ enter
            power = power @ step
        self._power, self._weights = power, weights.reshape(2, -1)

    def parts(self, words: np.ndarray) -> np.ndarray:
        """What each row of `words` [frames, 2 * pairs] adds: [frames, 2]."""
        columns = [(words * weight).sum(axis=1, dtype=np.uint32) for weight in self._weights]
        return np.stack(columns, axis=1)

    def __call__(self, before: np.ndarray, part: np.ndarray) -> np.ndarray:
        return self._power @ before + part


def _checksum_of_header(head: bytes, order: str) -> np.ndarray:
    words = np.frombuffer(head[:24], f"{order}u4").astype(np.uint32)[None]
    return _Checksum(3)(np.zeros(2, np.uint32), _Checksum(3).parts(words)[0])


def _valid(chunk: np.ndarray, salts: bytes, sums: np.ndarray, check: _Checksum, order: str) -> int:
    """How many frames of `chunk` [frames, bytes] follow on `sums`, which moves along with them."""
    summed = np.concatenate([chunk[:, :8], chunk[:, _FRAME:]], axis=1)
    words = summed.view(f"{order}u4").astype(np.uint32)
    told = np.ascontiguousarray(chunk[:, 16:24]).view(">u4")
    for place, part in enumerate(check.parts(words)):
        after = check(sums, part)
        if chunk[place, 8:16].tobytes() != salts or (told[place] != after).any():
            return place
        sums[:] = after
    return len(chunk)


def inspect(path: str | Path) -> LogState:
    """The state of the log at `path`, which nobody writes meanwhile; empty if there is none.

    A damaged header loses every frame that it does not say to be an old one.
    """
    path = Path(path)
    content = np.fromfile(path, np.uint8) if path.is_file() else np.empty(0, np.uint8)
    if len(content) <= _HEADER + _FRAME:
        return LogState()
    head = content[:_HEADER].tobytes()
    magic, _, page = struct.unpack(">III", head[:12])
    order = ">" if magic & 1 else "<"
    sane = magic & ~1 == _MAGIC and page in {1 << bits for bits in range(9, 17)}
    sums = _checksum_of_header(head, order)
    whole = sane and (sums == np.frombuffer(head[24:], ">u4")).all()
    if not sane:
        return LogState(dropped=1)  # nothing says how long a frame is
    count = (len(content) - _HEADER) // (page + _FRAME)
    frames = content[_HEADER : _HEADER + count * (page + _FRAME)].reshape(count, page + _FRAME)
    if not count:
        return LogState()
    salts = head[16:24]
    valid, check = 0, _Checksum((page + 8) // 8)
    while whole and valid < count:
        chunk = frames[valid : valid + _CHUNK]
        found = _valid(chunk, salts, sums, check, order)
        valid += found
        if found < len(chunk):
            break
    rest = frames[valid:]
    # An old frame differs in both salts; one that shares either is of this use.
    same = rest[:, 8:16] == np.frombuffer(salts, np.uint8)
    lost = rest[same[:, :4].all(axis=1) | same[:, 4:].all(axis=1)]
    commits = int(lost[:, 4:8].any(axis=1).sum())
    return LogState(frames=valid, dropped=len(lost), dropped_commits=commits)
