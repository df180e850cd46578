"""Cells stand where they belong, with their intervals, and beside plain training."""

import io

import pytest
from rich.console import Console

from pipelines.matrix import cells_of, gain_over, is_matrix, matrix_tables


def number(mean):
    return {"mean": mean, "ci95": [mean - 0.01, mean + 0.01], "n": 10, "prompts": 5}


def judged(divergence, source, gain=0.1, *, contexts="c", after=(6.0, 20.0)):
    """The cells of an evaluation at two temperatures, on prompts of 10 and 30 positions."""
    config = {"divergence": {"name": divergence}, "source": {"name": source}}
    part = {
        "alpha": number(0.7 + gain),
        "alpha_gain": number(gain),
        "acceptance_length": number(3.0),
        "before": {"acceptance_length": number(2.0)},
    }
    sums = {"alpha": [*after], "positions": [10.0, 30.0], "documents": [0, 1]}
    prompts = {"contexts": contexts, "after": sums}
    summary = {"by_temperature": {"1": part, "0": part}}
    return cells_of(config, summary, {"1": prompts, "0": prompts})


CELLS = [
    *judged("forward_kl", "fixed", 0.05),
    *judged("forward_kl", "draft", 0.12),
    *judged("tvd", "draft", -0.02, after=(8.0, 18.0)),
    *judged("neg_log_alpha", "draft", contexts="others"),
]
PLAIN = judged("next_token", "fixed", 0.01)


def printed(cells):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    for table in matrix_tables(cells):
        console.print(table)
    return console.file.getvalue()


def test_an_evaluation_has_a_cell_for_each_temperature():
    assert [cell["temperature"] for cell in judged("tvd", "draft")] == [1.0, 0.0]
    config = {"divergence": {"name": "tvd"}, "source": {"name": "draft"}}
    assert cells_of(config, {"by_temperature": {"1": {"alpha": number(0.5)}}}, {}) == []
    assert cells_of(config, {}, {}) == []


def test_a_matrix_has_several_divergences_and_several_sources_and_no_cell_twice():
    assert is_matrix(CELLS)
    assert not is_matrix([*CELLS, CELLS[0]])
    assert not is_matrix([cell for cell in CELLS if cell["source"] == "draft"])
    assert not is_matrix([cell for cell in CELLS if cell["divergence"] == "forward_kl"])
    assert not is_matrix([])


def test_the_table_fits_eighty_columns_and_leaves_empty_what_was_not_run():
    wide = [*CELLS, *judged("tvd", "target", -0.07), *judged("jsd", "mix", -0.07)]
    text = printed(wide)
    assert max(map(len, text.splitlines())) <= 80
    cold, warm = text.split("alpha gained, temperature 1")
    assert "alpha gained, temperature 0" in cold
    lines = [line.split() for line in warm.splitlines()]
    assert ["tvd", "-0.070", "-0.020"] in lines
    assert ["neg_log_alpha", "+0.100"] in lines
    order = [words[0] for words in lines if words and words[0] in ("forward_kl", "jsd", "tvd")]
    assert order == ["forward_kl", "jsd", "tvd"]
    for part in ("[0.110,0.130]", "x1.50", "its own cell and not of all 6 at once"):
        assert part in " ".join(warm.split())


def test_a_cell_is_paired_with_the_better_plain_training_on_the_same_continuations():
    worse = judged("next_token", "target", -0.3, after=(1.0, 2.0))
    over = gain_over(CELLS[4], PLAIN[0])
    assert over["mean"] == pytest.approx((26 - 26) / 40)
    better = judged("tvd", "fixed", after=(9.0, 25.0))
    assert gain_over(better[0], PLAIN[0])["mean"] == pytest.approx((34 - 26) / 40)
    text = printed([*CELLS, *better, *PLAIN, *worse])
    (_, shown, *_), lines = text.split("alpha over "), []
    assert shown.startswith("next_token on fixed text, temperature 0")
    lines = [line.split() for line in shown.splitlines()]
    assert ["tvd", "+0.200", "+0.000"] in lines
    assert ["neg_log_alpha"] in lines  # of other continuations
    assert "(no interval)" in shown  # two documents
    assert "alpha over" not in printed(CELLS)
