"""Cells stand where they belong, with their intervals, and seeds together."""

import io

import pytest
from rich.console import Console

from draftkit.evaluation.matrix import (
    cell_text,
    cells_of,
    heat_map,
    is_matrix,
    matrix_table,
    temperatures,
)


def number(mean):
    return {"mean": mean, "ci95": [mean - 0.01, mean + 0.01], "n": 10, "prompts": 5}


def summary(gain, length=3.0):
    part = {
        "alpha": number(0.7 + gain),
        "alpha_gain": number(gain),
        "acceptance_length": number(length),
        "before": {"acceptance_length": number(2.0)},
    }
    return {"by_temperature": {"1": part, "0": part}}


def cells():
    found = []
    for divergence, source, gain in [
        ("forward_kl", "fixed", 0.05),
        ("forward_kl", "draft", 0.12),
        ("tvd", "draft", -0.02),
        ("neg_log_alpha", "draft", 0.1),
        ("next_token", "fixed", 0.01),
    ]:
        found += cells_of(divergence, source, summary(gain))
    return found


def printed(table):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(table)
    return console.file.getvalue()


def test_an_evaluation_has_a_cell_for_each_temperature():
    assert temperatures(cells()) == [0.0, 1.0]
    assert len(cells()) == 10
    assert cells_of("tvd", "draft", {"by_temperature": {"1": {"alpha": number(0.5)}}}) == []
    assert cells_of("tvd", "draft", {}) == []


def test_a_matrix_has_several_divergences_and_several_sources():
    assert is_matrix(cells())
    assert not is_matrix([cell for cell in cells() if cell.source == "draft"])
    assert not is_matrix([cell for cell in cells() if cell.divergence == "forward_kl"])
    assert not is_matrix([])


def test_the_table_fits_eighty_columns_and_leaves_empty_what_was_not_run():
    wide = [*cells()]
    for source in ("target", "mix"):
        wide += cells_of("neg_log_alpha", source, summary(0.07))
    text = printed(matrix_table(wide, 1.0))
    assert max(map(len, text.splitlines())) <= 80
    assert "temperature 1" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("tvd"))
    assert line.split() == ["tvd", "-0.020"]
    assert "[0.11, 0.13]" in text
    assert "x1.50" in text


def test_seeds_of_a_cell_stand_together():
    both = [cells_of("tvd", "draft", summary(gain))[0] for gain in (0.1, 0.2)]
    assert cell_text(both) == "+0.150\n[0.09, 0.21]\nx1.50 n=2"


def test_the_figure_shows_every_temperature(tmp_path):
    image = pytest.importorskip("PIL.Image")
    heat_map(cells(), tmp_path / "map.png")
    with image.open(tmp_path / "map.png") as found:
        assert found.width > 1.2 * found.height
