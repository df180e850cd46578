"""The table of an engine fits a terminal, and the page of all names what differs."""

from typing import Any

from rich.console import Console

from tests.engines.comparison import compared
from tests.engines.tables import measured_lines, measured_table, page
from tests.engines.test_comparison import cell


def summary(**changes: Any) -> dict[str, Any]:
    """A measurement of two cells, of which the second differs."""
    cells = compared([cell(0.6, 0.6), cell(0.6, 0.4, seed=2)])
    cells[1]["drafts"] = "argmax"
    greedy = {"drafts": "sampled", "compared": 20, "same_as_plain": 20, "same_as_ours": 19}
    return {
        **{"engine": "vllm", "title": "vLLM", "version": "0.32.0+cpu", "plugin": None},
        **{"pair": "embedded", "machine": "a processor, 2 cores", "threads": 1, "gamma": 4},
        **{"prompts": 40, "max_new_tokens": 48, "turns": 3, "dtype": "float32"},
        **{"greedy": [greedy], "cells": cells, **changes},
    }


def printed(what: Any) -> list[str]:
    console = Console(width=80, highlight=False, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return capture.get().splitlines()


def test_the_table_fits_eighty_columns() -> None:
    lines = printed(measured_table(summary()))
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith(("sampled", "argmax"))]
    assert len(rows) == 2
    assert not any("…" in line for line in lines)
    assert all("[" in row and "]" in row and " to " in row for row in rows)


def test_what_differs_is_named_below_it() -> None:
    lines = measured_lines(summary())
    assert lines[0].endswith("its own without the drafter in 20 of 20, our decoder's in 19 of 20")
    assert lines[-1] == "DIFFERS from what was predicted: argmax at T 1"
    agreeing = summary()
    agreeing["cells"] = agreeing["cells"][:1]
    assert measured_lines(agreeing)[-1] == "counted is what was predicted"


def test_the_page_has_every_engine_of_every_pair() -> None:
    plugged = summary(plugin="mend")
    text = page({"embedded": [(summary(), "As it is."), (plugged, "")], "llama": [(summary(), "")]})
    assert text.count("## ") == 2
    assert text.count("| vLLM 0.32.0+cpu |") == 2
    assert text.count("| vLLM 0.32.0+cpu, plugin mend |") == 1
    assert "- vLLM 0.32.0+cpu: As it is.\n" in text
    assert text.count("argmax drafts at T 1: accepted at each position: predicted 0.") == 3
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 * 2 + 3 * 2
    assert {row.count("|") for row in rows} == {8}
