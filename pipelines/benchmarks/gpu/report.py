"""The report of `benchmark.subject=gpu` as Markdown, and the goals that it is held against.

Knows the names of parts and steps; measures nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from draftkit.tracking import scalars

COMMAND = "python -m pipelines.benchmark +experiment=bench_gpu"
REHEARSAL = (
    "**REHEARSAL on a CPU, in tiny shapes: nothing was measured, and no number below means "
    "anything.** It shows that every part can be begun and comes to its end."
)
RATE, DRAFT = 0.8, "0.15B"  # the acceptance and the drafter of part c that a goal speaks of
NOT_SHOWN = ("failures", "printed", "seconds_by_test")  # as values: two have lines of their own
OF_PLAIN = ("fraction_of_copy", "making_seconds")  # of a step, shown in the row of its baseline
POINT_COLUMNS = ("code", "batch", "gamma", "drafter", "method", "tokens/s", "x plain")
POINT_COLUMNS += ("tau", "c", "v", "o", "predicted", "measured", "of a copy", "made in")


class Goal(NamedTuple):
    """What a number should reach; `value` is None where nothing was measured."""

    text: str
    value: float | None
    limit: float
    at_least: bool = True

    @property
    def verdict(self) -> str:
        """`yes`, `no`, or nothing."""
        if self.value is None:
            return ""
        return (
            "yes"
            if (self.value >= self.limit if self.at_least else self.value <= self.limit)
            else "no"
        )


def goals(parts: dict[str, Any]) -> list[Goal]:
    """All of them, by the best of what was measured."""

    def result(letter: str, step: str) -> dict[str, Any]:
        return parts.get(letter, {}).get("steps", {}).get(step, {}).get("result") or {}

    def best(values: Iterable[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    results = [step.get("result") for step in parts.get("c", {}).get("steps", {}).values()]
    cases = [case for case in results if isinstance(case, dict) and "points" in case]
    alone = [case for case in cases if case["points"][0]["batch_size"] == 1]
    kept = [
        point["speedup"]["measured"] / point["speedup"]["predicted"]
        for case in alone
        for point in case["points"]
        if "speedup" in point
    ]
    over_assisted = [
        point["ratios"].get("hf_assisted", {}).get("median")
        for case in alone
        if (case["rate"], case["draft"]) == (RATE, DRAFT)
        for point in case["points"]
        if point["method"] == "speculative"
    ]
    greedy = result("d", "speed at temperature 0").get("points", [])
    loss = result("e", "loss")
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
            best(over_assisted),
            3.0,
        ),
        Goal("tests marked gpu that failed", result("b", "results").get("failed"), 0, False),
        Goal(
            "loss in chunks: share of the plain loss's memory",
            loss.get("chunked_peak_fraction"),
            0.25,
            False,
        ),
        Goal(
            "loss in chunks: share of the plain loss's time",
            loss.get("chunked_time_ratio"),
            1.0,
            False,
        ),
        Goal(
            "trained pair, greedy: speculative over compiled plain decoding",
            best(point.get("speedup", {}).get("measured") for point in greedy),
            1.5,
        ),
    ]


def report(summary: dict[str, Any], origin: dict[str, Any]) -> str:
    """The whole of it. `origin` is the provenance of the stage's manifest."""
    parts, rehearsal = summary["parts"], summary["rehearsal"]
    commit = origin["git_commit"] or "outside a checkout"
    state = " with changes" if origin["git_dirty"] else ""
    whole = sum(part["seconds"] for part in parts.values())
    ends = [
        (letter, part["title"], part["status"], f"{part['seconds']:.0f}", f"{part['limit']:.0f}")
        for letter, part in parts.items()
    ]
    reached = [
        (
            goal.text,
            "not measured" if goal.value is None else number(goal.value),
            "rehearsal" if rehearsal else goal.verdict,
        )
        for goal in goals(parts)
    ]
    lines = ["# All that needs a GPU", "", *([REHEARSAL, ""] if rehearsal else [])]
    lines += [f"Printed by `{COMMAND}` on {origin['time']}, commit {commit}{state}.", ""]
    lines += table(
        ("part", "", "ended", "seconds", "limit"), [*ends, ("", "all", "", f"{whole:.0f}", "")]
    )
    lines += table(("goal", "measured", "reached"), reached)
    for letter, part in parts.items():
        lines += [f"## {letter}. {part['title']}", "", *part_lines(part), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A table and an empty line below; nothing where there are no `rows`."""
    lines = [columns, ["---"] * len(columns), *rows] if rows else []
    texts = [" | ".join(str(cell).replace("|", "/") for cell in line) for line in lines]
    return [*(f"| {text} |" for text in texts), ""] if rows else []


def part_lines(part: dict[str, Any]) -> Iterator[str]:
    """A part: why it did not end well, its numbers, and what its steps could not do."""
    if part["status"] == "skipped":
        yield f"Skipped: {part['reason']}."
    results = {name: step["result"] for name, step in part["steps"].items() if "result" in step}
    results = {n: r if isinstance(r, dict) else {"": r} for n, r in results.items()}
    yield from table(
        POINT_COLUMNS,
        [point_row(point, r) for r in results.values() for point in r.get("points", [])],
    )
    shown = {
        name: {key: value for key, value in result.items() if key not in NOT_SHOWN}
        for name, result in results.items()
        if "points" not in result
    }
    yield from table(
        ("step", "", ""),
        [(name, key, number(v)) for name, r in shown.items() for key, v in scalars(r)],
    )
    for name, step in part["steps"].items():
        if "left_out" in step:
            yield f"- {name}: left out, {step['left_out']}"
        if step.get("unfinished"):
            yield f"- {name}: not finished"
        if "error" in step:
            yield from fenced(f"- {name} raised:", step["error"])
        for key, word in (("failures", "failed"), ("printed", "printed")):
            for test, text in results.get(name, {}).get(key, {}).items():
                yield from fenced(f"- {test} {word}:", text)
    if part.get("output"):
        yield from fenced(f"Its last output ({part['status']}):", part["output"])


def fenced(title: str, text: str) -> list[str]:
    return ["", title, "", "````text", text.rstrip(), "````", ""]


def point_row(point: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """The cells of one method in one setting."""
    speedup = point.get("speedup", {})
    code, drafter = result.get("code", "compiled" if point["compiled"] else ""), "temperature 1"
    if "rate" in result:
        drafter = f"{result['draft']}, accepted at {result['rate']:g} (given)"
    elif point["temperature"] == 0:
        drafter = "greedy"
    numbers = [
        point["ratios"].get("plain", {}).get("median"),
        point.get("acceptance_length", {}).get("mean"),
        *(point.get(key) for key in ("cost_ratio", "verify_ratio", "overhead_ratio")),
        *(speedup.get(key) for key in ("predicted", "measured")),
        *(result.get(key) if point["method"] == "plain" else None for key in OF_PLAIN),
    ]
    rate = number(point["tokens_per_second"]["median"])
    setting = [code, str(point["batch_size"]), str(point["gamma"]), drafter, point["method"], rate]
    return [*setting, *map(number, numbers)]


def number(value: Any) -> str:
    """A number in three or four digits; words as they are, nothing for nothing."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if value == 0 or 1e-3 < abs(value) < 1e5 else f"{value:.3e}"
