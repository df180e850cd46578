"""Cells stand where they belong, with their intervals, and seeds together."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from pipelines.experiments.matrix import (
    cell_text,
    cells_of,
    control,
    control_table,
    gain,
    grid,
    heat_map,
    is_matrix,
    matrix_table,
    over_control,
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


def settings(divergence, source, seed=0):
    return {"divergence": {"name": divergence}, "source": {"name": source}, "seed": seed}


def cells():
    found = []
    for divergence, source, gained in [
        ("forward_kl", "fixed", 0.05),
        ("forward_kl", "draft", 0.12),
        ("tvd", "draft", -0.02),
        ("neg_log_alpha", "draft", 0.1),
        ("next_token", "fixed", 0.01),
    ]:
        found += cells_of(settings(divergence, source), summary(gained))
    return found


def printed(table):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(table)
    return console.file.getvalue()


def test_an_evaluation_has_a_cell_for_each_temperature():
    assert temperatures(cells()) == [0.0, 1.0]
    assert len(cells()) == 10
    assert (
        cells_of(settings("tvd", "draft"), {"by_temperature": {"1": {"alpha": number(0.5)}}}) == []
    )
    assert cells_of(settings("tvd", "draft"), {}) == []


def test_a_matrix_has_several_divergences_and_several_sources():
    assert is_matrix(cells())
    assert not is_matrix([cell for cell in cells() if cell.source == "draft"])
    assert not is_matrix([cell for cell in cells() if cell.divergence == "forward_kl"])
    assert not is_matrix([])


def test_the_table_fits_eighty_columns_and_leaves_empty_what_was_not_run():
    wide = [*cells()]
    for source in ("target", "mix"):
        wide += cells_of(settings("neg_log_alpha", source), summary(-0.07))
    text = printed(matrix_table(wide, 1.0))
    assert max(map(len, text.splitlines())) <= 80
    assert "temperature 1" in text
    line = next(line for line in text.splitlines() if line.strip().startswith("tvd"))
    assert line.split() == ["tvd", "-0.020"]
    assert "[0.110,0.130]" in text
    assert "x1.50" in text
    assert text.count("[-0.080,-0.060]") == 2


def test_the_tables_say_that_intervals_are_those_of_single_cells():
    plain = judged("next_token", "fixed", 0, [6.0, 20.0], [5.0, 15.0])
    taught = judged("tvd", "draft", 0, [8.0, 18.0], [5.0, 15.0])
    for table, count in (
        (matrix_table(cells(), 1.0), 5),
        (control_table([plain, taught], 1.0), 2),
    ):
        text = " ".join(printed(table).split())
        assert f"each of its own cell and not of all {count} at once" in text


def judged(divergence, source, seed, after, before):
    """A cell with what was found on prompts of 10 and 30 positions."""
    sums = {"positions": [10.0, 30.0], "documents": [0, 1]}
    part = {"contexts": f"c{seed}", "after": sums | {"alpha": after}, "before": {"alpha": before}}
    return cells_of(settings(divergence, source, seed), summary(0.1), {"1": part, "0": part})[0]


def test_seeds_of_a_cell_stand_together_over_their_prompts():
    both = [
        judged("tvd", "draft", 0, [8.0, 18.0], [5.0, 15.0]),
        judged("tvd", "draft", 1, [9.0, 25.0], [5.0, 25.0]),
    ]
    found = gain(both)
    assert found["mean"] == pytest.approx((26 - 20 + 34 - 30) / 80)
    assert found["prompts"] == 2  # seeds of a prompt are no new prompts
    assert cell_text(both).startswith("+0.125\n(no interval)")  # two documents
    assert cell_text(both).endswith("x1.50 n=2")
    assert gain(both[:1])["mean"] == pytest.approx(0.1)  # as the evaluation said
    blind = cells_of(settings("tvd", "draft", 2), summary(0.1))
    with pytest.raises(ValueError, match=r"prompts\.json"):
        gain([*both, blind[0]])
    order = list(grid([*both, *cells()], 1.0))
    assert order == ["forward_kl", "tvd", "neg_log_alpha", "next_token"]


def test_a_cell_is_paired_with_the_better_plain_training_of_its_seed():
    controls = [
        judged("next_token", "fixed", 0, [6.0, 20.0], [5.0, 15.0]),
        judged("next_token", "fixed", 1, [7.0, 21.0], [5.0, 15.0]),
    ]
    worse = judged("next_token", "target", 0, [1.0, 2.0], [5.0, 15.0])
    cells = [
        judged("tvd", "draft", 0, [8.0, 18.0], [5.0, 15.0]),
        judged("tvd", "draft", 1, [9.0, 25.0], [5.0, 25.0]),
        judged("jsd", "draft", 2, [9.0, 25.0], [5.0, 25.0]),
    ]
    better = [replace(cell, judged=cell.judged | {"alpha": number(0.9)}) for cell in controls]
    chosen = control([*cells, worse, *better], 1.0)
    assert chosen == better
    found = over_control(cells[:2], chosen)
    assert found["mean"] == pytest.approx((26 - 26 + 34 - 28) / 80)
    assert over_control(cells[2:], chosen) is None  # nobody of its seed
    assert control(cells, 1.0) == []
    text = " ".join(printed(control_table([*cells, worse, *better], 1.0)).split())
    assert "next_token on fixed text, temperature 1" in text
    assert "+0.075" in text
    assert control_table(cells, 1.0) is None


def test_the_figure_shows_every_temperature(tmp_path):
    image = pytest.importorskip("PIL.Image")
    heat_map(cells(), tmp_path / "map.png")
    with image.open(tmp_path / "map.png") as found:
        assert found.width > 1.2 * found.height
