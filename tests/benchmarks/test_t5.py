"""The words of the benchmark's text, and the figure of an answer's calls."""

from pathlib import Path

import pytest

from draftkit.artifacts import write_json
from pipelines.benchmarks.t5 import calls, draw, spoken
from pipelines.evaluate import TIMING, TRACE
from pipelines.product import SUMMARY


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (19, "nineteen"),
        (40, "forty"),
        (105, "one hundred five"),
        (2_000_031, "two million thirty one"),
    ],
)
def test_words(number: int, words: str) -> None:
    assert spoken(number) == words


def test_the_calls_of_an_answer(tmp_path: Path) -> None:
    costs = {"plain_step_seconds": 0.01, "cost_ratio": 0.3, "verify_ratio": 1.1}
    write_json(tmp_path / SUMMARY, costs)
    prefills = {"prefill_seconds": [0.2, 0.004, 0.005]}
    write_json(tmp_path / TIMING, {"0": {"given": prefills, "plain": prefills}})
    ended = [
        ["accepted", "a"],
        ["accepted", "⟨1⟩"],
        ["unused", "c"],
    ]  # no token of the target's own
    rounds = [
        {
            "accepted": 1,
            "proposed": 3,
            "parts": [["accepted", "a"], ["rejected", "b"], ["bonus", "d"]],
        },
        {"accepted": 2, "proposed": 3, "parts": ended},
    ]
    write_json(tmp_path / TRACE, [{"rounds": rounds}])
    drafted = [*[("drafter", 3.0)] * 3, ("target", 11.0)]
    plain = [("encoder", 5.0), *[("target", 10.0)] * 4]
    for way, expected in (("given", [plain[0], *drafted, *drafted]), ("plain", plain)):
        made = calls(tmp_path, way)
        assert [call for call, _ in made] == [call for call, _ in expected]
        assert [width for _, width in made] == pytest.approx([width for _, width in expected])
    draw({"3 proposals": calls(tmp_path, "given"), "no drafter": plain}, tmp_path / "calls.svg")
    assert (tmp_path / "calls.svg").read_text(encoding="utf-8").count("#8e5ea2") >= 6
