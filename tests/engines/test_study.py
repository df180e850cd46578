"""The page of engines is what the rows say, and a new measurement takes the place of an old one."""

from draftkit.artifacts import read_json
from tests.engines.study import KEY, PAGE, ROWS, merged, page, rounded


def test_the_page_is_written_from_the_rows() -> None:
    rows = read_json(ROWS)
    assert merged(rows, []) == rows
    assert PAGE.read_text() == page(rows)
    both = len({tuple(row[key] for key in KEY[:-1]) for row in rows})  # temperatures on one line
    assert page(rows).count("\n| ") == both + 2


def test_a_measurement_takes_the_place_of_an_older_one_of_the_same() -> None:
    first, *others = read_json(ROWS)
    again = first | {"commit": "new"}
    assert merged([first, *others], [again]) == [again, *others]
    other = first | {"drafts": "another"}
    assert len(merged([first, *others], [other])) == len(others) + 2


def test_estimates_are_kept_to_four_digits() -> None:
    number = {"mean": 1.23456, "ci95": [1.11111, 1.99999], "n": 5}
    assert rounded(number) == {"mean": 1.2346, "ci95": [1.1111, 2.0]}
