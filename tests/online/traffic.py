"""Served answers whose every field follows from a number, so that a mixed one is seen."""

import random
from collections.abc import Sequence
from typing import Any

from draftkit.config.service import BufferConfig
from draftkit.data.rollouts import Record
from draftkit.online.buffer import Buffer

MARK = 0x5EED0000  # ids of answers begin here
DAY = 86400.0


def record(number: int, *, tokens: int = 8, width: int = 3) -> Record:
    """Of that number; its prompt too, so that each is its own for the held-out split."""
    ids = [MARK + number] * tokens
    chance = random.Random(number)  # so that it does not shrink when it is stored
    return Record(
        prompt_ids=[MARK + number, number % 7],
        output_ids=ids,
        sampler="speculative",
        sampler_version=f"v{number:06d}",
        sampling={"temperature": 1 + number / 7, "top_k": 0.0},
        seed=number,
        row=number % 3,
        document=f"document {number}",
        domain="d",
        proposals=[number, *[-1] * (tokens - 1)],
        rejected=[True, *[False] * (tokens - 1)],
        topk_ids=[[chance.getrandbits(31) for _ in range(width)] for _ in ids],
        topk_log_probs=[[-chance.random() for _ in range(width)] for _ in ids],
        tail_mass=[number / 1048576] * tokens,
    )


def entry(number: int, route: str = "default", **shape: int) -> tuple[str, Record]:
    """The answer of that number on `route`."""
    return route, record(number, **shape)


def entries(
    numbers: Sequence[int] | range, route: str = "default", **shape: int
) -> list[tuple[str, Record]]:
    """The answers of those numbers."""
    return [entry(number, route, **shape) for number in numbers]


def settings(**changes: Any) -> BufferConfig:
    """A small buffer."""
    return BufferConfig(**{"max_megabytes": 16.0} | changes)


def stored(buffer: Buffer, route: str = "default") -> list[Record]:
    """All records of a route, of both sides."""
    sides = (buffer.newest(route, 10**6, held_out=held_out) for held_out in (True, False))
    return [one for side in sides for one in side]


def numbers(buffer: Buffer, route: str = "default") -> list[int]:
    """The numbers of all records of a route, in order."""
    return sorted(one.seed for one in stored(buffer, route))


class Clock:
    """A wall clock that moves when told."""

    def __init__(self) -> None:
        self.seconds = 1e9

    def __call__(self) -> float:
        return self.seconds

    def pass_time(self, seconds: float) -> None:
        """Let it go on."""
        self.seconds += seconds
