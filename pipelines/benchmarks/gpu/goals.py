"""What the report is held against: each goal, where its number stands, and whether it is reached.

Knows the names of parts and steps; measures and renders nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

RATE, DRAFT = 0.8, "0.15B"


@dataclass(frozen=True)
class Goal:
    """One of them; `value` is None where nothing was measured."""

    text: str
    value: float | None
    limit: float
    at_least: bool = True

    @property
    def verdict(self) -> str:
        """`yes`, `no`, or nothing."""
        if self.value is None:
            return ""
        reached = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "yes" if reached else "no"


def goals(parts: dict[str, Any]) -> list[Goal]:
    """All of them, by the best of what was measured."""

    def best(values: Iterator[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    alone = [case for case in given(parts) if case["points"][0]["batch_size"] == 1]
    main = [case for case in alone if case["rate"] == RATE and case["draft"] == DRAFT]
    kept = [
        point["speedup"]["measured"] / point["speedup"]["predicted"]
        for case in alone
        for point in case["points"]
        if "speedup" in point
    ]
    greedy = points(parts, "d", "speed at temperature 0")
    memory, time = (
        value(parts, "e", "loss", f"chunked_{key}") for key in ("peak_fraction", "time_ratio")
    )
    return [
        Goal(
            "plain 8 B decoding, batch 1: share of a copy's bytes a second",
            best(case["fraction_of_copy"] for case in alone),
            0.75,
        ),
        Goal(
            "speculative, batch 1: measured over tau / (gamma c + v + o), worst",
            min(kept, default=None),
            0.9,
        ),
        Goal(
            f"speculative over assisted generation, {DRAFT} at {RATE:g} (given)",
            best(ratio(case["points"], "speculative", "hf_assisted") for case in main),
            3.0,
        ),
        Goal("tests marked gpu that failed", value(parts, "b", "results", "failed"), 0, False),
        Goal("loss in chunks: share of the plain loss's memory", memory, 0.25, False),
        Goal("loss in chunks: share of the plain loss's time", time, 1.0, False),
        Goal(
            "trained pair, greedy: speculative over compiled plain decoding",
            best(point.get("speedup", {}).get("measured") for point in greedy),
            1.5,
        ),
    ]


def given(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """The cases of part c that were measured."""
    steps = parts.get("c", {}).get("steps", {}).values()
    results = (step.get("result") for step in steps)
    return [r for r in results if isinstance(r, dict) and "points" in r]


def value(parts: dict[str, Any], letter: str, step: str, key: str) -> float | None:
    """One number of a step's result, if it was measured."""
    result = parts.get(letter, {}).get("steps", {}).get(step, {}).get("result") or {}
    return result.get(key)


def points(parts: dict[str, Any], letter: str, step: str) -> list[dict[str, Any]]:
    """The points of a step, if it was measured."""
    found: Any = value(parts, letter, step, "points")
    return found or []


def ratio(points: list[dict[str, Any]], name: str, other: str) -> float | None:
    """The median ratio of two methods of one setting."""
    for point in points:
        if point["method"] == name:
            return point["ratios"].get(other, {}).get("median")
    return None
