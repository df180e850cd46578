"""The report of `benchmark.subject=gpu` as Markdown. Renders a summary; measures nothing."""

from collections.abc import Iterator, Sequence
from typing import Any

from draftkit.tracking import scalars
from pipelines.benchmarks.gpu.goals import goals

COMMAND = "python -m pipelines.benchmark +experiment=bench_gpu"
REHEARSAL = (
    "**REHEARSAL on a CPU, in tiny shapes: nothing was measured, and no number below means "
    "anything.** It shows that every part can be begun and comes to its end."
)
POINT_COLUMNS = ("code", "batch", "gamma", "drafter", "method", "tokens/s", "x plain")
NOT_SHOWN = ("failures", "printed", "seconds_by_test")  # as values: two have lines of their own
OF_PLAIN = ("fraction_of_copy", "making_seconds")  # of a step, shown in the row of its baseline
POINT_COLUMNS += ("tau", "c", "v", "o", "predicted", "measured", "of a copy", "made in")


def report(summary: dict[str, Any], origin: dict[str, Any]) -> str:
    """The whole of it. `origin` is the provenance of the stage's manifest."""
    lines = ["# All that needs a GPU", ""]
    if summary["rehearsal"]:
        lines += [REHEARSAL, ""]
    commit = origin["git_commit"] or "outside a checkout"
    state = " with changes" if origin["git_dirty"] else ""
    lines += [f"Printed by `{COMMAND}` on {origin['time']}, commit {commit}{state}.", ""]
    lines += [*parts_table(summary["parts"]), "", *goals_table(summary), ""]
    for letter, part in summary["parts"].items():
        lines += [f"## {letter}. {part['title']}", "", *part_lines(part), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines]


def parts_table(parts: dict[str, Any]) -> list[str]:
    """What became of every part."""
    rows = [
        (letter, part["title"], part["status"], f"{part['seconds']:.0f}", f"{part['limit']:.0f}")
        for letter, part in parts.items()
    ]
    whole = sum(part["seconds"] for part in parts.values())
    rows.append(("", "all", "", f"{whole:.0f}", ""))
    return table(("part", "", "ended", "seconds", "limit"), rows)


def goals_table(summary: dict[str, Any]) -> list[str]:
    """What was to be reached, and what was."""
    rows = [
        (goal.text, "not measured" if goal.value is None else number(goal.value), goal.verdict)
        for goal in goals(summary["parts"])
    ]
    if summary["rehearsal"]:
        rows = [(text, value, "rehearsal") for text, value, _ in rows]
    return table(("goal", "measured", "reached"), rows)


def part_lines(part: dict[str, Any]) -> Iterator[str]:
    """A part: why it did not end well, its numbers, and what its steps could not do."""
    if part["status"] == "skipped":
        yield f"Skipped: {part['reason']}."
    points = [row for step in part["steps"].values() for row in point_rows(step)]
    if points:
        yield from table(POINT_COLUMNS, points)
        yield ""
    rows = [
        (name, key, value)
        for name, step in part["steps"].items()
        for key, value in plain_values(step.get("result"))
    ]
    if rows:
        yield from table(("step", "", ""), rows)
        yield ""
    for name, step in part["steps"].items():
        if "left_out" in step:
            yield f"- {name}: left out, {step['left_out']}"
        if step.get("unfinished"):
            yield f"- {name}: not finished"
        if "error" in step:
            yield from fenced(f"- {name} raised:", step["error"])
        for told, word in (("failures", "failed"), ("printed", "printed")):
            for test, text in texts(step, told).items():
                yield from fenced(f"- {test} {word}:", text)
    if part.get("output"):
        yield from fenced(f"Its last output ({part['status']}):", part["output"])


def fenced(title: str, text: str) -> list[str]:
    return ["", title, "", "````text", text.rstrip(), "````", ""]


def texts(step: dict[str, Any], kind: str) -> dict[str, str]:
    """What tests of a step have to tell, by test: `failures`, or what they `printed`."""
    result = step.get("result")
    return result.get(kind, {}) if isinstance(result, dict) else {}


def plain_values(result: Any) -> Iterator[tuple[str, str]]:
    """Numbers and words of a result, by dotted key; points and failures have lines of their own."""
    if not isinstance(result, dict):
        if result is not None:
            yield "", number(result)
        return
    if "points" in result:
        return
    for key, value in scalars({k: v for k, v in result.items() if k not in NOT_SHOWN}):
        yield key, number(value)


def point_rows(step: dict[str, Any]) -> Iterator[list[str]]:
    """A row for each point of a step."""
    result = step.get("result")
    if not isinstance(result, dict):
        return
    for point in result.get("points", []):
        yield point_row(point, result)


def point_row(point: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """The cells of one method in one setting."""
    speedup = point.get("speedup", {})
    rate, code = result.get("rate"), result.get("code", "compiled" if point["compiled"] else "")
    drafted = "" if rate is None else f"{result['draft']}, accepted at {rate:g} (given)"
    greedy = "greedy" if point["temperature"] == 0 else "temperature 1"
    tau = point.get("acceptance_length", {}).get("mean")
    ratio = point["ratios"].get("plain", {}).get("median")
    is_plain = point["method"] == "plain"
    return [
        *(code, str(point["batch_size"]), str(point["gamma"]), drafted or greedy),
        *(point["method"], number(point["tokens_per_second"]["median"])),
        *map(number, (ratio, tau)),
        *(number(point.get(key)) for key in ("cost_ratio", "verify_ratio", "overhead_ratio")),
        *map(number, (speedup.get("predicted"), speedup.get("measured"))),
        *(number(result.get(key)) if is_plain else "" for key in OF_PLAIN),
    ]


def number(value: Any) -> str:
    """A number in three or four digits; words as they are, nothing for nothing."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if value == 0 or 1e-3 < abs(value) < 1e5 else f"{value:.3e}"
