"""Predicted against counted: a planted difference is seen, chance is not taken for one."""

import random

import pytest

from tests.engines.comparison import Cell, compared, greedy, holm, rate_of_turn, row, speed
from tests.engines.counts import Answer, answer_of

GAMMA, PROMPTS, PASSES = 4, 40, 12


def turn(acceptance: float, seed: int, *, seconds: float = 1.0) -> list[Answer]:
    """Answers whose proposals are each accepted with probability `acceptance`."""
    random.seed(seed)
    answers = []
    for _ in range(PROMPTS):
        counts = []
        for _ in range(PASSES):
            count = 0
            while count < GAMMA and random.random() < acceptance:
                count += 1
            counts.append(count)
        one = answer_of(counts, [1] * (sum(counts) + PASSES), GAMMA)
        answers.append(Answer(**{**vars(one), "seconds": seconds}))
    return answers


def cell(engine: float, ours: float, *, seed: int = 0, temperature: float = 1.0) -> Cell:
    return Cell(
        drafts="sampled",
        temperature=temperature,
        drafted=[turn(engine, seed)],
        plain=[turn(0.0, seed)],
        ours=[turn(ours, seed + 1)],
    )


def test_holm_multiplies_the_smallest_by_their_number_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9]) == [0.9]
    assert holm([0.5, 0.6]) == [1.0, 1.0]


def test_a_planted_difference_is_seen_in_its_cell_alone() -> None:
    rows = compared([cell(0.6, 0.6), cell(0.6, 0.4, seed=2)])
    assert [one["agrees"] for one in rows] == [True, False]
    low, high = rows[1]["difference"]["ci95"]
    expected = sum(0.6**n for n in range(GAMMA + 1)) - sum(0.4**n for n in range(GAMMA + 1))
    assert 0 < low < expected < high
    assert rows[1]["counted_by_position"][0] == pytest.approx(0.6, abs=0.06)
    assert rows[1]["predicted_by_position"][0] == pytest.approx(0.4, abs=0.06)


@pytest.mark.parametrize("sign", [1, -1])
def test_both_directions_are_differences(sign: int) -> None:
    rates = (0.6, 0.4)[::sign]
    one = row(cell(*rates))
    assert one["p"] < 1e-6
    assert (one["difference"]["mean"] > 0) == (sign > 0)


def test_chance_is_taken_for_a_difference_as_often_as_the_level_says() -> None:
    wrong = sum(row(cell(0.5, 0.5, seed=2 * seed + 10))["p"] < 0.05 for seed in range(200))
    assert 2 <= wrong <= 22  # of 200, binomial with 0.05: outside with probability 0.0009


def test_our_decoder_may_answer_more_often_than_the_engine() -> None:
    """Greedy texts once and three times are no difference; sampled ones make it surer."""
    one = turn(0.5, 1)
    same = Cell(drafts="argmax", temperature=0, drafted=[one] * 3, plain=[], ours=[one])
    assert row(same)["p"] == 1
    few, many = (
        Cell(
            drafts="sampled",
            temperature=1,
            drafted=[turn(0.5, 1)],
            plain=[],
            ours=[turn(0.5, seed) for seed in range(2, 2 + times)],
        )
        for times in (1, 8)
    )
    widths = []
    for cell_of_few in (few, many):
        low, high = row(cell_of_few)["difference"]["ci95"]
        widths.append(high - low)
    assert widths[1] < 0.85 * widths[0]  # 0.75 by the law of large numbers


def test_equal_counts_have_no_difference() -> None:
    same = Cell(
        drafts="argmax", temperature=0, drafted=[turn(0.5, 1)], plain=[], ours=[turn(0.5, 1)]
    )
    one = row(same)
    assert one["p"] == 1
    assert one["difference"]["mean"] == 0
    assert one["speed"] is None
    assert greedy([same]) == [
        {"drafts": "argmax", "compared": PROMPTS, "same_as_plain": None, "same_as_ours": PROMPTS}
    ]


def test_speed_is_compared_turn_by_turn() -> None:
    turns = [turn(0.5, seed, seconds=seconds) for seed, seconds in ((1, 2.0), (1, 1.0), (1, 4.0))]
    plain = [turn(0.5, 1, seconds=2.0)] * 3
    one = Cell(drafts="sampled", temperature=1, drafted=turns, plain=plain, ours=turns)
    measured = speed(one)
    assert measured is not None
    assert measured["speedup"] == {"median": 1.0, "least": 0.5, "most": 2.0}
    assert measured["tokens_per_second"]["plain"]["median"] == rate_of_turn(plain[0])


def test_prompts_without_a_pass_on_either_side_are_left_out() -> None:
    one = cell(0.5, 0.5)
    nothing = Answer(ids=[1], by_position=[0] * GAMMA)
    short = Cell(**{**vars(one), "drafted": [[nothing, *one.drafted[0][1:]]]})
    assert row(short)["counted"]["prompts"] == PROMPTS - 1
    empty = Cell(**{**vars(one), "drafted": [[nothing] * PROMPTS]})
    with pytest.raises(ValueError, match=r"^fewer than 2"):
        row(empty)
