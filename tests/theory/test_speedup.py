"""The walltime model reproduces the published table, examples and its own algebra."""

from dataclasses import replace

import pytest

from draftkit.theory.speedup import (
    Costs,
    best_gamma,
    break_even_alpha,
    by_gamma,
    ceiling,
    expected_tokens,
    speedup_from_length,
)

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# Best gamma and factor for v = 1, o = 0: rows of the cost ratio c, columns of alpha.
BEST = {
    0.01: "3: 1.38 | 4: 1.59 | 5: 1.88 | 7: 2.30 | 9: 2.97 | 14: 4.23 | 24: 7.49",
    0.02: "3: 1.34 | 3: 1.53 | 4: 1.79 | 6: 2.17 | 8: 2.76 | 11: 3.82 | 19: 6.37",
    0.05: "2: 1.26 | 2: 1.42 | 3: 1.63 | 4: 1.92 | 6: 2.35 | 8: 3.09 | 13: 4.67",
    0.10: "1: 1.18 | 2: 1.30 | 2: 1.46 | 3: 1.67 | 4: 1.98 | 6: 2.47 | 10: 3.43",
    0.12: "1: 1.16 | 2: 1.26 | 2: 1.41 | 3: 1.60 | 4: 1.87 | 5: 2.31 | 9: 3.13",
    0.20: "1: 1.08 | 1: 1.17 | 1: 1.25 | 2: 1.40 | 3: 1.58 | 4: 1.87 | 7: 2.37",
    0.35: "0: 1 | 1: 1.04 | 1: 1.11 | 1: 1.19 | 2: 1.29 | 3: 1.44 | 4: 1.71",
    0.50: "0: 1 | 0: 1 | 0: 1 | 1: 1.07 | 1: 1.13 | 2: 1.22 | 3: 1.38",
}
CELLS = [
    (alpha, cost_ratio, *cell.split(":"))
    for cost_ratio, line in BEST.items()
    for alpha, cell in zip(ALPHAS, line.split("|"), strict=True)
]


def improvement_factor(alpha: float, gamma: int, *costs: float) -> float:
    """Of theorem 3.8: the speed-up at the expected tokens of a round."""
    return speedup_from_length(expected_tokens(alpha, gamma), gamma, *costs)


def costs_of(cost_ratio: float) -> Costs:
    """Verification that stays memory-bound: v = 1, and nothing besides."""
    return Costs(1.0, cost_ratio, 1.0, 0.0, {1: 1.0})


def test_the_best_gamma_and_its_factor_are_those_of_the_published_table() -> None:
    for alpha, cost_ratio, gamma, factor in CELLS:
        found, value = best_gamma(alpha, costs_of(cost_ratio), max_gamma=40)
        assert found == int(gamma), (alpha, cost_ratio)
        # Halves of the last printed digit may have been rounded either way.
        assert value == pytest.approx(float(factor), abs=0.00501), (alpha, cost_ratio)


def test_a_large_draft_for_an_eight_billion_target_is_advised_against() -> None:
    # c = .596, alpha .813 measured on Llama 3.1 8B with 3.2 1B.
    assert ceiling(5, 0.596) == pytest.approx(1.507, abs=1e-3)
    assert max(ceiling(gamma, 0.596) for gamma in range(1, 5000)) == pytest.approx(1.68, abs=5e-3)
    assert break_even_alpha(5, 0.596) == pytest.approx(0.832, abs=5e-4)
    assert improvement_factor(0.813, 5, 0.596) == pytest.approx(0.955, abs=1e-3)
    assert best_gamma(0.813, costs_of(0.596), max_gamma=10)[0] == 1
    assert improvement_factor(0.813, 1, 0.596) == pytest.approx(1.136, abs=5e-4)


