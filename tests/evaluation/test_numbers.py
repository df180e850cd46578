"""Golden numbers: each on the page, in its short form and on the card is the one it stands for.

numbers.json lists, for a small summary of each kind, where in it the numbers of the page come from,
in their order: `alpha` of an estimate is its mean and both ends, `1-x` and `x*1000` are computed,
`=95` is of the words, and a text stands for the numbers in it. Who changes what is shown changes
that list.
"""

import html
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from draftkit.artifacts import read_json
from draftkit.engines.launch import model_card
from tests.evaluation.test_page import PROVENANCE, TRAINED, judged, whole

GOLDEN = read_json(Path(__file__).with_name("numbers.json"))
NUMBER = re.compile(r"(?<![\w.#;-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?%?(?![\w.]*[A-Za-z_])")


def apart(value: Any, path: str = "") -> Any:
    """The summary with other numbers, no two alike: the mean of an estimate between its ends."""
    if isinstance(value, dict):
        changed = {key: apart(inner, f"{path}.{key}") for key, inner in value.items()}
        mean = next((key for key in ("mean", "measured") if key in value), None)
        if mean and value["ci95"]:
            changed["ci95"] = [changed[mean] - 0.05 + luck(path), changed[mean] + 0.06 + luck(path)]
        return changed
    if isinstance(value, list):
        return [apart(inner, f"{path}.{number}") for number, inner in enumerate(value)]
    return value * (1 + luck(path)) if isinstance(value, float) and value not in (0, 1) else value


def luck(path: str) -> float:
    return crc32(path.encode()) % 1000 / 25_000


def several() -> dict[str, Any]:
    """The same drafter greedily and at a temperature, in other numbers."""
    one = judged(temperatures=(0.0, 0.7))
    by_temperature = {key: apart(part, key) for key, part in one["by_temperature"].items()}
    return one | by_temperature["0"] | {"by_temperature": by_temperature}


KINDS = {
    "plain": apart(judged(before=False, use="sampled", best_of="drafter")),
    "head": apart(judged(kind="eagle3", kept_ids=4096)),
    "hybrid": apart(judged()),
    "several temperatures": several(),
}


def numbers_in(text: str) -> list[str]:
    return NUMBER.findall(text)


def numbers_of_page(page: str) -> list[str]:
    """Without the figures, whose numbers are places of a drawing."""
    page = re.sub("<figure>.*?</figure>", "", page.partition("<main>")[2], flags=re.DOTALL)
    return numbers_in(html.unescape(re.sub("<[^>]*>", " ", page)))


def at(summary: Any, path: str) -> Any:
    for key in path.split("/"):
        summary = summary[int(key) if isinstance(summary, list) else key]
    return summary


def meant(summary: dict[str, Any], entry: str) -> Iterator[float | str]:
    """The numbers that an entry of the list stands for; those of a text as it has them."""
    if entry.startswith("="):
        yield entry[1:]
        return
    path, _, times = entry.removeprefix("1-").partition("*")
    value = at(summary, path)
    if isinstance(value, str):
        yield from numbers_in(value)
    elif isinstance(value, dict):
        yield from (value["mean"], *(value["ci95"] or ()))
    elif entry.startswith("1-"):
        yield 1 - value
    else:
        yield value * float(times or 1)


def as_shown(value: float | str, shown: str) -> str:
    """`value` rounded as what is `shown` in its place."""
    if isinstance(value, str):
        return value
    digits = len(shown.rstrip("%").partition(".")[2])
    sign, thousands = "+" * shown.startswith("+"), "," * ("," in shown)
    return f"{value:{sign}{thousands}.{digits}{'%' if shown.endswith('%') else 'f'}}"


def check(summary: dict[str, Any], entries: list[str], found: list[str]) -> None:
    values = [*chain.from_iterable(meant(summary, entry) for entry in entries)]
    assert [as_shown(*pair) for pair in zip(values, found, strict=False)] == found
    assert len(values) == len(found)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_that_is_shown_is_the_one_that_it_stands_for(kind: str) -> None:
    summary = KINDS[kind] | {"trained": TRAINED, "provenance": PROVENANCE}
    page, short = whole(KINDS[kind], trained=TRAINED, traces=())
    check(summary, GOLDEN[kind]["page"], numbers_of_page(page))
    read, _, _ = page.partition("<details>")
    assert sorted(numbers_in(short)) == sorted(numbers_of_page(read))
    card = model_card(KINDS[kind], target=None, name="chats", kind=summary["kind"])
    of_training = numbers_in(next(x for x in short.splitlines() if x.startswith("Training took")))
    text, _, use = card.partition("## Use")
    assert sorted([*numbers_in(text), *of_training]) == sorted(numbers_in(short))
    check(summary, GOLDEN[kind]["use"], numbers_in(use))