def test_the_factor_is_the_closed_form_of_theorem_3_8() -> None:
    for alpha in (0.0, 0.3, 0.9):
        for gamma in (0, 1, 7):
            closed = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * 0.07 + 1))
            assert improvement_factor(alpha, gamma, 0.07) == pytest.approx(closed, rel=1e-12)
            assert expected_tokens(alpha, gamma) == pytest.approx(
                (1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-12
            )
    assert expected_tokens(1.0, 7) == 8


def test_measured_verification_and_overhead_enter_the_cost_of_a_round() -> None:
    assert speedup_from_length(3.0, 4, 0.1, 1.3, 0.3) == pytest.approx(3.0 / 2.0)
    assert improvement_factor(0.5, 2, 0.1, 1.2, 0.1) == pytest.approx(1.75 / 1.5)
    assert ceiling(4, 0.1, 1.3, 0.3) == pytest.approx(2.5)


@pytest.mark.parametrize("costs", [(0.1, 1.0, 0.0), (0.3, 1.4, 0.2), (0.596, 1.0, 0.0)])
@pytest.mark.parametrize("gamma", [1, 4, 9])
def test_at_the_break_even_alpha_the_factor_is_one(
    gamma: int, costs: tuple[float, float, float]
) -> None:
    alpha = break_even_alpha(gamma, *costs)
    assert alpha is not None
    assert improvement_factor(alpha, gamma, *costs) == pytest.approx(1.0, abs=1e-12)
    assert improvement_factor(alpha + 0.01, gamma, *costs) > 1


def test_a_round_dearer_than_all_its_tokens_has_no_break_even_alpha() -> None:
    assert break_even_alpha(3, 1.2) is None
    assert ceiling(3, 1.2) < 1
    assert break_even_alpha(3, 1.0) == 1.0  # costs exactly what a perfect draft returns
    assert break_even_alpha(3, 0.0) == pytest.approx(0.0, abs=1e-12)


def test_the_best_gamma_reads_verification_from_a_table_and_may_be_zero() -> None:
    steep = {gamma: 1 + 0.6 * gamma for gamma in range(1, 9)}
    assert best_gamma(0.8, costs_of(0.05), max_gamma=8)[0] == 8
    found, factor = best_gamma(0.8, Costs(1.0, 0.05, 1.6, 0.0, steep), max_gamma=8)
    assert found == 1
    assert factor == pytest.approx(1.8 / 1.65)
    assert best_gamma(0.8, Costs(1.0, 0.05, 1.6, 1.0, steep), max_gamma=8) == (0, 1.0)
    assert best_gamma(0.9, costs_of(0.0), max_gamma=0) == (0, 1.0)


def test_of_equal_factors_the_smaller_gamma_is_chosen() -> None:
    assert best_gamma(0.5, costs_of(0.5), max_gamma=5) == (0, 1.0)  # gamma 1 gives 1 too


def test_verification_costs_between_measured_gammas_and_beyond_lie_on_the_line() -> None:
    costs = Costs(0.01, 0.1, 1.2, 0.1, verify_ratios={8: 1.9, 1: 1.0, 2: 1.1, 4: 1.5})
    assert [costs.verify_at(gamma) for gamma in (1, 2, 4, 8)] == pytest.approx([1.0, 1.1, 1.5, 1.9])
    assert costs.verify_at(3) == pytest.approx(1.3)
    assert costs.verify_at(6) == pytest.approx(1.7)
    assert costs.verify_at(12) == pytest.approx(2.3)
    assert costs.verify_at(0) == pytest.approx(0.9)


def test_one_measured_gamma_gives_a_constant_cost_and_none_is_refused() -> None:
    costs = Costs(0.01, 0.1, 1.2, 0.1, verify_ratios={4: 1.2})
    assert [costs.verify_at(gamma) for gamma in (0, 1, 4, 9)] == [1.2] * 4
    with pytest.raises(ValueError, match="verify_ratios is empty"):
        Costs(0.01, 0.1, 1.2, 0.1, verify_ratios={})


def test_what_proposing_costs_lies_on_the_line_between_measured_numbers() -> None:
    serial = Costs(0.01, 0.1, 1.0, 0.1, {1: 1.0}, draft_units={1: 0.1, 4: 0.4, 12: 1.2})
    plain = Costs(0.01, 0.1, 1.0, 0.1, {1: 1.0})
    for gamma in (0, 1, 3, 4, 7, 12, 16):
        assert serial.draft_at(gamma) == pytest.approx(plain.draft_at(gamma))
        assert serial.round_at(gamma) == pytest.approx(0.1 * gamma + 1.1)
    assert serial.at(7) == replace(serial, cost_ratio=pytest.approx(0.1))


def test_a_draft_of_one_pass_is_worth_more_proposals_by_its_own_table() -> None:
    parallel = Costs(0.01, 0.1, 1.0, 0.0, {1: 1.0}, draft_units={1: 0.1, 12: 0.1})
    assert parallel.draft_at(0) == 0
    assert parallel.at(4).cost_ratio == pytest.approx(0.025)
    assert best_gamma(0.8, parallel, 12)[0] == 12
    assert best_gamma(0.8, replace(parallel, draft_units={}), 12)[0] == 6
    assert by_gamma([1.5, 2.0], parallel) == pytest.approx([1.0, 1.5 / 1.1, 2.0 / 1.1])
